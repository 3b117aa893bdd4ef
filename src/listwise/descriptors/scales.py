"""Combine the descriptors of a photo at several scales into one."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from listwise.data.pipeline import canvas_side
from listwise.models.embed import Describe


def power_mean(descriptors: Tensor, power: float) -> Tensor:
    """Combine S descriptors of each photo by a signed power mean, and normalize the result.

    With f(x) = sign(x)·|x|^p, each dimension becomes f⁻¹(mean of f over the scales). For values of
    at least 0, as GeM gives them, this is the power mean; p = 1 is the plain mean for all values.

    Shapes: [S, B, C] -> [B, C], unit rows.
    """
    # Scaled first, so that powers of tiny values do not vanish; the result is normalized anyway.
    scale = descriptors.abs().amax(dim=(0, 2), keepdim=True).clamp(min=1e-30)
    mean = _signed_power(descriptors / scale, power).mean(dim=0)
    return F.normalize(_signed_power(mean, 1 / power), dim=1)


def describe_scales(
    net: Describe,
    photos: Tensor,
    sizes: Sequence[tuple[int, int]],
    scales: Sequence[float],
    power: float,
) -> Tensor:
    """Describe photos at several scales, combined by `power_mean`.

    Args:
        net: computes the descriptors of photos at one scale.
        photos: uint8 [B, 3, H, W], in the upper left corners.
        sizes: heights and widths of the B photos.
        scales: factors of the heights and widths.
        power: the power of the mean.

    Returns:
        Descriptors [B, C], unit rows.
    """
    if len(scales) == 1 and scales[0] == 1:
        return net(photos, sizes)
    return power_mean(
        torch.stack([net(*resize_photos(photos, sizes, scale)) for scale in scales]), power
    )


def _signed_power(x: Tensor, power: float) -> Tensor:
    return x.sign() * x.abs().pow(power)


def resize_photos(
    photos: Tensor, sizes: Sequence[tuple[int, int]], scale: float
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Resize each photo by itself; return images in [0, 1] and their heights and widths."""
    if scale == 1:
        return photos, list(sizes)
    targets = {size: _scaled(size, scale) for size in sizes}
    resized = [targets[size] for size in sizes]
    if len(targets) == 1 and (*photos.shape[2:],) in targets:
        return _interpolated(photos, resized[0]), resized
    height, width = (canvas_side(max(sides)) for sides in zip(*resized, strict=True))
    images = torch.zeros(len(photos), 3, height, width, device=photos.device)
    for size, (high, wide) in targets.items():
        rows = [row for row, each in enumerate(sizes) if each == size]
        cut = photos[rows, :, : size[0], : size[1]]
        images[rows, :, :high, :wide] = _interpolated(cut, (high, wide))
    return images, resized


def _scaled(size: tuple[int, int], scale: float) -> tuple[int, int]:
    height, width = (max(1, round(side * scale)) for side in size)
    return height, width


def _interpolated(photos: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(
        photos.float() / 255, size, mode="bilinear", align_corners=False, antialias=True
    )
