import numpy as np
import pytest
import torch

from listwise.data import kept_photos
from listwise.data.kept_photos import KeptPhotos

CPU = torch.device("cpu")


def photo(width, height, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("on_device", [True, False])
def test_photos_come_back_unchanged(on_device):
    kept = KeptPhotos(5, CPU, 10_000, on_device)
    photos = {3: photo(20, 10), 0: photo(7, 31, 1), 4: photo(40, 30, 2)[:, 5:25, 3:24]}
    for number, pixels in photos.items():
        assert kept.add(number, pixels)
    assert kept.has(np.arange(5)).tolist() == [True, False, False, True, True]
    assert len(kept) == 3
    for number, pixels in photos.items():
        assert torch.equal(kept.photo(number), pixels)
    widths, heights = kept.sizes(np.array([4, 0]))
    assert (widths.tolist(), heights.tolist()) == ([21, 7], [20, 31])


@pytest.mark.parametrize("on_device", [True, False])
def test_the_budget_is_kept(monkeypatch, on_device):
    monkeypatch.setattr(kept_photos, "HOST_BLOCK", 1000)
    kept = KeptPhotos(100, CPU, 2500, on_device)
    fits = [kept.add(i, photo(10, 10)) for i in range(10)]
    # Host memory is taken in blocks of three photos; the last block is smaller.
    assert sum(fits) == (8 if on_device else 7)
    assert kept.bytes <= 2500
    assert not kept.add(50, photo(40, 40))
    assert not kept.has(np.array([50])).any()
    assert len(kept) == sum(fits)
    assert kept.add(0, photo(10, 10))  # is kept already


def test_nothing_is_allocated_before_the_first_photo():
    assert KeptPhotos(10, CPU, 10**12, on_device=True).bytes == 0


def test_a_validation_may_add_photos_before_training_does():
    kept = KeptPhotos(2, CPU, 10_000, on_device=True)
    with torch.inference_mode():
        assert kept.add(0, photo(10, 10))
    assert kept.add(1, photo(10, 10, 1))
    assert torch.equal(kept.photo(1), photo(10, 10, 1))
