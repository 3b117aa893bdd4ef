"""Benchmark indexing: photos per second and memory, from files as cameras make them to an index."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

from benchmarks.input import make_photos
from listwise.data import Decoding, Images, PhotoFile, decode_photos
from listwise.descriptors import Model, load_model
from listwise.errors import InputError
from listwise.models import RetrievalNet

PART = 24  # photos that are decoded and encoded apart from each other


@dataclass(frozen=True)
class IndexingMeasurement:
    """The speed of the whole command, or of one of its steps in one process."""

    step: Annotated[str, "step"]
    photos: Annotated[int, "photos", "{:,}"]
    seconds: Annotated[float, "seconds", "{:.1f}"]
    per_second: Annotated[float, "photos/s", "{:.2f}"]
    memory: Annotated[float | None, "peak memory, GB", "{:.2f}"]


def run(
    device: str = "auto",
    photos: int = 200,
    width: int = 4000,
    height: int = 3000,
    backbone: str = "resnet50",
) -> Iterator[IndexingMeasurement]:
    """Measure `listwise index build` on large JPEG photos, then its steps.

    The memory is that of the command and its worker processes together (Linux only).

    Args:
        device: cpu, cuda, cuda:1, or auto, which uses a GPU if one is available.
        photos: number of JPEG photos to generate.
        width: their width in pixels.
        height: their height in pixels.
        backbone: name of a timm model; its weights are random.
    """
    if photos < PART:
        raise InputError(f"`photos` must be {PART} or more")
    with tempfile.TemporaryDirectory(prefix="listwise-benchmark-") as scratch:
        folder = Path(scratch)
        paths = make_photos(folder / "photos", photos, width, height)
        for number, path in enumerate(paths):  # an index has equal files only once
            content = Path(path).read_bytes()
            Path(path).write_bytes(content[:2] + b"\xff\xfe\x00\x08%06d" % number + content[2:])
        RetrievalNet(backbone, weights="random").save(folder / "model")
        command = ["index", "build", folder / "shop", folder / "photos", "--device", device]
        yield _command([*map(str, command), "--model", str(folder / "model")], photos)
        model = load_model(folder / "model", device)
        yield from _steps(model, paths[:PART])


def _command(arguments: list[str], photos: int) -> IndexingMeasurement:
    program = [sys.executable, "-m", "listwise", *arguments]
    started, peak = time.perf_counter(), 0
    with subprocess.Popen(program, stdout=subprocess.DEVNULL, start_new_session=True) as command:
        while command.poll() is None:
            peak = max(peak, _memory_of(command.pid))
            time.sleep(0.1)
    seconds = time.perf_counter() - started
    if command.returncode:
        raise InputError(f"listwise {' '.join(arguments[:2])} failed")
    memory = peak / 1e9 if peak else None
    return IndexingMeasurement("whole command", photos, seconds, photos / seconds, memory)


def _memory_of(leader: int) -> int:
    """Return the bytes of memory of a process and of those that it started."""
    total = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if os.getsid(int(process.name)) == leader:
                lines = (process / "smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024


def _steps(model: Model, paths: list[str]) -> Iterator[IndexingMeasurement]:
    """Measure decoding and encoding, one after the other, in this process."""
    how = Decoding(model.settings().max_side, thumbnail=True)

    def decode() -> Sequence[object]:
        found = list(decode_photos([PhotoFile(path) for path in paths], how, 0, model.device))
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        return found

    decode()
    started = time.perf_counter()
    decoded = decode()
    seconds = time.perf_counter() - started
    yield IndexingMeasurement("decode", len(decoded), seconds, len(decoded) / seconds, None)

    images = Images(tuple(paths), tuple(paths), None)
    model.describe(images.subset(range(4)), workers=0)
    started = time.perf_counter()
    model.describe(images, workers=0)
    both = time.perf_counter() - started
    yield IndexingMeasurement("decode and encode", len(paths), both, len(paths) / both, None)
