"""Poolings: turn a feature map into one vector, [B, C, H, W] -> [B, C], for any H, W >= 1.

All of them compute in float32 or float64, whatever the type of the map, so they are safe under
autocast.
"""

from collections.abc import Sequence
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from listwise.errors import InputError
from listwise.plugins import load_installed


def _wide(features: Tensor) -> Tensor:
    return features if features.dtype == torch.float64 else features.float()


class GeM(nn.Module):
    """The p-th power mean of each channel, with learned p (Radenović et al. 2018).

    Values below `eps`, including negative ones, count as `eps`.
    """

    def __init__(self, p: float = 3.0, eps: float = 1e-6) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor([p]))
        self.eps = eps

    def forward(self, features: Tensor) -> Tensor:  # noqa: D102
        x = _wide(features).flatten(2).clamp(min=self.eps)
        # The power mean does not depend on this scale, so the scale needs no gradient. It brings
        # all values into (0, 1] and the largest to 1: no power overflows, no mean becomes 0.
        scale = x.detach().amax(dim=2, keepdim=True)
        exponent = self.p.to(x.dtype)
        mean = (x / scale).pow(exponent).mean(dim=2)
        return scale.squeeze(2) * mean.pow(1 / exponent)


class SeveralGeM(nn.Module):
    """GeM with several powers, to compare them: [B, C, H, W] -> [B, P, C]."""

    def __init__(self, powers: Sequence[float], eps: float = 1e-6) -> None:
        super().__init__()
        self.each = nn.ModuleList([GeM(power, eps) for power in powers])

    def forward(self, features: Tensor) -> Tensor:  # noqa: D102
        return torch.stack([gem(features) for gem in self.each], dim=1)


class MAC(nn.Module):
    """The maximum of each channel."""

    def forward(self, features: Tensor) -> Tensor:  # noqa: D102
        return _wide(features).amax(dim=(2, 3))


class SPoC(nn.Module):
    """The mean of each channel."""

    def forward(self, features: Tensor) -> Tensor:  # noqa: D102
        return _wide(features).mean(dim=(2, 3))


class RMAC(nn.Module):
    """The sum of the L2-normalized maxima of regions at three scales (Tolias et al. 2016)."""

    def forward(self, features: Tensor) -> Tensor:  # noqa: D102
        x = _wide(features)
        total = x.new_zeros(x.shape[:2])
        for top, left, side in rmac_regions(x.shape[2], x.shape[3]):
            region = x[:, :, top : top + side, left : left + side]
            total = total + F.normalize(region.amax(dim=(2, 3)), dim=1)
        return total


class CroW(nn.Module):
    """A sum with weights for cells and channels (Kalantidis et al. 2016, a = b = 2).

    The weight of a cell is the square root of its share of the activation. The weight of a channel
    is the logarithm of its inverse frequency. Negative activations count as 0.
    """

    def forward(self, features: Tensor) -> Tensor:  # noqa: D102
        x = _wide(features).flatten(2).clamp(min=0)
        # The square root has no gradient at 0. Empty cells add nothing, so their weight may be any.
        spatial = F.normalize(x.sum(dim=1), dim=1).clamp(min=1e-12).sqrt()
        active = (x > 0).to(x.dtype).mean(dim=2)
        total = active.sum(dim=1, keepdim=True)
        channel = ((x.shape[1] * 1e-6 + total) / (1e-6 + active)).log()
        return channel * (x * spatial.unsqueeze(1)).sum(dim=2)


class ClassToken(nn.Module):
    """The class token of a transformer, which it computes from all patches."""

    def forward(self, features: Tensor, class_token: Tensor) -> Tensor:  # noqa: D102
        return _wide(class_token)


class ClassTokenGeM(GeM):
    """The class token and the GeM of the patches, each L2-normalized, in one vector [B, 2 C]."""

    def forward(self, features: Tensor, class_token: Tensor) -> Tensor:  # type: ignore[override]  # noqa: D102
        parts = _wide(class_token), super().forward(features)
        return torch.cat([F.normalize(part, dim=1) for part in parts], dim=1)


def rmac_regions(height: int, width: int, scales: int = 3) -> list[tuple[int, int, int]]:
    """Return the square regions (top, left, side) of R-MAC (Tolias et al. 2016).

    The number of regions along the longer side at scale 1 is chosen so that neighbors overlap by
    as close to 40 % as possible. Each further scale has one more region along both sides. The side
    at scale l is 2·min(H, W) / (l + 1), rounded down; a scale whose regions are smaller than one
    cell is left out.
    """
    short, long = min(height, width), max(height, width)
    along = 1
    if long > short:
        # The overlap is 40 % at a spacing of 0.6 sides.
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
"""The built-in poolings by name: modules that map [B, C, H, W] to [B, C]."""

TOKEN_POOLINGS: Final[dict[str, type[nn.Module]]] = {"cls": ClassToken, "cls+gem": ClassTokenGeM}
"""The poolings of transformers by name: they also take the class token [B, C]."""


def pool(pooling: nn.Module, features: Tensor, class_token: Tensor | None) -> Tensor:
    """Pool a feature map [B, C, H, W] and, if the pooling takes it, the class token [B, C].

    Returns:
        One vector per image: [B, C], or [B, 2 C] for "cls+gem".

    Raises:
        InputError: the pooling takes the class token, but the backbone has none.
    """
    if not isinstance(pooling, tuple(TOKEN_POOLINGS.values())):
        vectors: Tensor = pooling(features)
        return vectors
    if class_token is None:
        raise InputError(
            "this backbone has no class token: choose the `pooling` gem, mac, spoc, rmac or crow"
        )
    vectors = pooling(features, class_token)
    return vectors


def make_pooling(pooling: str | nn.Module) -> nn.Module:
    """Create the pooling of this name, built-in or installed; return a module as it is."""
    if isinstance(pooling, nn.Module):
        return pooling
    built_in = POOLINGS | TOKEN_POOLINGS
    if pooling in built_in:
        return built_in[pooling]()
    made = load_installed("pooling", pooling)()
    if not isinstance(made, nn.Module):
        raise InputError(
            f"the pooling {pooling!r} of an installed package returns {type(made).__name__}: "
            "it must return an nn.Module"
        )
    return made
