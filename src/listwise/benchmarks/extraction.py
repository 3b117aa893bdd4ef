"""Extraction against the loop that one would first write: photos a second, from file to file."""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from listwise.benchmarks.input import make_photos
from listwise.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from listwise.data import Images

LOOP_PHOTOS = 96  # that the loop is timed on, at most
WARM_UP = 8  # photos that each way sees before it is timed


@dataclass(frozen=True)
class Row:
    """One way to extract: photos a second, times the loop's, and how near its descriptors are.

    `cosine` is the smallest between a photo's descriptor and the loop's.
    """

    method: str
    precision: str
    photos: int
    seconds: float
    per_second: float
    times_the_loop: float
    cosine: float

    def as_json(self) -> dict[str, object]:
        """The row as plain data."""
        return asdict(self)


def run(
    device: str = "auto",
    photos: int = 256,
    backbone: str = "resnet101",
    width: int = 1024,
    height: int = 768,
    weights: str = "random",
    workers: int | None = None,
) -> Iterator[Row]:
    """Measure JPEG files to descriptors, one at a time in float32 and by `extract`.

    Args:
        device: cpu, cuda ...; auto takes a GPU if there is one.
        photos: JPEG photos to make.
        backbone: the network.
        width: of the photos.
        height: of the photos.
        weights: as for `RetrievalNet`; random ones take as long as any.
        workers: processes that decode; from the cores by default.
    """
    from listwise.data import Images
    from listwise.descriptors import extract, load_model
    from listwise.models import RetrievalNet

    if photos < 1:
        raise InputError("there must be a photo to describe: give 1 or more")
    with tempfile.TemporaryDirectory(prefix="listwise-benchmark-") as scratch:
        folder = Path(scratch)
        paths = tuple(make_photos(folder / "photos", photos, width, height))
        images = Images(paths, paths, None)
        few = images.subset(range(min(photos, WARM_UP)))
        RetrievalNet(backbone, weights=weights).save(folder / "model")

        model = load_model(folder / "model", device)
        net = RetrievalNet.load(folder / "model", model.device)
        looped = images.subset(range(min(photos, LOOP_PHOTOS)))
        one_at_a_time(net, few)
        start = time.perf_counter()
        expected = one_at_a_time(net, looped)
        seconds = time.perf_counter() - start
        loop = len(looped) / seconds
        yield Row("one at a time", "float32", len(looped), seconds, loop, 1.0, 1.0)
        del net

        extract(model, few, folder / "few.parquet", workers=workers)
        start = time.perf_counter()
        file = extract(model, images, folder / "all.parquet", workers=workers)
        seconds = time.perf_counter() - start
        cosine = float((file.read()[: len(looped)] * expected).sum(axis=1).min())
        speed = photos / seconds
        precision = file.settings.precision
        yield Row("listwise extract", precision, photos, seconds, speed, speed / loop, cosine)


def one_at_a_time(net: object, images: "Images") -> "npt.NDArray[np.float32]":
    """Descriptors [n, C] by decoding a photo, computing it, and going on to the next."""
    import torch

    from listwise.data import load_image, whole_image
    from listwise.models import RetrievalNet

    assert isinstance(net, RetrievalNet)
    device = next(net.parameters()).device
    with torch.inference_mode():
        rows = [net(whole_image(load_image(path))[None].to(device)).cpu() for path in images.paths]
    return torch.cat(rows).numpy()
