"""Describe photos at several scales and with several GeM powers, decoding each photo once."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from listwise.data import Decoding, Images
from listwise.data.workers import explain_lost_workers
from listwise.descriptors import Model
from listwise.descriptors.scales import power_mean, resize_photos
from listwise.machine import Machine
from listwise.models import RetrievalNet
from listwise.models.embed import PhotoNet, embed_parts
from listwise.models.folding import sharing_copy
from listwise.models.net import Network
from listwise.models.pooling import GeM, SeveralGeM
from listwise.settings import ExtractSettings


@dataclass(frozen=True, eq=False)
class ScaledDescriptors:
    """Descriptors of photos at several scales and with several GeM powers, without whitening.

    Attributes:
        rows: float32 [n, S, P, C], unit length.
        scales: the S scales.
        powers: the P powers of GeM, that of the network first; [None] for another pooling.
        times: the time of the network for one photo at each scale, in seconds.
        kept: positions of the n photos that could be read.
        errors: a message for each other photo.
    """

    rows: Tensor
    scales: tuple[float, ...]
    powers: tuple[float | None, ...]
    times: tuple[float, ...]
    kept: list[int]
    errors: list[str]

    def combine(
        self, scales: Sequence[float], gem: float | None, power: float
    ) -> npt.NDArray[np.float32]:
        """Return the descriptors [n, C] that a model computes with these settings."""
        column = self.rows[:, :, self.powers.index(gem)]
        if len(scales) == 1:
            return column[:, self.scales.index(scales[0])].numpy()
        places = [self.scales.index(scale) for scale in scales]
        rows: npt.NDArray[np.float32] = power_mean(column[:, places].transpose(0, 1), power).numpy()
        return rows

    def seconds(self, scales: Sequence[float]) -> float:
        """Return the time of the network for a photo at these scales, in seconds."""
        return sum(self.times[self.scales.index(scale)] for scale in scales)


def describe_at_scales(
    model: Model,
    images: Images,
    settings: ExtractSettings,
    scales: Sequence[float],
    powers: Sequence[float | None],
    workers: int | None = None,
    on_progress: Callable[[int], object] = lambda count: None,
) -> ScaledDescriptors:
    """Describe photos at each scale with each GeM power, without whitening.

    Args:
        model: the model.
        images: the photos.
        settings: `max_side` and `precision` are used.
        scales: the scales.
        powers: the powers of GeM, or [None] for the pooling of the network.
        workers: processes that decode; chosen from the number of cores by default.
        on_progress: called with the number of photos just finished.
    """
    autocast = None if settings.precision == "float32" else torch.bfloat16
    network = PhotoNet(_with_powers(model.net, powers), autocast)
    spent, count = [0.0] * len(scales), 0

    def describe(photos: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
        nonlocal count
        found = []
        for number, scale in enumerate(scales):
            # Enlarged photos in smaller batches, which need no more memory than the others.
            size = max(1, int(len(photos) / max(1.0, scale**2)))
            started = _now(photos.device)
            parts = [
                network(*resize_photos(photos[i : i + size], sizes[i : i + size], scale))
                for i in range(0, len(photos), size)
            ]
            spent[number] += _now(photos.device) - started
            rows = torch.cat(parts)
            found.append(rows if rows.ndim == 3 else rows[:, None])
        count += len(sizes)
        return torch.stack(found, dim=1)

    with explain_lost_workers():
        (found,) = embed_parts(
            network,
            images.files(),
            [len(images)],
            Decoding(settings.max_side),
            describe=describe,
            workers=Machine.detect(str(model.device)).workers() if workers is None else workers,
            on_progress=on_progress,
        )
    times = tuple(seconds / max(1, count) for seconds in spent)
    rows = torch.from_numpy(found.descriptors)
    return ScaledDescriptors(rows, tuple(scales), tuple(powers), times, found.kept, found.errors)


def _with_powers(net: Network, powers: Sequence[float | None]) -> Network:
    """Return a copy with the same weights that pools with each power; `net` if there are none."""
    known = [power for power in powers if power is not None]
    if not known:
        return net
    assert isinstance(net, RetrievalNet)
    assert isinstance(net.pooling, GeM)
    twin = sharing_copy(net)
    assert isinstance(twin, RetrievalNet)
    twin.pooling = SeveralGeM(known, net.pooling.eps).to(net.pooling.p)
    return twin.eval()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
