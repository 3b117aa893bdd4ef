"""Combine the descriptors of a photo at several scales into one."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from listwise.models import RetrievalNet


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
    net: RetrievalNet, photos: Tensor, scales: Sequence[float], power: float
) -> Tensor:
    """Describe photos at several scales, combined by `power_mean`.

    Shapes: photos uint8 [B, 3, H, W] -> [B, C], unit rows.
    """
    if len(scales) == 1 and scales[0] == 1:
        descriptors: Tensor = net(photos)
        return descriptors
    return power_mean(torch.stack([net(_resized(photos, scale)) for scale in scales]), power)


def _signed_power(x: Tensor, power: float) -> Tensor:
    return x.sign() * x.abs().pow(power)


def _resized(photos: Tensor, scale: float) -> Tensor:
    if scale == 1:
        return photos
    height, width = (max(1, round(side * scale)) for side in photos.shape[-2:])
    return F.interpolate(
        photos.float() / 255, (height, width), mode="bilinear", align_corners=False, antialias=True
    )
