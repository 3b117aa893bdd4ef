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
from collections.abc import Sequence
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from timm.layers import Conv2dSame, SelectAdaptivePool2d
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import Tensor, nn

from listwise.machine import shared_cores
from listwise.models.areas import OwnAreas, convolve_blocks
from listwise.models.folding import BlockInput, make_folded_copy, perturb, sharing_copy
from listwise.models.net import RetrievalNet
from listwise.models.pooling import POOLINGS
from listwise.models.survey import is_plain

# Heights and widths of the trial photos: odd and even, some fill their canvas along one side.
_TRIAL = ((97, 110), (128, 75), (66, 127))
# Descriptors in float64 differ by less than this. A wrong border changes them far more.
_SAME = 1e-7

# The parts of ResNets. `SelectAdaptivePool2d` is not used, because the feature map is not pooled.
_CONTAINERS = {ResNet, BasicBlock, Bottleneck, nn.Sequential, SelectAdaptivePool2d}
_LAYERS = {nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d, nn.Identity, nn.Linear}

_mixes: "WeakKeyDictionary[RetrievalNet, dict[bool, bool]]" = WeakKeyDictionary()


class MixedNet:
    """A network for photos of different shapes in one batch.

    It shares the weights of the network. Use it only if `mixes(net)`, in evaluation mode and
    without gradients: it overwrites values outside of the photos. `fused` is an argument of
    `OwnAreas`.
    """

    def __init__(self, net: RetrievalNet, fused: bool | None = None) -> None:
        self._fused = fused
        twin = sharing_copy(net).eval()
        assert isinstance(twin, RetrievalNet)
        self._net = twin
        for module in twin.modules():
            if isinstance(module, Conv2dSame):
                _keep_same_padding(module)
            elif isinstance(module, nn.Conv2d):
                _keep_blocks(module)

    def __call__(self, canvases: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
        """Describe photos of some heights and widths in canvases [B, 3, H, W]: [B, dim].

        Raises:
            UnsupportedNetwork: an operation is not supported, or a photo is too small.
        """
        areas = OwnAreas(canvases, sizes, self._fused)
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


def mixes(net: RetrievalNet, folded: bool = False) -> bool:
    """Return whether `MixedNet` computes the same descriptors as the network, by a trial.

    With `folded`, the trial is one of the folded copy, as it is used in half precision on a GPU.
    The trial runs a copy in float64 on the CPU. It changes scales and weights of zero: they could
    hide an error until training changes them. The result is remembered for each network.
    """
    known = _mixes.setdefault(net, {})
    if folded not in known:
        known[folded] = is_plain_resnet(net) or _trial(net, folded)
    return known[folded]


def is_plain_resnet(net: RetrievalNet) -> bool:
    """Return whether a network is a ResNet of timm as it was published.

    It consists of nothing but layers for which the tests compare mixed batches with single photos,
    without hooks or changed methods. A trial of it would take about a second.
    """
    known = {RetrievalNet, *POOLINGS.values(), *_CONTAINERS, *_LAYERS}
    return type(net.backbone) is ResNet and all(
        type(part) in known
        and is_plain(part)
        and not _changes_methods(part)
        and getattr(part, "padding_mode", "zeros") == "zeros"
        for part in net.modules()
    )


def _changes_methods(module: nn.Module) -> bool:
    """Return whether a module has functions in place of methods of its class."""
    own = vars(module).items()
    return any(callable(value) and hasattr(type(module), name) for name, value in own)


def _trial(net: RetrievalNet, folded: bool) -> bool:
    generator = torch.Generator().manual_seed(0)
    try:
        with (
            shared_cores(),
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            twin = copy.deepcopy(net).cpu().double().eval()
            for parameter in twin.parameters():
                if parameter.ndim < 2 or not parameter.any():  # may multiply others by zero
                    perturb(parameter, generator)
            height, width = (max(sides) for sides in zip(*_TRIAL, strict=True))
            canvases = torch.zeros(len(_TRIAL), 3, height, width, dtype=torch.float64)
            alone = []
            for canvas, (high, wide) in zip(canvases, _TRIAL, strict=True):
                photo = canvas[:, :high, :wide]
                photo.uniform_(generator=generator)
                alone.append(twin(photo[None]))
            # A small image is enough to find what can be folded.
            example = canvases[:1, :, :64, :64]
            tried = make_folded_copy(twin, example, None) if folded else None
            if tried is not None:
                together = MixedNet(cast(RetrievalNet, tried.module), fused=True)(canvases, _TRIAL)
            else:
                together = MixedNet(twin)(canvases, _TRIAL)
    except Exception:  # code of the user may raise anything
        return False
    return bool((together - torch.cat(alone)).abs().max() < _SAME)


def _keep_same_padding(conv: nn.Conv2d) -> None:
    """Pass the padding of TensorFlow on to `OwnAreas`: it depends on the size of each photo."""

    def forward(x: Tensor) -> Tensor:
        how: Any = conv.stride, "same", conv.dilation, conv.groups
        return F.conv2d(x, conv.weight, conv.bias, *how)

    conv.forward = forward  # type: ignore[method-assign,assignment]


def _keep_blocks(conv: nn.Conv2d) -> None:
    """Show the convolution of images in a `FoldedCopy` to `OwnAreas` as one operation."""
    for key, hook in conv._forward_pre_hooks.items():
        if isinstance(hook, BlockInput):
            del conv._forward_pre_hooks[key]
            conv.forward = partial(convolve_blocks, conv=conv, blocks=hook)  # type: ignore[method-assign]
            return
