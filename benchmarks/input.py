"""Benchmark decoding and augmentation of training crops, on one core and on all."""

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import cv2
import numpy as np
import torch

from benchmarks.measure import timed
from listwise.data import (
    CropDataset,
    Images,
    LabelledImages,
    check_images,
    load_image,
    random_crop,
    read_images,
)
from listwise.data.gpu_photos import decode_jpegs
from listwise.data.kept_photos import KeptPhotos
from listwise.errors import InputError
from listwise.machine import Machine
from listwise.settings import CropSettings
from listwise.training.loading import load_batches

DISTINCT = 16  # different photos; the others are copies, which take as long to decode
BATCHES = 4  # timed batches, after one that starts the workers
KEPT_BATCHES = 32  # timed batches of photos that are not decoded again


@dataclass(frozen=True)
class InputMeasurement:
    """One step of the input: photos per second, and milliseconds of a core per photo."""

    step: Annotated[str, "step"]
    workers: Annotated[int, "workers", lambda count: str(count or "")]
    per_second: Annotated[float | None, "photos/s", "{:,.0f}"]
    core_ms: Annotated[float | None, "ms of a core", "{:.2f}"]
    skipped: str | None = None


def make_photos(folder: Path, count: int, width: int, height: int, seed: int = 0) -> list[str]:
    """Write JPEG photos with realistic detail: about 300 kB per megapixel."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = []
    for number in range(min(count, DISTINCT)):
        generator = np.random.default_rng(seed + number)
        # Detail at every scale, as in photographs, and sensor noise.
        pixels = generator.normal(0, 4.5, (height, width, 3))
        for cell in (2, 4, 8, 16, 32, 64, 128, 256):
            shape = max(2, height // cell), max(2, width // cell), 3
            coarse = generator.normal(0, 4 * cell**0.4, shape)
            pixels += cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
        clipped = np.clip(128 + pixels, 0, 255).astype(np.uint8)
        _, encoded = cv2.imencode(".jpg", clipped, [cv2.IMWRITE_JPEG_QUALITY, 91])
        contents.append(encoded.tobytes())
    paths = [folder / f"{i:06d}.jpg" for i in range(count)]
    for i, path in enumerate(paths):
        path.write_bytes(contents[i % len(contents)])
    return [str(path) for path in paths]


def run(
    photos: int = 256,
    size: int = 800,
    workers: Sequence[int] | None = None,
    folder: str | Path | None = None,
    device: str = "auto",
) -> Iterator[InputMeasurement]:
    """Measure the input side of training, on generated photos or the photos of a folder.

    Args:
        photos: number of JPEG photos to generate.
        size: side of the square crops, in pixels.
        workers: numbers of processes; one, and one for each core by default.
        folder: a folder of photos to use instead of generated ones.
        device: a GPU is measured too; auto uses one if it is available.
    """
    device = Machine.detect(device).device
    if photos < 1:
        raise InputError("`photos` must be 1 or more")
    settings = CropSettings(size=size)
    every = Machine.detect("cpu").cores
    with tempfile.TemporaryDirectory(prefix="listwise-benchmark-") as scratch:
        if folder is None:
            paths = make_photos(Path(scratch), photos, round(1.44 * size), round(1.08 * size))
            images = Images(tuple(paths), tuple(paths), None)
        else:
            images = read_images(folder)
        yield from _steps(images, settings)
        for number in dict.fromkeys(workers or (1, every)):
            yield _loaded(images, settings, number)
        if device.startswith("cuda"):
            yield from _gpu(images, settings, device, every)


def _steps(images: Images, settings: CropSettings) -> Iterator[InputMeasurement]:
    """Measure the steps of a crop on one core."""
    threads = cv2.getNumThreads()
    cv2.setNumThreads(0)
    try:
        paths = images.paths[:DISTINCT]
        decoded = [load_image(path, None, settings.min_side) for path in paths]

        def crop(i: int) -> object:
            return random_crop(decoded[i], settings, np.random.default_rng(i))

        decoding = _core_ms(lambda i: load_image(paths[i], None, settings.min_side), len(paths))
        cropping = _core_ms(crop, len(paths))
    finally:
        cv2.setNumThreads(threads)
    yield InputMeasurement("decode", 1, None, decoding)
    yield InputMeasurement("crop and color", 1, None, cropping)


def _core_ms(step: Callable[[int], object], count: int) -> float:
    """Return the milliseconds of a step on one core, the minimum of three rounds."""
    rounds = []
    for _ in range(3):
        start = time.thread_time()
        for i in range(count):
            step(i)
        rounds.append(time.thread_time() - start)
    return 1e3 * min(rounds) / count


def _loaded(images: Images, settings: CropSettings, workers: int) -> InputMeasurement:
    """Measure crops per second of worker processes."""
    rate = _crops_per_second(images, settings, workers, "cpu", BATCHES)
    return InputMeasurement("decode and augment", workers, rate, 1e3 * max(1, workers) / rate)


def _crops_per_second(
    images: Images,
    settings: CropSettings,
    workers: int,
    device: str,
    count: int,
    kept: KeptPhotos | None = None,
) -> float:
    """Measure `count` batches of the trainer's data loading, after it has started.

    If photos are kept, all of them are decoded before.
    """
    labels = np.zeros(len(images), dtype=np.int64)
    labelled = LabelledImages(images.paths, images.ids, images.boxes, labels, ("all",), None)
    batch = max(16, 64 * workers)
    first = 1 if kept is None else math.ceil(len(images) / batch)
    batches = load_batches(
        CropDataset(labelled, settings, seed=0),
        lambda update: np.arange(update * batch, (update + 1) * batch) % len(images),
        range(first + count),
        workers,
        device=torch.device(device),
        kept=kept,
    )
    with closing(batches):
        for _ in range(first):
            next(batches)
        seconds, crops = timed(lambda: sum(len(found.images) for found in batches))
    return crops / seconds


def _gpu(
    images: Images, settings: CropSettings, device: str, cores: int
) -> Iterator[InputMeasurement]:
    """Measure the decoder of the GPU, and crops of photos that are decoded again or kept."""
    step = "decode on the GPU (nvJPEG)"
    try:
        contents = [
            torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8)
            for path in images.paths[:64]
        ]

        def decode() -> None:
            for _ in range(BATCHES):
                decode_jpegs(contents, torch.device(device))
            torch.cuda.synchronize(device)

        decode()  # sets up the decoder
        seconds, _ = timed(decode)
    except (ImportError, RuntimeError, OSError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        yield InputMeasurement(step, 0, None, None, reason)
        return
    yield InputMeasurement(step, 0, BATCHES * len(contents) / seconds, None)
    rate = _crops_per_second(images, settings, cores, device, BATCHES)
    yield InputMeasurement("decode and augment on the GPU", 0, rate, None)
    decoded = 3 * int(check_images(images)[1].sizes.prod(axis=1).sum())
    for place, on_device in (("GPU", True), ("host", False)):
        kept = KeptPhotos(len(images), torch.device(device), decoded, on_device)
        rate = _crops_per_second(images, settings, cores, device, KEPT_BATCHES, kept)
        step = f"augment photos in {place} memory"
        yield InputMeasurement(step, 0, rate, None)
