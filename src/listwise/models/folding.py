"""Fold frozen batch norm into the convolution before it.

A frozen batch norm multiplies each channel by a constant and adds another. The convolution before
it can do both, with weights w·s and bias (b − μ)·s + β, where s = γ / √(σ² + ε). This saves a pass
over the activations, and the backward pass needs only half of them. Weights in channels-last order
suit the fastest kernels of GPUs and CPUs.

Only what the structure of a network proves is folded: neighbors in an `nn.Sequential`, and the
layers of known blocks of timm and torchvision. Inside a module of any other class nothing is
folded, because its code may read what a convolution returns. In training, a `FoldedConv` computes
the folded weights in every forward pass, so autograd gives the gradients of the original
parameters. For inference, `FoldedCopy` computes them once.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d, Conv2dSame, pad_same
from torch import Tensor, nn

# Exactly these classes: a subclass may compute something else.
CONVOLUTIONS = (nn.Conv2d, Conv2dSame)
HALF = (torch.bfloat16, torch.float16)
# The fastest convolutions of a GPU in half precision need a multiple of so many channels.
UNIT = 8
NORMS = (nn.BatchNorm2d, BatchNormAct2d)
# The code of these packages calls an `nn.Sequential` and the blocks below as a whole.
KNOWN_PACKAGES = ("torch.nn.", "timm.", "torchvision.models.", "listwise.models.")
_BLOCKS = "timm.models._efficientnet_blocks."
# Attributes of blocks: a convolution, and the batch norm that alone reads its output.
_PAIRS: dict[str, tuple[tuple[str, str], ...]] = {
    **{
        f"{package}.models.resnet.{block}": (("conv1", "bn1"), ("conv2", "bn2"), ("conv3", "bn3"))
        for package in ("timm", "torchvision")
        for block in ("ResNet", "BasicBlock", "Bottleneck")
    },
    "timm.models.efficientnet.EfficientNet": (("conv_stem", "bn1"), ("conv_head", "bn2")),
    "timm.models.mobilenetv3.MobileNetV3": (("conv_stem", "bn1"),),
    f"{_BLOCKS}ConvBnAct": (("conv", "bn1"),),
    f"{_BLOCKS}DepthwiseSeparableConv": (("conv_dw", "bn1"), ("conv_pw", "bn2")),
    f"{_BLOCKS}InvertedResidual": (("conv_pw", "bn1"), ("conv_dw", "bn2"), ("conv_pwl", "bn3")),
    f"{_BLOCKS}EdgeResidual": (("conv_exp", "bn1"), ("conv_pwl", "bn2")),
    "timm.layers.conv_bn_act.ConvNormAct": (("conv", "bn"),),
}


class Pair(NamedTuple):
    """A convolution, the batch norm behind it, and the module and name that each belongs to."""

    conv: nn.Conv2d
    norm: nn.BatchNorm2d
    conv_place: tuple[nn.Module, str]
    norm_place: tuple[nn.Module, str]


def find_pairs(net: nn.Module) -> list[Pair]:
    """Return the pairs of a network whose batch norm is frozen; layers with hooks are left out."""
    named = list(net.named_modules(remove_duplicate=False))
    modules = dict(named)
    places: dict[nn.Module, set[tuple[nn.Module, str]]] = {module: set() for _, module in named}
    for path, module in named:
        parent, _, name = path.rpartition(".")
        places[module].add((modules[parent], name))
    pairs = []
    for conv, norm in _candidates(net):
        if _can_be_folded(conv, norm) and len(places[conv]) == len(places[norm]) == 1:
            pairs.append(Pair(conv, norm, *places[conv], *places[norm]))
    return pairs


def _candidates(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield layers that only the second one's input connects, in modules of known classes."""
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    if not kind.startswith(KNOWN_PACKAGES) or _changes_methods(module):
        return
    if type(module) is nn.Sequential:
        layers = list(pairwise(module))
    else:
        missing = nn.Identity()
        names = _PAIRS.get(kind, ())
        layers = [(getattr(module, a, missing), getattr(module, b, missing)) for a, b in names]
    for first, second in layers:
        if type(first) is nn.Sequential and len(first) and is_plain(first):
            first = first[-1]
        yield first, second
    for child in module.children():
        yield from _candidates(child)


def is_plain(module: nn.Module) -> bool:
    """Return whether a module has neither hooks nor functions in place of its methods."""
    forward = module._forward_pre_hooks or module._forward_hooks
    backward = module._backward_pre_hooks or module._backward_hooks
    return not (forward or backward or _changes_methods(module))


def has_hooks(net: nn.Module) -> bool:
    """Return whether a module of a network has hooks or changed methods: a copy may lose them."""
    return not all(map(is_plain, net.modules()))


def _changes_methods(module: nn.Module) -> bool:
    own = vars(module).items()
    return any(callable(value) and hasattr(type(module), name) for name, value in own)


def _can_be_folded(conv: nn.Module, norm: nn.Module) -> bool:
    return (
        type(conv) in CONVOLUTIONS
        and type(norm) in NORMS
        and is_plain(conv)
        and is_plain(norm)
        and not norm.training
        and norm.running_mean is not None
        and conv.padding_mode == "zeros"
        and conv.weight.dtype in (torch.float32, torch.float64)
    )


