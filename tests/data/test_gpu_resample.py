"""The GPU's crops against the CPU's and against plain sums, also by Triton's interpreter."""

import json
import os

import pytest
from interpreter import run_script, skip_if_interpreter_is_broken

pytest.importorskip("triton", minversion="3.3")

SOAK = bool(os.environ.get("LISTWISE_SOAK"))

SCRIPT = """
import json, sys
import numpy as np
import torch
from PIL import Image
from listwise.data import CropSettings, random_crop
from listwise.data import gpu_resample
from listwise.data.crops import DRAWS, plan_crops
from listwise.data.kept_photos import as_block

device, cases = sys.argv[1], json.loads(sys.argv[2])
torch.set_num_threads(1)
STILL = {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0}


def picture(width, height, seed):
    shape = max(2, height // 8), max(2, width // 8), 3
    cells = np.random.default_rng(seed).integers(0, 256, shape)
    return Image.fromarray(cells.astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)


def waves(width, height):
    x, y = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
    shades = np.sin(x / 21 + y / 37), np.cos(x / 33 - y / 27), np.sin(x / 31) * np.cos(y / 27)
    return Image.fromarray((127.5 + 100 * np.stack(shades, 2)).round().astype(np.uint8))


def tensor(photo):
    return torch.from_numpy(np.asarray(photo).transpose(2, 0, 1).copy()).to(device)


def crop_photos(photos, plans, size):
    crops = torch.empty(len(photos), 3, size, size, dtype=torch.uint8, device=device)
    gpu_resample.crop_into(crops, as_block(photos), plans)
    return crops


def weight(t):
    # Keys (1981) with a = -1/2.
    t = np.abs(t)
    return np.where(t < 1, 1.5 * t**3 - 2.5 * t**2 + 1,
                    np.where(t < 2, -0.5 * t**3 + 2.5 * t**2 - 4 * t + 2, 0.0))


def plain(photo, plans, size):
    # Sums over every pixel of the photo, in float64.
    pixels = np.asarray(photo).astype(np.float64)
    far = 40
    pixels = np.pad(pixels, ((far, far), (far, far), (0, 0)), mode="edge")
    across, down = plans.across[0] / size, plans.down[0] / size
    wide, tall = np.maximum(1.0, np.hypot(across, down))
    middle = plans.bounds[0].reshape(2, 2).mean(0)
    made = np.empty((3, size, size))
    for row in range(size):
        for column in range(size):
            x, y = middle + across * (column - (size - 1) / 2) + down * (row - (size - 1) / 2)
            wx = weight((np.arange(pixels.shape[1]) - far + 0.5 - x) / wide)
            wy = weight((np.arange(pixels.shape[0]) - far + 0.5 - y) / tall)
            made[:, row, column] = np.einsum("y,x,yxc->c", wy, wx, pixels) / (wy.sum() * wx.sum())
    made = made[:, :, ::-1] if plans.flip[0] else made
    return np.clip(np.floor(made + 0.5), 0, 255)


def plan(sizes, settings, seeds):
    draws = np.stack([np.random.default_rng(seed).random(DRAWS) for seed in seeds])
    return plan_crops([w for w, _ in sizes], [h for _, h in sizes], settings, draws)


def against_sums(photo_size, size, changes, seed):
    settings = CropSettings(size=size, **STILL, **changes)
    photo = picture(*photo_size, seed)
    plans = plan([photo.size], settings, [seed])
    made = crop_photos([tensor(photo)], plans, size)[0].cpu().numpy()
    difference = np.abs(made - plain(photo, plans, size))
    return difference.mean(), difference.max()


def against_cpu(kind, sizes, size, changes):
    settings = CropSettings(size=size, **changes)
    kinds = {"waves": lambda i: waves(*sizes[i]), "noise": lambda i: picture(*sizes[i], i)}
    photos = [kinds[kind](i) for i in range(len(sizes))]
    plans = plan([photo.size for photo in photos], settings, range(len(photos)))
    made = crop_photos([tensor(photo) for photo in photos], plans, size).cpu()
    assert made.shape == (len(photos), 3, size, size) and made.dtype == torch.uint8
    worst = 0.0
    for i, photo in enumerate(photos):
        there = random_crop(photo, settings, np.random.default_rng(i))
        worst = max(worst, (made[i].float() - there.float()).abs().mean().item())
    return worst


def whole(sizes, width, height):
    photos = [picture(*each, i) for i, each in enumerate(sizes)]
    made = gpu_resample.resize_photos([tensor(photo) for photo in photos], width, height).cpu()
    worst = 0.0
    for photo, small in zip(photos, made, strict=True):
        there = tensor(photo.resize((width, height), Image.Resampling.BICUBIC)).cpu()
        worst = max(worst, (small.float() - there.float()).abs().max().item())
    return worst


def boxed():
    # A part of a photo, as it lies there, is the same as the part alone.
    photo = tensor(picture(80, 60, 3))
    part = photo[:, 11:53, 7:61]
    plans = plan([(54, 42)], CropSettings(size=32), [0])
    a, b = (crop_photos([p], plans, 32) for p in (part, part.contiguous()))
    return torch.equal(a, b)


functions = {
    "sums": against_sums, "cpu": against_cpu, "whole": whole, "boxed": boxed
}
if device == "cpu":
    gpu_resample.ROWS = gpu_resample.COLUMNS = 32  # it is quicker with large tiles
print(json.dumps([functions[name](*case) for name, *case in cases]))
"""


def check(device):
    # Enlarged and reduced, turned and not, mirrored, stretched; in one and in several tiles.
    sums = [
        ("sums", (40, 30), 36, {"rotation": 30.0}, 1),
        ("sums", (60, 90), 20, {"rotation": 180.0, "flip": 1.0}, 2),
        ("sums", (50, 44), 24, {"rotation": 0.0, "max_ratio": 2.0}, 3),
    ]
    sizes = ((64, 48), (50, 70), (120, 90))
    # The interpreter is slow where a photo is reduced much, and one such sum is above.
    two, one = (sizes, sizes) if device == "cuda" or SOAK else (sizes[:2], sizes[:1])
    cpu = [
        ("cpu", "waves", two, 40, {}),
        ("cpu", "waves", one, 24, {"rotation": 0.0, "flip": 0.5}),
        ("cpu", "noise", one, 32, {"rotation": 45.0}),
    ]
    whole = [("whole", ((64, 48), (80, 60)), 32, 24), ("whole", ((61, 37),), 40, 24)]
    cases = [*sums, *cpu, *whole, ("boxed",)]
    found = json.loads(run_script(SCRIPT, device, json.dumps(cases)))
    for mean, most in found[:3]:  # sums differ in where they round
        assert mean < 0.01
        assert most <= 1
    assert found[3] < 0.8
    assert found[4] < 0.8
    # OpenCV's cubic is a little sharper, and the CPU samples twice where it reduces and turns.
    assert found[5] < 2.5
    # Pillow rounds between its two passes.
    assert found[6] <= 2
    assert found[7] <= 2
    assert found[8]


@pytest.mark.slow
def test_resampling_in_the_interpreter():
    skip_if_interpreter_is_broken()
    check("cpu")


def test_resampling_on_a_gpu():
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    check("cuda")
