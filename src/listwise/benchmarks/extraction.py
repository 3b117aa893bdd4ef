"""Benchmark extraction against a simple loop: photos per second, from files to descriptors."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray

from listwise.benchmarks.input import make_photos
from listwise.benchmarks.measure import timed
from listwise.benchmarks.table import columns_of
from listwise.data import Images, load_image, whole_image
from listwise.descriptors import extract, load_model
from listwise.errors import InputError
from listwise.models import RetrievalNet

LOOP_PHOTOS = 96  # maximum number of photos for the loop
WARM_UP = 8  # photos before the timing of each method


@dataclass(frozen=True)
class ExtractionMeasurement:
    """The speed of one extraction method, and its agreement with the plain loop.

    `times_the_loop` is its speed divided by the speed of the loop. `cosine` is the lowest cosine
    similarity between its descriptor of a photo and the descriptor that the loop computes.
    """

    method: Annotated[str, "method"]
    precision: Annotated[str, "precision"]
    photos: Annotated[int, "photos", "{:,}"]
    seconds: float
    per_second: Annotated[float, "photos/s", "{:,.1f}"]
    times_the_loop: Annotated[float, "ratio", "{:.1f} ×"]
    cosine: Annotated[float, "least cosine", "{:.5f}"]


COLUMNS = columns_of(ExtractionMeasurement)


def run(
    device: str = "auto",
    photos: int = 256,
    backbone: str = "resnet101",
    width: int = 1024,
    height: int = 768,
    workers: int | None = None,
) -> Iterator[ExtractionMeasurement]:
    """Measure a loop in float32 and `extract`, from JPEG files to descriptors."""
    if photos < 1:
        raise InputError("`photos` must be 1 or more")
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
            "one at a time", "float32", len(looped), seconds, loop, 1.0, 1.0
        )

        extract(model, few, folder / "few.parquet", workers=workers)
        seconds, file = timed(
            lambda: extract(model, images, folder / "all.parquet", workers=workers)
        )
        cosine = float((file.read()[: len(looped)] * expected).sum(axis=1).min())
        name, precision, speed = "listwise extract", file.settings.precision, photos / seconds
        yield ExtractionMeasurement(name, precision, photos, seconds, speed, speed / loop, cosine)


@torch.inference_mode()
def one_at_a_time(net: RetrievalNet, images: Images) -> NDArray[np.float32]:
    """Decode and describe photos one at a time: [n, C]."""
    device = next(net.parameters()).device
    rows = [net(whole_image(load_image(path))[None].to(device)).cpu() for path in images.paths]
    return torch.cat(rows).numpy()
