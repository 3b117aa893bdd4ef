"""Batches that a GPU makes, here by Triton's interpreter and with the CPU as the device."""

import json

import numpy as np
import pytest
from interpreter import run_script, skip_if_interpreter_is_broken
from PIL import Image

pytest.importorskip("triton")
pytest.importorskip("torchvision")

SCRIPT = """
import json, sys, threading
import numpy as np
import torch
from listwise.data import CropDataset, CropSettings, read_labelled
from listwise.data import gpu_photos, gpu_resample
from listwise.data.kept_photos import KeptPhotos
from listwise.errors import InputError
from listwise.training import loading

where, folder = torch.device(sys.argv[1]), sys.argv[2]
cases = json.loads(sys.argv[3])
torch.set_num_threads(1)
images = read_labelled(folder + "/photos")
if where.type == "cpu":
    loading.gpu_decodes = lambda device: True
    gpu_resample.ROWS = gpu_resample.COLUMNS = 64  # one tile: the interpreter runs each step once
    loading.KEPT_CHUNK = 5
crop_into = gpu_resample.crop_into


def nearest(crops, photos, plans):
    # What needs no interpreter, for tests of which photo is cropped where: the nearest pixels.
    size = crops.shape[2]
    places = gpu_resample._places(plans, size)
    for crop, (start, width, height), place in zip(crops, photos.table, places, strict=True):
        values = photos.pixels[start : start + 3 * width * height].view(3, height, width)
        row, column = np.mgrid[:size, :size]
        x, y = (place[i] + column * place[i + 2] + row * place[i + 4] for i in (0, 1))
        x, y = np.clip(x.round(), 0, width - 1), np.clip(y.round(), 0, height - 1)
        crop[:] = values[:, torch.from_numpy(y).long(), torch.from_numpy(x).long()]


def draw(update):
    return np.random.default_rng(update).permutation(len(images))[:11]


def crops(images):
    # Not smaller than the photos: a filter that reduces them has many taps.
    return CropDataset(images, CropSettings(size=56, flip=0.5), seed=3)


def load(images):
    dataset = crops(images)
    before = torch.get_rng_state()
    batches = loading.load_batches(dataset, draw, range(2, 4), 2, device=where)
    result = []
    try:
        for update, batch in zip(range(2, 4), batches, strict=True):
            alone = [dataset[update, int(i)] for i in draw(update)]
            result.append({
                "difference": [
                    (a.cpu().float() - b.image.float()).abs().mean().item()
                    for a, b in zip(batch.images, alone, strict=True)
                ],
                "labels": batch.labels.tolist() == [crop.label for crop in alone],
                "errors": list(batch.errors),
                "expected": [error for crop in alone for error in crop.errors],
                "device": str(batch.images.device.type),
            })
    except InputError as error:
        result = str(error)
    batches.close()
    assert torch.equal(torch.get_rng_state(), before)
    return result


def batches(kept):
    made = loading.load_batches(crops(images), draw, range(2, 5), 1, device=where, kept=kept)
    return [(batch.images.cpu(), batch.labels, batch.errors) for batch in made]


def compare(budget, on_device, plain):
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
        for a, b in zip(made, plain, strict=True)
    )
    again = all(torch.equal(a[0], b[0]) for a, b in zip(made, batches(kept), strict=True))
    return same and again, once, len(kept), kept.bytes, len(kept.unreadable)


loaded = load(images)
broken = load(read_labelled(folder + "/broken"))
if where.type == "cpu":
    gpu_resample.crop_into = nearest
plain = batches(None)
assert len({batch[0].double().sum().item() for batch in plain}) == len(plain)
compared = [compare(*case, plain) for case in cases]
print(json.dumps({"loaded": loaded, "broken": broken, "kept": compared}))
"""
PLENTY, LITTLE = 200_000, 30_000
CASES = [(PLENTY, True), (PLENTY, False), (LITTLE, True), (LITTLE, False), (0, True)]


def save_photos(folder):
    """Two classes of photos of all kinds, one of them broken."""
    for i in range(16):
        path = folder / "ab"[i % 2] / f"{i:02}.{'png' if i == 5 else 'jpg'}"
        path.parent.mkdir(exist_ok=True, parents=True)
        cells = np.random.default_rng(i).integers(0, 255, (4, 5, 3)).astype(np.uint8)
        photo = Image.fromarray(cells).resize((40 + i, 50 - i), Image.Resampling.BICUBIC)
        turn = Image.Exif()
        turn[0x0112] = 6 if i == 8 else 1
        photo = photo.convert("L") if i == 9 else photo
        # With all colors: decoders differ in how they spread the colors of fewer pixels (see
        # test_gpu_photos.py), and here only the crops are compared.
        photo.save(path, quality=95, exif=turn, progressive=i == 3, subsampling=0)
        if i == 12:
            path.write_bytes(path.read_bytes()[:-300])


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    if request.param == "cpu":
        skip_if_interpreter_is_broken()
    return request.param


@pytest.fixture(scope="module")
def found(device, tmp_path_factory):
    """What the script finds, in one process: its imports take longer than a test."""
    folder = tmp_path_factory.mktemp("gpu")
    save_photos(folder / "photos")
    save_photos(folder / "broken")
    for path in (folder / "broken" / "a").iterdir():
        path.write_bytes(b"")
    return json.loads(run_script(SCRIPT, device, str(folder), json.dumps(CASES)))


def test_batches_are_nearly_those_of_workers(found, device):
    assert len(found["loaded"]) == 2
    for batch in found["loaded"]:
        assert batch["labels"]
        assert batch["errors"] == batch["expected"]
        # OpenCV's cubic filter is a little sharper than that of the GPU's crops.
        assert max(batch["difference"]) < 3.0
        assert np.mean(batch["difference"]) < 1.5
        assert batch["device"] == device
    assert sum(len(batch["errors"]) for batch in found["loaded"]) > 0


def test_kept_photos_give_the_same_batches_and_are_decoded_once(found):
    results = found["kept"]
    assert all(same for same, *_ in results)
    assert [once for _, once, *_ in results] == [True, True, False, False, False]
    # One photo is broken; with little memory only some of the others are kept.
    kept = [number for *_, number, _, _ in results]
    assert kept[0] == kept[1] > max(kept[2:4]) >= min(kept[2:4]) > kept[4] == 0
    for (budget, _), (*_, taken, broken) in zip(CASES, results, strict=True):
        assert taken <= budget
        assert broken == 1


def test_a_class_without_a_readable_photo_is_one_line(found):
    message = found["broken"]
    assert "no photo of the class 'a' can be decoded" in message
    assert "\n" not in message