class FoldedConv(nn.Module):
    """Computes `norm(conv(maps))` as one convolution; `norm` is frozen."""

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv, self.norm = conv, norm

    def weights(self) -> tuple[Tensor, Tensor]:
        """Return the weights, in channels-last order, and the bias of the convolution."""
        conv, norm = self.conv, self.norm
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = torch.rsqrt(norm.running_var + norm.eps)
        if norm.affine:
            scale = scale * norm.weight
        mean = norm.running_mean if conv.bias is None else norm.running_mean - conv.bias
        bias = norm.bias - mean * scale if norm.affine else -mean * scale
        weight = conv.weight * scale.view(-1, 1, 1, 1)
        # One copy casts the weights and changes their order.
        return weight.to(compute_dtype(weight), memory_format=torch.channels_last), bias

    def forward(self, maps: Tensor) -> Tensor:
        """Compute feature maps in channels-last order: [B, I, h, w] -> [B, O, H, W]."""
        conv, padding = self.conv, self.conv.padding
        weight, bias = self.weights()
        if isinstance(conv, Conv2dSame):
            maps, padding = pad_same(maps, conv.kernel_size, conv.stride, conv.dilation), (0, 0)
        elif can_use_blocks(weight, conv.stride, padding, conv.dilation, conv.groups):
            return F.conv2d(*in_blocks(maps, weight, padding), bias)  # type: ignore[arg-type]
        return F.conv2d(maps, weight, bias, conv.stride, padding, conv.dilation, conv.groups)


def can_use_blocks(weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> bool:
    """Return whether `in_blocks` computes a convolution of these settings, and saves time."""
    usual = (stride, dilation, groups) == ((2, 2), (1, 1), 1) and not isinstance(padding, str)
    few_channels = weight.shape[1] < UNIT
    return weight.is_cuda and compute_dtype(weight) in HALF and usual and few_channels


def in_blocks(maps: Tensor, weight: Tensor, padding: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return maps and weights of a convolution without a stride that equals one with a stride of 2.

    Its channels are blocks of 2 × 2 pixels. Output o of a convolution with a stride of 2 reads the
    padded pixels 2 o, 2 o + 1, ...; these are the blocks o, o + 1, .... The matrix units of a GPU
    need several channels, and an image has three.
    """
    weight = weight.to(compute_dtype(weight))
    margins: list[int] = []
    for side, window, before in zip(maps.shape[2:], weight.shape[2:], padding, strict=True):
        outputs = (side + 2 * before - window) // 2 + 1
        padded = 2 * (outputs + -(-window // 2) - 1)
        margins = [before, padded - side - before, *margins]
    height, width = weight.shape[2:]
    maps = F.pixel_unshuffle(F.pad(maps.to(weight.dtype), margins), 2)
    weight = F.pixel_unshuffle(F.pad(weight, (0, width % 2, 0, height % 2)), 2)
    more = (0, 0, 0, 0, 0, -maps.shape[1] % UNIT)  # channels of zeros
    maps, weight = (F.pad(each, more) for each in (maps, weight))
    return maps.to(memory_format=torch.channels_last), weight.to(memory_format=torch.channels_last)


def _rest(norm: nn.Module) -> nn.Module:
    """Return what remains of a batch norm that is folded: nothing, or its activation."""
    if isinstance(norm, BatchNormAct2d):
        return nn.Sequential(norm.drop, norm.act)
    return nn.Identity()


def compute_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype in which autocast computes a convolution; float64 is not cast."""
    kind = weight.device.type
    if weight.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return weight.dtype


class Folding:
    """Folds the batch norms of a network while it computes.

    Attributes:
        pairs: the pairs that are folded.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.pairs: list[Pair] = []
        self._swaps: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []
        self.refresh()

    def refresh(self) -> None:
        """Find the pairs again, because layers, modes or hooks of the network may have changed."""
        pairs = find_pairs(self.net)
        if pairs == self.pairs:
            return
        self.pairs, self._swaps = pairs, []
        for conv, norm, conv_place, norm_place in pairs:
            self._swaps.append((*conv_place, conv, FoldedConv(conv, norm)))
            self._swaps.append((*norm_place, norm, _rest(norm)))

    @contextmanager
    def folded(self) -> Iterator[None]:
        """Inside this context, folded convolutions are in the place of the pairs."""
        try:
            for parent, name, _, new in self._swaps:
                setattr(parent, name, new)
            yield
        finally:
            for parent, name, original, _ in self._swaps:
                setattr(parent, name, original)


class FoldedCopy:
    """A copy of a network for inference, with batch norm folded into convolutions.

    The convolutions have weights of their own; the copy shares everything else.

    Attributes:
        net: the copy, in evaluation mode.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net = sharing_copy(net).eval()
        self._folded: list[tuple[FoldedConv, nn.Conv2d]] = []
        for conv, norm, _, norm_place in find_pairs(self.net):
            original = FoldedConv(cast(nn.Conv2d, sharing_copy(conv)), norm)
            # Parameters, because autocast keeps the cast weights only of layers that could be
            # trained.
            conv.weight, conv.bias = map(nn.Parameter, original.weights())
            setattr(*norm_place, _rest(norm))
            self._folded.append((original, conv))

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the weights again, after those of the network have changed."""
        for original, conv in self._folded:
            weight, bias = original.weights()
            conv.weight.copy_(weight)
            cast(Tensor, conv.bias).copy_(bias)


def sharing_copy(net: nn.Module) -> nn.Module:
    """Copy the modules of a network; the copy has the same parameters and buffers."""
    tensors = (*net.parameters(), *net.buffers())
    return copy.deepcopy(net, {id(tensor): tensor for tensor in tensors})
