"""Benchmark extraction: photos per second, from JPEG files to descriptors."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.input import make_photos
from benchmarks.measure import timed
from listwise.data import Images, load_image, whole_image
from listwise.descriptors import DescriptorFile, Model, extract, load_model
from listwise.errors import InputError
from listwise.machine import core_count
from listwise.models import RetrievalNet
from listwise.models.embed import MIXED

LOOP_PHOTOS = 96  # maximum number of photos for the loop
WARM_UP = 64  # photos before the timing of each method: whole batches of a GPU
PER_SHAPE = 20  # photos of each shape, in a random order
SHAPES_ALONE = 60  # shapes that are also measured in batches of one shape, which take long
SIDES = 256, 501  # range of the sides of these photos


@dataclass(frozen=True)
class ExtractionMeasurement:
    """The speed of one extraction method, and its agreement with the first method.

    `speedup` is its speed divided by the speed of the first method for the same photos. `cosine`
    is the lowest cosine similarity between its descriptor of a photo and that of the first method.
    """

    setting: Annotated[str, "photos"]
    method: Annotated[str, "method"]
    precision: Annotated[str, "precision"]
    photos: Annotated[int, "number", "{:,}"]
    seconds: Annotated[float, "seconds", "{:.2f}"]
    per_second: Annotated[float, "photos/s", "{:,.1f}"]
    speedup: Annotated[float, "speedup", "{:.1f} ×"]
    cosine: Annotated[float, "least cosine", "{:.5f}"]


def run(
    device: str = "auto",
    photos: int = 512,
    backbone: str = "resnet101",
    width: int = 1024,
    height: int = 768,
    shapes: int = 300,
    workers: int | None = None,
) -> Iterator[ExtractionMeasurement]:
    """Measure extraction from JPEG files, of one shape and of many shapes.

    Args:
        device: cpu, cuda, cuda:1, or auto, which uses a GPU if one is available.
        photos: number of JPEG photos of one shape to generate.
        backbone: name of a timm model for these photos.
        width: their width in pixels.
        height: their height in pixels.
        shapes: number of shapes of further photos, which resnet50 describes: 20 photos of 256 to
            500 pixels for each shape; 0 is off.
        workers: number of processes that decode photos.
    """
    if photos < 1:
        raise InputError("`photos` must be 1 or more")
    yield from run_one_shape(device, photos, backbone, width, height, workers)
    if shapes:
        yield from run_shapes(device, shapes, workers=workers)


def run_one_shape(
    device: str, photos: int, backbone: str, width: int, height: int, workers: int | None
) -> Iterator[ExtractionMeasurement]:
    """Measure a loop in float32 and `extract`, on photos of one shape."""
    setting = f"{width} × {height}, {backbone}"
    with tempfile.TemporaryDirectory(prefix="listwise-benchmark-") as scratch:
        folder = Path(scratch)
        paths = tuple(make_photos(folder / "photos", photos, width, height))
        images = Images(paths, paths, None)
        few = images.subset(range(min(photos, WARM_UP)))
        RetrievalNet(backbone, weights="random").save(folder / "model")

        model = load_model(folder / "model", device)
        net = RetrievalNet.load(folder / "model", model.device)
        looped = images.subset(range(min(photos, LOOP_PHOTOS)))
        one_at_a_time(net, few)
        seconds, expected = timed(lambda: one_at_a_time(net, looped))
        loop = len(looped) / seconds
        yield ExtractionMeasurement(
            setting, "one at a time", "float32", len(looped), seconds, loop, 1.0, 1.0
        )

        extract(model, few, folder / "few.parquet", workers=workers)
        seconds, file = timed(
            lambda: extract(model, images, folder / "all.parquet", workers=workers)
        )
        cosine = _least_cosine(file.read()[: len(looped)], expected)
        name, precision, speed = "listwise extract", file.settings.precision, photos / seconds
        yield ExtractionMeasurement(
            setting, name, precision, photos, seconds, speed, speed / loop, cosine
        )


def run_shapes(
    device: str, shapes: int, backbone: str = "resnet50", workers: int | None = None
) -> Iterator[ExtractionMeasurement]:
    """Measure `extract` on photos of many shapes, in batches of one shape and of mixed shapes.

    Batches of one shape are measured on the photos of some of the shapes. The second pass does not
    include the time that a GPU takes to prepare new shapes. The whole command includes the start of
    Python and loading the model.
    """
    setting = f"{shapes} shapes, {backbone}"
    with tempfile.TemporaryDirectory(prefix="listwise-benchmark-") as scratch:
        folder, out = Path(scratch), Path(scratch) / "all.parquet"
        images, numbers = _photos_of_shapes(folder / "photos", shapes)
        some = np.flatnonzero(numbers < SHAPES_ALONE)
        few = images.subset(range(min(len(images), WARM_UP)))
        RetrievalNet(backbone, weights="random").save(folder / "model")

        model = load_model(folder / "model", device)
        with _mixing(model, False):
            extract(model, few, folder / "few.parquet", workers=workers)
            seconds, file = timed(lambda: extract(model, images.subset(some), out, workers=workers))
        alone, precision, speed = file.read(), file.settings.precision, len(some) / seconds
        yield ExtractionMeasurement(
            setting, "batches of one shape", precision, len(some), seconds, speed, 1.0, 1.0
        )

        def row(method: str, seconds: float) -> ExtractionMeasurement:
            cosine = _least_cosine(DescriptorFile.open(out).read()[some], alone)
            rate = len(images) / seconds
            return ExtractionMeasurement(
                setting, method, precision, len(images), seconds, rate, rate / speed, cosine
            )

        model = load_model(folder / "model", device)
        with _mixing(model, True):
            extract(model, few, folder / "few.parquet", workers=workers)
            for method in ("mixed batches", "mixed batches, second pass"):
                seconds, _ = timed(lambda: extract(model, images, out, workers=workers))
                yield row(method, seconds)
        command = "extract", folder / "model", folder / "photos", out, "--device", device
        program = sys.executable, "-m", "listwise", *map(str, command)
        seconds, _ = timed(lambda: subprocess.run(program, check=True, capture_output=True))
        yield row("whole command", seconds)


@contextmanager
def _mixing(model: Model, mixed: bool) -> Iterator[None]:
    """Use mixed batches, or batches of one shape, whatever is the default for the device."""
    kind = model.device.type
    before = MIXED[kind]
    MIXED[kind] = mixed
    try:
        yield
    finally:
        MIXED[kind] = before


def _photos_of_shapes(folder: Path, shapes: int) -> tuple[Images, NDArray[np.int64]]:
    """Write photos of different shapes in a random order; return them and the shape of each."""
    generator = np.random.default_rng(0)
    sides: dict[tuple[int, int], None] = {}
    while len(sides) < shapes:
        width, height = generator.integers(*SIDES, size=2)
        sides[int(width), int(height)] = None

    def make(number: int, size: tuple[int, int]) -> bytes:
        made = folder / f"made{number}"
        (path,) = make_photos(made, 1, *size, seed=number)
        content = Path(path).read_bytes()
        shutil.rmtree(made)
        return content

    with ThreadPoolExecutor(core_count()) as pool:
        contents = list(pool.map(make, range(shapes), sides))
    order = generator.permutation(np.repeat(np.arange(shapes), PER_SHAPE))
    paths = tuple(str(folder / f"{i:06d}.jpg") for i in range(len(order)))
    for path, number in zip(paths, order, strict=True):
        Path(path).write_bytes(contents[number])
    return Images(paths, paths, None), order


def _least_cosine(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    return float((first * second).sum(axis=1).min())


@torch.inference_mode()
def one_at_a_time(net: RetrievalNet, images: Images) -> NDArray[np.float32]:
    """Decode and describe photos one at a time: [n, C]."""
    device = next(net.parameters()).device
    rows = [net(whole_image(load_image(path))[None].to(device)).cpu() for path in images.paths]
    return torch.cat(rows).numpy()
