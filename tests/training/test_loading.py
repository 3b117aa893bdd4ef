import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch

from listwise.data import CropDataset, CropSettings, read_labelled
from listwise.data.workers import explain_lost_workers
from listwise.errors import InputError
from listwise.training.loading import load_batches


@pytest.fixture
def dataset(photos):
    return CropDataset(read_labelled(photos), CropSettings(size=16), seed=3)


def draw(update):
    """22 of the 48 images: more than one chunk, and not a multiple of it."""
    return np.random.default_rng(update).permutation(48)[:22]


def test_batches_are_the_same_from_any_number_of_workers_and_in_order(dataset):
    before = torch.get_rng_state()
    here = list(load_batches(dataset, draw, range(2, 6), workers=0))
    there = list(load_batches(dataset, draw, range(2, 6), workers=2))
    assert len(here) == len(there) == 4
    for update, a, b in zip(range(2, 6), here, there, strict=True):
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels, b.labels)
        assert a.labels.tolist() == dataset.images.labels[draw(update)].tolist()
        assert torch.equal(a.images[5], dataset[(update, int(draw(update)[5]))].image)
        assert a.images.dtype == torch.uint8
        assert not a.errors
    assert not torch.equal(here[0].images, here[1].images)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_broken_photo_is_replaced_and_reported(photos, tmp_path):
    images = read_labelled(photos)
    broken = tmp_path / "broken.jpg"
    with open(images.paths[4], "rb") as file:
        broken.write_bytes(file.read()[:-600])
    paths = list(images.paths)
    paths[4] = str(broken)
    object.__setattr__(images, "paths", tuple(paths))
    dataset = CropDataset(images, CropSettings(size=16), seed=0)
    for workers in (0, 1):
        (batch,) = load_batches(dataset, lambda update: np.arange(20), range(1), workers)
        assert len(batch.images) == 20
        assert batch.labels.tolist() == images.labels[:20].tolist()
        (error,) = batch.errors
        assert error.startswith(str(broken))


def test_a_class_without_a_readable_photo_is_one_line(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(3):
            (tmp_path / name / f"{i}.jpg").write_bytes(b"no photo")
    dataset = CropDataset(read_labelled(tmp_path), CropSettings(size=16), seed=0)
    for workers in (0, 2):
        with pytest.raises(InputError, match="no photo of the class 'a' can be decoded") as caught:
            list(load_batches(dataset, lambda update: np.arange(6), range(3), workers))
        assert "\n" not in str(caught.value)
        assert str(tmp_path / "a" / "0.jpg") in str(caught.value)


def test_a_worker_that_the_system_ends_is_one_line(dataset):
    batches = load_batches(dataset, draw, range(200), workers=1)
    next(batches)
    (worker,) = multiprocessing.active_children()
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(InputError, match="fewer `workers`"), explain_lost_workers():
        list(batches)
