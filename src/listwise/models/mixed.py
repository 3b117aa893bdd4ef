"""Describe photos of different shapes in one batch, exactly as one photo at a time.

Each photo lies in the upper left corner of a canvas, and all canvases of a batch have the same
shape. An operation on single positions treats each photo as if it were alone. An operation that
mixes positions, such as a 3 × 3 convolution, would read values outside of the photo where the
photo alone has padding. `MixedNet` sets these values to the padding before every such operation,
and pools each feature map over the photo's own area.

`listwise.models.areas` observes the operations while the network runs, so its architecture need not
be known. `mixes` tries a network on a few shapes: a network with an operation that is not supported
gives other descriptors, or raises `listwise.models.areas.UnsupportedNetwork`.
"""

import copy
import math
import warnings
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import torch
from timm.layers import SelectAdaptivePool2d
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import Tensor, nn

from listwise.errors import InputError, ListwiseWarning, first_line
from listwise.machine import shared_cores
from listwise.models.areas import OwnAreas, UnsupportedNetwork
from listwise.models.folding import is_plain
from listwise.models.net import RetrievalNet
from listwise.models.pooling import POOLINGS

# Heights and widths of the trial photos: odd and even, some fill their canvas along one side.
_TRIAL = ((97, 75), (64, 110), (70, 101), (96, 66), (65, 99))
# Their ranges of values: contrast, darkness, and a flat photo.
_RANGES = ((0.0, 1.0), (0.0, 1.0), (0.2, 0.7), (0.0, 0.02), (0.6, 0.6))
# A tensor with a root mean square below this share of the usual one could hide an error until
# training makes it larger.
_SMALL = 0.1
# What lies outside of the photos in the trial, because nothing may depend on it.
_POISONS = (math.nan, 1e6)
# Descriptors in float64 differ by less than this. A wrong border changes them far more.
_SAME = 1e-7

# For these layers, the tests compare mixed batches with single photos. The pooling at the end of
# the backbone is not used.
_LAYERS = {nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d, nn.Identity, nn.Linear, nn.Sequential}
_BLOCKS = {RetrievalNet, ResNet, BasicBlock, Bottleneck, SelectAdaptivePool2d}
_RESNET_PARTS = {*_LAYERS, *_BLOCKS, *POOLINGS.values()}

_mixes: "WeakKeyDictionary[RetrievalNet, bool]" = WeakKeyDictionary()


class MixedNet:
    """A network for photos of different shapes in one batch.

    Use it only if `mixes(net)`, in evaluation mode and without gradients: it overwrites values
    outside of the photos. With `poison`, it sets them to this value after every operation.
    """

    def __init__(self, net: RetrievalNet, poison: float | None = None) -> None:
        self._net, self._poison = net, poison

    def __call__(self, canvases: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
        """Describe photos of some heights and widths in canvases [B, 3, H, W]: [B, dim].

        Raises:
            UnsupportedNetwork: an operation is not supported, or a photo is too small.
        """
        areas = OwnAreas(canvases, sizes, self._poison)
        with areas:
            features = self._net.features(canvases)
        own = areas.sizes(features)
        vectors: Tensor | None = None
        for height, width in {(int(h), int(w)) for h, w in own}:
            rows = np.flatnonzero((own == (height, width)).all(axis=1))
            if len(rows) == len(own):
                vectors = self._net.pooling(features[:, :, :height, :width])
                break
            chosen = torch.from_numpy(rows).to(features.device, non_blocking=True)
            pooled = self._net.pooling(features[chosen, :, :height, :width])
            if vectors is None:
                vectors = pooled.new_empty(len(own), *pooled.shape[1:])
            vectors[chosen] = pooled
        assert vectors is not None
        return self._net.finish(vectors)


def mixes(net: RetrievalNet) -> bool:
    """Return whether `MixedNet` computes the same descriptors as the network.

    A ResNet as it was published does; for other networks, a trial runs a copy in float64 on the
    CPU. In the copy, small biases and scales are about 1, because they could hide an error until
    training changes them, and what lies outside of the photos is poisoned. The result is remembered
    for each network. Numbers that are not tensors, and data-dependent paths that no photo of the
    trial takes, are not found.
    """
    if net not in _mixes:
        _mixes[net] = is_plain_resnet(net) or _trial(net)
    return _mixes[net]


def is_plain_resnet(net: RetrievalNet) -> bool:
    """Return whether a network is a ResNet of timm with its usual layers, without hooks."""
    return type(net.backbone) is ResNet and all(
        type(part) in _RESNET_PARTS
        and is_plain(part)
        and getattr(part, "padding_mode", "zeros") == "zeros"
        for part in net.modules()
    )


def _trial(net: RetrievalNet) -> bool:
    generator = torch.Generator().manual_seed(0)
    try:
        with (
            shared_cores(),
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            twin = copy.deepcopy(net).cpu().double().eval()
            for tensor in (*twin.parameters(), *twin.buffers()):
                _perturb(tensor, generator)
            height, width = (max(sides) for sides in zip(*_TRIAL, strict=True))
            canvases = torch.zeros(len(_TRIAL), 3, height, width, dtype=torch.float64)
            alone = []
            for canvas, (high, wide), values in zip(canvases, _TRIAL, _RANGES, strict=True):
                photo = canvas[:, :high, :wide]
                photo.uniform_(*values, generator=generator)
                alone.append(twin(photo[None]))
            expected = torch.cat(alone)
            return all(
                bool((MixedNet(twin, poison)(canvases, _TRIAL) - expected).abs().max() < _SAME)
                for poison in _POISONS
            )
    except (UnsupportedNetwork, InputError):
        return False
    except Exception as error:  # code of the user may raise anything
        warnings.warn(
            "photos of different shapes are not computed in one batch, because a trial of the "
            f"network failed ({first_line(error)})",
            ListwiseWarning,
            stacklevel=2,
        )
        return False


def _perturb(tensor: Tensor, generator: torch.Generator) -> None:
    """Change a tensor as training might: a small one to the usual size, others a little.

    The usual size is 1 for one number, or one per channel, and that of initial weights for others.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return
    one_each = tensor.numel() == max(tensor.shape, default=1)
    usual = 1.0 if one_each else float(tensor[0].numel() or 1) ** -0.5
    size = float(tensor.square().mean().sqrt())
    noise = torch.empty_like(tensor).uniform_(0.5, 1.5, generator=generator)
    if size < _SMALL * usual:
        signs = 1.0 if one_each else torch.empty_like(tensor).uniform_(-1, 1, generator=generator)
        tensor.copy_(usual * noise * signs)
    elif one_each:
        tensor.add_(0.1 * size * (noise - 1.0))
