"""The whitening of a model folder, learned from Python."""

import numpy as np
import pytest
import torch

from listwise.data import read_images, read_labelled
from listwise.descriptors import Whitening, extract, learn_whitening, load_model, remove_whitening
from listwise.errors import InputError
from listwise.models import RetrievalNet


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    RetrievalNet("test_resnet.r160_in1k", weights="random").save(tmp_path / "model")
    return tmp_path / "model"


def test_photos_and_their_descriptors_teach_the_same(folder, photos, tmp_path):
    done = []
    learned = learn_whitening(folder, photos, dim=8, device="cpu", on_progress=done.append)
    assert sum(done) == 48
    remove_whitening(folder)
    plain = load_model(folder, "cpu")
    assert plain.whitening is None
    file = extract(plain, read_images(photos), tmp_path / "plain.parquet", workers=0)
    expected = Whitening.learn([file.read()], dim=8)
    again = learn_whitening(folder, file, dim=8, device="cpu")
    for found in (learned, again, load_model(folder, "cpu").whitening):
        np.testing.assert_allclose(found.projection, expected.projection, rtol=0, atol=1e-4)


def test_the_folder_of_a_run_stands_for_its_model(folder, photos):
    learn_whitening(folder.parent, photos, dim=4, device="cpu")
    assert load_model(folder, "cpu").dim == 4
    remove_whitening(folder.parent)
    assert load_model(folder, "cpu").whitening is None


def test_an_argument_that_does_not_fit_is_named(folder, photos):
    with pytest.raises(InputError, match="`power` is for PCA: leave it out with `supervised`"):
        learn_whitening(folder, read_labelled(photos), power=0.5, supervised=True)
    with pytest.raises(InputError, match="`supervised` needs labels"):
        learn_whitening(folder, read_images(photos), supervised=True, device="cpu")
    with pytest.raises(InputError, match="has no whitening to remove"):
        remove_whitening(folder)
    assert not (folder / "whitening.parquet").exists()
