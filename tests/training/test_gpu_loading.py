"""Batches that a GPU makes, here by Triton's interpreter and with the CPU as the device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("triton")
pytest.importorskip("torchvision")

# The interpreter must be chosen before Triton is imported, so batches are made in a process.
SCRIPT = """
import json, sys, threading
import numpy as np
import torch
from listwise.data import CropDataset, CropSettings, read_labelled
from listwise.data import gpu_photos, gpu_resample
from listwise.data.kept_photos import KeptPhotos
from listwise.errors import InputError
from listwise.training import loading

folder, where = sys.argv[1], torch.device(sys.argv[2])
torch.set_num_threads(1)
images = read_labelled(folder)
if where.type == "cpu":
    loading.gpu_decodes = lambda device: True
    gpu_resample.ROWS = gpu_resample.COLUMNS = 32
    loading.GPU_CHUNK = 4
    loading.KEPT_CHUNK = 5


def draw(update):
    return np.random.default_rng(update).permutation(len(images))[:11]


dataset = CropDataset(images, CropSettings(size=24, flip=0.5), seed=3)


def load(workers):
    before = torch.get_rng_state()
    batches = loading.load_batches(dataset, draw, range(2, 4), workers, device=where)
    result = []
    try:
        for update, batch in zip(range(2, 4), batches, strict=True):
            crops = [dataset[update, int(i)] for i in draw(update)]
            result.append({
                "difference": [
                    (a.cpu().float() - b.image.float()).abs().mean().item()
                    for a, b in zip(batch.images, crops, strict=True)
                ],
                "labels": batch.labels.tolist() == [crop.label for crop in crops],
                "errors": list(batch.errors),
                "expected": [error for crop in crops for error in crop.errors],
                "device": str(batch.images.device.type),
            })
    except InputError as error:
        result = str(error)
    batches.close()
    threads = threading.active_count()
    assert torch.equal(torch.get_rng_state(), before)

    early = loading.load_batches(dataset, draw, range(2, 50), workers, device=where)
    if not isinstance(result, str):
        next(early)
    early.close()
    assert threading.active_count() <= threads, threading.enumerate()
    return result


def batches(kept):
    made = loading.load_batches(dataset, draw, range(2, 6), 1, device=where, kept=kept)
    return [(batch.images.cpu(), batch.labels, batch.errors) for batch in made]


def compare(budget, on_device):
    # Batches from kept photos, and batches of the same photos decoded for each update.
    decoded = []

    def count(contents, device):
        decoded.extend(bytes(content.tolist()) for content in contents)
        return original(contents, device)

    kept = KeptPhotos(len(images), where, budget, on_device)
    original, gpu_photos.decode_jpegs = gpu_photos.decode_jpegs, count
    made = batches(kept)
    gpu_photos.decode_jpegs = original
    once = len(decoded) == len(set(decoded))
    same = all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and a[2] == b[2]
        for a, b in zip(made, batches(None), strict=True)
    )
    again = all(
        torch.equal(a[0], b[0]) and a[2] == b[2]
        for a, b in zip(made, batches(kept), strict=True)
    )
    right = all(
        torch.equal(kept.photo(i).cpu(), kept.on_gpu(np.array([i]))[1].view_as(kept.photo(i)).cpu())
        for i in range(len(images)) if not on_device and kept.has(np.array([i])).all()
    )
    return same and again and right, once, len(kept), kept.bytes, len(kept.unreadable)


if sys.argv[3] == "kept":
    print(json.dumps([compare(*case) for case in json.loads(sys.argv[4])]))
else:
    print(json.dumps([load(int(workers)) for workers in sys.argv[3:]]))
"""


def run(folder, device, *workers):
    """What is loaded with each number of workers."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1" if device == "cpu" else "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", SCRIPT, str(folder), device, *map(str, workers)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def draw(update):
    """The photos of a batch, as the script draws them."""
    return np.random.default_rng(update).permutation(16)[:11]


def need(device):
    if device == "cuda" and not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("needs a CUDA GPU")


@pytest.fixture
def folder(tmp_path):
    """Two classes of photos of all kinds, one of them broken."""
    for i in range(16):
        path = tmp_path / "ab"[i % 2] / f"{i:02}.{'png' if i == 5 else 'jpg'}"
        path.parent.mkdir(exist_ok=True)
        cells = np.random.default_rng(i).integers(0, 255, (4, 5, 3)).astype(np.uint8)
        photo = Image.fromarray(cells).resize((40 + i, 50 - i), Image.Resampling.BICUBIC)
        turn = Image.Exif()
        turn[0x0112] = 6 if i == 8 else 1
        photo = photo.convert("L") if i == 9 else photo
        photo.save(path, quality=95, exif=turn, progressive=i == 3)
        if i == 12:
            path.write_bytes(path.read_bytes()[:-300])
    return tmp_path


@pytest.mark.parametrize(("device", "workers"), [("cpu", (0, 2)), ("cuda", (4,))])
def test_batches_are_nearly_those_of_workers(folder, device, workers):
    need(device)
    for batches in run(folder, device, *workers):
        assert len(batches) == 2
        for batch in batches:
            assert batch["labels"]
            assert batch["errors"] == batch["expected"]
            # Pictures of a few cells: other ways to spread colors show more than in photos.
            assert max(batch["difference"]) < (3.0 if device == "cpu" else 6.0)
            assert np.mean(batch["difference"]) < 1.5
            assert batch["device"] == device
        assert sum(len(batch["errors"]) for batch in batches) > 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kept_photos_give_the_same_batches_and_are_decoded_once(folder, device):
    need(device)
    plenty, little = 200_000, 30_000
    cases = [(plenty, True), (plenty, False), (little, True), (little, False), (0, True)]
    found = run(folder, device, "kept", json.dumps(cases))
    assert all(same for same, *_ in found)
    assert [once for _, once, *_ in found] == [True, True, False, False, False]
    # One photo is broken; with little memory only some of the others are kept.
    kept = [number for *_, number, _, _ in found]
    used = {i for update in range(2, 6) for i in draw(update).tolist()}
    assert kept[0] == kept[1] == len(used) - 1
    assert 0 < kept[2] < kept[0]
    assert 0 < kept[3] < kept[0]
    assert kept[4] == 0
    for (budget, _), (*_, taken, broken) in zip(cases, found, strict=True):
        assert taken <= budget
        assert broken == 1


def test_a_class_without_a_readable_photo_is_one_line(folder):
    for path in Path(folder / "a").iterdir():
        path.write_bytes(b"")
    (message,) = run(folder, "cpu", 1)
    assert "no image of the class 'a' can be decoded" in message
    assert "\n" not in message
