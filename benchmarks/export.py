"""Benchmark ONNX files on the CPU: photos per second against PyTorch, in turns."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
from torch import Tensor

from benchmarks.input import make_photos
from benchmarks.measure import timed
from listwise.data import Images, load_image, whole_image
from listwise.descriptors import Model, load_model
from listwise.errors import InputError
from listwise.machine import shared_cores
from listwise.models import RetrievalNet
from listwise.models.embed import BATCH_PIXELS, PhotoNet
from listwise.models.net import Network

CALIBRATED_ON = 16  # photos from which the ranges of int8 are measured here


@dataclass(frozen=True)
class ExportMeasurement:
    """The speed of a network in one form.

    `speedup` is the median over the rounds of its speed divided by the speed of PyTorch in the same
    round, `least` and `most` are the extremes. `cosine` is the lowest cosine similarity between its
    descriptor of a photo and that of PyTorch.
    """

    setting: Annotated[str, "photos"]
    method: Annotated[str, "method"]
    photos: Annotated[int, "number", "{:,}"]
    per_second: Annotated[float, "photos/s", "{:,.1f}"]
    speedup: Annotated[float, "speedup", "{:.2f} ×"]
    least: Annotated[float, "least", "{:.2f} ×"]
    most: Annotated[float, "most", "{:.2f} ×"]
    cosine: Annotated[float, "least cosine", "{:.5f}"]
    megabytes: Annotated[float | None, "file", "{:.1f} MB"]


def run(
    backbone: str = "resnet50",
    photos: int = 32,
    side: int = 224,
    rounds: int = 5,
    on_start: Callable[[str], object] = lambda text: None,
) -> Iterator[ExportMeasurement]:
    """Measure PyTorch, PyTorch with folded batch norm, ONNX in float32 and ONNX in int8.

    Decoding is not part of the time. The methods take turns in each round, so that other programs
    on the machine affect all of them.

    Args:
        backbone: the name of a timm backbone; its weights are random.
        photos: the number of photos per round.
        side: their width and height.
        rounds: how often each method computes all photos.
        on_start: called with the name of what is being prepared or measured.
    """
    if min(photos, side, rounds) < 1:
        raise InputError("`photos`, `side` and `rounds` must be 1 or more")
    on_start(f"exporting {backbone}")
    model = Model(RetrievalNet(backbone, weights="random").eval())
    with tempfile.TemporaryDirectory(prefix="listwise-benchmark-") as scratch:
        folder = Path(scratch)
        paths = tuple(make_photos(folder / "photos", photos, side, side))
        pixels = torch.stack([whole_image(load_image(path)) for path in paths])
        networks, sizes = _networks(model, Images(paths, paths, None), folder)
        on_start("measuring")
        seconds: dict[str, list[float]] = {name: [] for name in networks}
        found: dict[str, Tensor] = {}
        with shared_cores(), torch.inference_mode():
            for network in networks.values():
                network(pixels[:1])
            for _ in range(rounds):
                for name, network in networks.items():
                    elapsed, found[name] = timed(partial(_all, network, pixels))
                    seconds[name].append(elapsed)
    plain = seconds["PyTorch"]
    for name, spent in seconds.items():
        ratios = [slow / fast for slow, fast in zip(plain, spent, strict=True)]
        yield ExportMeasurement(
            setting=f"{side} × {side}, {backbone}",
            method=name,
            photos=photos,
            per_second=photos / median(spent),
            speedup=median(ratios),
            least=min(ratios),
            most=max(ratios),
            cosine=float((found[name] * found["PyTorch"]).sum(dim=1).min()),
            megabytes=sizes.get(name),
        )


def _networks(
    model: Model, images: Images, folder: Path
) -> tuple[dict[str, Network], dict[str, float]]:
    """Return the network in each form, and the sizes of the files in megabytes."""
    networks = {
        "PyTorch": model.net,
        "PyTorch, folded": PhotoNet(model.net, None).fastest,
    }
    sizes = {}
    some = images.subset(range(min(len(images), CALIBRATED_ON)))
    for name, photos in ("ONNX", None), ("ONNX, int8", some):
        file = model.export(folder / f"{len(networks)}.onnx", int8=photos)
        networks[name] = load_model(file).net
        sizes[name] = file.stat().st_size / 1e6
    return networks, sizes


def _all(network: Network, pixels: Tensor) -> Tensor:
    """Compute descriptors in batches as large as those of an extraction."""
    size = max(1, BATCH_PIXELS["cpu"] // (pixels.shape[2] * pixels.shape[3]))
    return torch.cat([network(pixels[i : i + size]) for i in range(0, len(pixels), size)])
