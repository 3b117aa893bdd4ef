"""Poolings: a feature map becomes one vector, [B, C, H, W] -> [B, C], for any H, W >= 1.

All of them work in float32 or wider whatever the map's type, so that they are safe under autocast.
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from listwise.errors import InputError
from listwise.plugins import load_installed


def _wide(features: Tensor) -> Tensor:
    return features if features.dtype == torch.float64 else features.float()


class GeM(nn.Module):
    """Generalised mean (Radenović et al. 2018): the p-th power mean of each channel, p learned.

    Values below `eps`, negative ones among them, count as `eps`.
    """

    def __init__(self, p: float = 3.0, eps: float = 1e-6) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor([p]))
        self.eps = eps

    def forward(self, features: Tensor) -> Tensor:  # noqa: D102
        x = _wide(features).flatten(2).clamp(min=self.eps)
        # The power mean does not depend on this scale, so it carries no gradient. It keeps every
        # base within (0, 1] and one of them at 1: no power can overflow, no mean can vanish.
        scale = x.detach().amax(dim=2, keepdim=True)
        exponent = self.p.to(x.dtype)
        mean = (x / scale).pow(exponent).mean(dim=2)
        return scale.squeeze(2) * mean.pow(1 / exponent)


class MAC(nn.Module):
    """Maximum of each channel."""

    def forward(self, features: Tensor) -> Tensor:  # noqa: D102
        return _wide(features).amax(dim=(2, 3))


class SPoC(nn.Module):
    """Mean of each channel."""

    def forward(self, features: Tensor) -> Tensor:  # noqa: D102
        return _wide(features).mean(dim=(2, 3))


class RMAC(nn.Module):
    """Sum of the L2-normalised maxima of regions over three scales (Tolias et al. 2016)."""

    def forward(self, features: Tensor) -> Tensor:  # noqa: D102
        x = _wide(features)
        total = x.new_zeros(x.shape[:2])
        for top, left, side in rmac_regions(x.shape[2], x.shape[3]):
            region = x[:, :, top : top + side, left : left + side]
            total = total + F.normalize(region.amax(dim=(2, 3)), dim=1)
        return total


class CroW(nn.Module):
    """Sum weighted over space and channels (Kalantidis et al. 2016, a = b = 2).

    A cell weighs the square root of its share of the activation, a channel the logarithm of its
    inverse frequency. The definition is for activations >= 0: negative ones count as 0.
    """

    def forward(self, features: Tensor) -> Tensor:  # noqa: D102
        x = _wide(features).flatten(2).clamp(min=0)
        # An empty cell adds nothing whatever its weight, but the root has no gradient at 0.
        spatial = F.normalize(x.sum(dim=1), dim=1).clamp(min=1e-12).sqrt()
        active = (x > 0).to(x.dtype).mean(dim=2)
        total = active.sum(dim=1, keepdim=True)
        channel = ((x.shape[1] * 1e-6 + total) / (1e-6 + active)).log()
        return channel * (x * spatial.unsqueeze(1)).sum(dim=2)


def rmac_regions(height: int, width: int, scales: int = 3) -> list[tuple[int, int, int]]:
    """Square regions (top, left, side) of R-MAC (Tolias et al. 2016), over `scales` scales.

    At scale 1 as many regions lie along the longer side as bring the overlap of neighbours nearest
    to 40 %; each further scale has one more along both sides. The side at scale l is
    2·min(H, W) / (l + 1), rounded down; a scale whose regions are smaller than one cell is left
    out.
    """
    short, long = min(height, width), max(height, width)
    along = 1
    if long > short:
        # Overlap falls as the spacing grows; 40 % is reached at a spacing of 0.6 sides.
        ideal = int((long - short) / (0.6 * short)) + 1
        along = min(
            (max(2, ideal), ideal + 1),
            key=lambda n: abs(1 - (long - short) / (n - 1) / short - 0.4),
        )

    def starts(extent: int, side: int, count: int) -> list[int]:
        return [i * (extent - side) // max(1, count - 1) for i in range(count)]

    regions = []
    for scale in range(1, scales + 1):
        side = 2 * short // (scale + 1)
        if side == 0:
            continue
        rows = scale + (along - 1 if height > width else 0)
        columns = scale + (along - 1 if width > height else 0)
        regions += [
            (top, left, side)
            for top in starts(height, side, rows)
            for left in starts(width, side, columns)
        ]
    return regions


POOLINGS: Final[dict[str, type[nn.Module]]] = {
    "gem": GeM,
    "mac": MAC,
    "spoc": SPoC,
    "rmac": RMAC,
    "crow": CroW,
}


def make_pooling(pooling: str | nn.Module) -> nn.Module:
    """The module itself, or the pooling of that name: of `POOLINGS`, or of an installed package."""
    if isinstance(pooling, nn.Module):
        return pooling
    if pooling in POOLINGS:
        return POOLINGS[pooling]()
    made = load_installed("pooling", pooling)()
    if not isinstance(made, nn.Module):
        raise InputError(
            f"the pooling {pooling!r} of an installed package makes {type(made).__name__}, "
            "not an nn.Module"
        )
    return made
