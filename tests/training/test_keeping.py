import pytest
import torch

from listwise.data import Decoding, ImageError, decode_photos, read_labelled
from listwise.data.kept_photos import KeptPhotos
from listwise.training import keeping
from listwise.training.keeping import DecodedOnce, keep_photos

CPU = torch.device("cpu")


@pytest.fixture
def memory(monkeypatch):
    """A device that decodes, with memory of its own: 8 GB are free, and 4 GB on the host."""
    free = {"cpu": 4e9, "meta": 8e9}
    monkeypatch.setattr(keeping, "gpu_decodes", lambda device: True)
    monkeypatch.setattr(keeping, "free_bytes", lambda device: int(free[device.type]))
    return free


def test_photos_are_kept_where_they_fit(memory):
    device = torch.device("meta")
    kept, line = keep_photos(10, int(1.9e9), device)
    assert kept.on_device
    assert kept.budget == 1.9e9
    assert line == "decoded photos are kept in GPU memory: 1.9 GB of 2.0 GB allowed"
    memory["meta"] = 4e9
    kept, line = keep_photos(10, int(1.9e9), device)
    assert not kept.on_device
    assert kept.budget == 1.9e9
    assert "kept in host memory: 1.9 GB of 2.0 GB allowed; the GPU may use 1.0 GB" in line
    memory["cpu"] = 3e9
    kept, line = keep_photos(10, int(1.9e9), device)
    assert kept is None
    assert "decoded again in every update: they would take 1.9 GB" in line
    assert "GPU (1.0 GB) and on the host (1.5 GB)" in line


def test_processes_of_a_machine_share_the_host_memory(memory, monkeypatch):
    memory["meta"] = 0
    assert keep_photos(10, int(1.9e9), torch.device("meta"))[0] is not None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert keep_photos(10, int(1.9e9), torch.device("meta"))[0] is None


def test_a_device_that_does_not_decode_keeps_nothing():
    assert keep_photos(10, 100, CPU) == (None, "")


def same(a, b):
    if isinstance(a, ImageError):
        return str(a) == str(b)
    return torch.equal(a.pixels, b.pixels) and a[1:] == b[1:]


@pytest.mark.parametrize(("budget", "decodings"), [(10**6, 1), (20_000, 3), (None, 3)])
def test_validation_photos_are_decoded_once(photos, tmp_path, monkeypatch, budget, decodings):
    calls = []

    def decode(*arguments):
        calls.append(arguments)
        return decode_photos(*arguments)

    monkeypatch.setattr(keeping, "decode_photos", decode)
    images = read_labelled(photos)
    (tmp_path / "broken.jpg").write_bytes(b"not a photo")
    paths = [*images.paths[:3], str(tmp_path / "broken.jpg"), *images.paths[4:]]
    object.__setattr__(images, "paths", tuple(paths))
    expected = list(decode_photos(images.files(), Decoding(48)))
    kept = None if budget is None else KeptPhotos(5 + len(images), CPU, budget, on_device=True)
    once = DecodedOnce(images, 48, 0, CPU, kept, first=5)
    for _ in range(3):
        found = list(once)
        assert len(found) == len(expected)
        assert all(map(same, found, expected))
    assert len(calls) == decodings


def test_an_interrupted_validation_decodes_again(photos):
    images = read_labelled(photos)
    once = DecodedOnce(images, 48, 0, CPU, KeptPhotos(len(images), CPU, 10**6, True), first=0)
    some = iter(once)
    next(some)
    some.close()
    assert len(list(once)) == len(images)
    assert len(list(once)) == len(images)
