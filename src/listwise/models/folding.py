"""A faster copy of a network: batch norm is folded, and weights are cast once per step.

A frozen batch norm multiplies each channel by a constant and adds another. The convolution before
it can do both, with weights w·s and bias (b − μ)·s + β, where s = γ / √(σ² + ε). This saves a pass
over the activations, and the backward pass needs only half of them. Weights in channels-last order
suit the fastest kernels of GPUs and CPUs.

The copy computes with folded weights; the network itself does not change. Gradients of the folded
weights are backpropagated through the fold, a differentiable function of w, b, γ and β, to the
parameters of the network.

Many layers are processed in few calls, because in a short update on a fast GPU most of the time is
spent starting kernels.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from listwise.models.snapshot import Snapshot
from listwise.models.survey import CONVOLUTIONS, HOOKS, Fold, survey

# Tensor cores are slow for a convolution of three channels. Channels of zeros do not change the
# result, and the fast kernels need rows of 16 bytes.
COLORS = 3
CHANNELS = 8
# They are slow for its stride of 2, too: it becomes a convolution of blocks of 2 × 2 pixels.
STRIDE = 2
BLOCK_CHANNELS = 16
# CPUs do not need this, and PyTorch 2.11 computes such a convolution of 16 × 16 pixels wrongly in
# bfloat16 on CPUs with AMX.
TENSOR_CORES = ("cuda",)
# Two forward passes in float32 differ by less than this, even if convolutions round to TF32.
_SAME = 0.02


def folded(pairs: Sequence[tuple[nn.Conv2d, nn.BatchNorm2d]]) -> tuple[list[Tensor], list[Tensor]]:
    """Return weights [O, I, h, w] and biases [O] of convolutions that each replace a pair."""
    if not pairs:
        return [], []
    means: list[Tensor] = []
    variances: list[Tensor] = []
    gammas: list[Tensor] = []
    betas: list[Tensor] = []
    for conv, norm in pairs:
        mean, variance = norm.running_mean, norm.running_var
        assert mean is not None
        assert variance is not None
        means.append(mean if conv.bias is None else mean - conv.bias)
        variances.append(variance)
        gammas.append(torch.ones_like(mean) if norm.weight is None else norm.weight)
        betas.append(torch.zeros_like(mean) if norm.bias is None else norm.bias)
    shifted = torch.cat(torch._foreach_add(variances, [norm.eps for _, norm in pairs]))
    scale = torch.cat(gammas) * shifted.rsqrt()
    shift = torch.cat(betas) - torch.cat(means) * scale
    sizes = [len(mean) for mean in means]
    scales = torch.split(scale, sizes)
    convolutions = [conv.weight for conv, _ in pairs]
    weights = [w * s.view(-1, 1, 1, 1) for w, s in zip(convolutions, scales, strict=True)]
    return weights, list(torch.split(shift, sizes))


def folds_hold(changed: nn.Module, folds: Sequence[Fold], images: Tensor) -> bool:
    """Return whether the folded network computes the same descriptors of images [b, 3, H, W].

    Every parameter is changed first. Otherwise a wrong fold might not show until after some
    training, because a new batch norm changes nothing and a gate may start at zero.

    Args:
        changed: a copy of the network with its own parameters and buffers, which are changed.
        folds: the pairs to be folded.
        images: the images of the trial.
    """
    changed.eval()
    generator = torch.Generator(images.device).manual_seed(0)
    with torch.no_grad():
        for parameter in changed.parameters():
            perturb(parameter, generator)
        for _, norm in _pairs(changed, folds):
            _perturb_statistics(norm, generator)
    other = sharing_copy(changed)
    with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
        for fold, *values in zip(folds, *folded(_pairs(changed, folds)), strict=True):
            for target, value in zip(_fold(other, fold), values, strict=True):
                target.copy_(value)
        expected, actual = changed(images), other(images)
    return bool((actual - expected).norm() <= _SAME * expected.norm())


class FoldedCopy:
    """A copy of a network that computes the same, with folded batch norm and cast weights.

    Parameters that are neither folded nor cast are shared with the network. Call `refresh` when
    the weights of the network have changed, `collect` after each backward pass, and
    `add_gradients` to add the collected gradients to those of the network.

    Args:
        net: the network; its batch norms must be frozen.
        images: [b, 3, H, W] for a trial; one image is enough.
        autocast: dtype in which the network runs under autocast; float64 layers stay float64. With
            None, the copy computes in the precision of the network, and only folds batch norm.

    Attributes:
        module: the copy; call it under autocast, with images in channels-last order.
        folds: the folded pairs; none if `trial_failed`.
        trial_failed: whether the folded network computed other descriptors in the trial.
    """

    def __init__(self, net: nn.Module, images: Tensor, autocast: torch.dtype | None) -> None:
        self.net = net
        self._snapshot = Snapshot(net)
        # A copy, because layers that keep statistics change their buffers, and the trial changes
        # the parameters.
        trial = copy_modules(net)
        half = autocast is not None
        with torch.autocast(images.device.type, autocast, enabled=half, cache_enabled=False):
            folds, cast = survey(trial, images)
        self.module = sharing_copy(net, self._snapshot.shared).eval()
        if half:
            folds = [fold for fold in folds if fold.conv in cast]
        self.trial_failed = not folds_hold(trial, folds, images)
        self.folds = [] if self.trial_failed else folds
        self._pairs = _pairs(net, self.folds)
        filled = [_fold(self.module, fold) for fold in self.folds]
        # The parameters of the copy, and the parameters of the network that each is computed from.
        self._targets = [weight for weight, _ in filled] + [bias for _, bias in filled]
        self._sources = [_present(conv.weight, norm.weight) for conv, norm in self._pairs]
        self._sources += [_present(c.bias, n.weight, n.bias) for c, n in self._pairs]
        self._cast: list[nn.Parameter] = []
        in_folds = {fold.conv for fold in self.folds}
        for name in cast:
            layer = self.module.get_submodule(name)
            if name not in in_folds:
                self._own(layer)
            self._widen(layer)
        for target in self._targets:
            narrow = autocast if half and target.dtype == torch.float32 else target.dtype
            order = torch.channels_last if target.ndim == 4 else torch.contiguous_format
            target.data = target.data.to(narrow, memory_format=order)
        # One kernel copies all tensors of a group if they have the same memory order.
        alike = [t.ndim < 4 or t.shape[2:] == (1, 1) for t in self._targets]
        groups = ([i for i, same in enumerate(alike) if same is kind] for kind in (True, False))
        self._groups = [group for group in groups if group]
        theirs = dict(net.named_modules())
        self._modules = [(m, theirs[n]) for n, m in self.module.named_modules() if n in theirs]
        self._values: list[Tensor] = []
        self._sums: dict[int, Tensor] = {}
        self.refresh()

    def _own(self, layer: nn.Module) -> None:
        """Give a layer of the copy its own parameters, to be cast."""
        for name, parameter in list(layer.named_parameters(recurse=False)):
            own = nn.Parameter(parameter.detach().clone())
            setattr(layer, name, own)
            self._targets.append(own)
            self._sources.append([parameter])
            self._cast.append(parameter)

    def _widen(self, layer: nn.Module) -> None:
        """Extend a convolution of RGB images to more channels, which are blocks or zero."""
        if type(layer) not in CONVOLUTIONS:
            return
        assert isinstance(layer, nn.Conv2d)
        if layer.in_channels != COLORS or layer.groups != 1:
            return
        if layer.weight.device.type not in TENSOR_CORES:
            return
        if _is_strided(layer):
            layer.register_forward_pre_hook(BlockInput(layer))
            layer.stride, layer.padding = (1, 1), (0, 0)
            layer.in_channels = BLOCK_CHANNELS
            layer.weight.data = _blocks_of(layer.weight.data)
            layer.kernel_size = layer.weight.shape[2], layer.weight.shape[3]
        else:
            layer.weight.data = _widened(layer.weight.data, CHANNELS)
            layer.in_channels = CHANNELS
            layer.register_forward_pre_hook(_widen_input)

    def fits(self) -> bool:
        """Return whether the network has the same parts, settings and hooks as when it was copied.

        The values of its parameters and buffers may have changed.
        """
        return self._snapshot.matches(self.net)

    def refresh(self) -> None:
        """Take the current weights and modes of the network; drop collected gradients."""
        with torch.enable_grad():
            weights, biases = folded(self._pairs)
            values = zip(self._targets, [*weights, *biases, *self._cast], strict=True)
            self._values = [_shaped_like(target, value) for target, value in values]
        with torch.no_grad():
            for group in self._groups:
                fresh = [self._values[i] for i in group]
                torch._foreach_copy_([self._targets[i] for i in group], fresh)
        for target, made_of in zip(self._targets, self._sources, strict=True):
            learns = any(source.requires_grad for source in made_of)
            if target.requires_grad != learns:
                target.requires_grad_(learns)
            target.grad = None
        self._sums = {}
        for mine, theirs in self._modules:
            if mine.training != theirs.training:
                mine.training = theirs.training

    def collect(self) -> None:
        """Add the gradients to sums in the precision of the network; half has too few digits.

        Gradients that are in this precision already add up in `.grad`.
        """
        found = self._gradients(lambda i, gradient: gradient.dtype != self._values[i].dtype)
        if not found:
            return
        wide = {i: torch.empty_like(g, dtype=self._values[i].dtype) for i, g in found.items()}
        torch._foreach_copy_(list(wide.values()), list(found.values()))
        again = [i for i in wide if i in self._sums]
        if again:
            torch._foreach_add_([self._sums[i] for i in again], [wide[i] for i in again])
        self._sums = wide | self._sums
        for i in found:
            self._targets[i].grad = None

    def add_gradients(self) -> None:
        """Add the collected gradients to `.grad` of the network's parameters."""
        sums = self._sums | self._gradients(lambda i, gradient: i not in self._sums)
        if sums:
            torch.autograd.backward([self._values[i] for i in sums], list(sums.values()))
        self._values, self._sums = [], {}

    def _gradients(self, wanted: Callable[[int, Tensor], bool]) -> dict[int, Tensor]:
        """Return the gradients of the copy's parameters for which `wanted` is true, by position."""
        found = {i: t.grad for i, t in enumerate(self._targets) if t.grad is not None}
        return {i: gradient for i, gradient in found.items() if wanted(i, gradient)}


def make_folded_copy(
    net: nn.Module, images: Tensor, autocast: torch.dtype | None
) -> FoldedCopy | None:
    """Create the folded copy of a network; None if it cannot be copied or the copy fails.

    A network of the user may contain objects that cannot be copied, or use the weights of a layer
    in an unusual way.
    """
    try:
        folded_copy = FoldedCopy(net, images, autocast)
        half = autocast is not None
        with torch.no_grad(), torch.autocast(images.device.type, autocast, enabled=half):
            folded_copy.module(images)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # code of the user may raise anything
        return None
    return folded_copy


def sharing_copy(net: nn.Module, shared: Iterable[object] = ()) -> nn.Module:
    """Copy the modules; parameters, buffers, hooks and `shared` objects are not copied."""
    return copy_modules(net, (*net.parameters(), *net.buffers(), *_hooks(net), *shared))


def copy_modules(net: nn.Module, kept: Iterable[object] = ()) -> nn.Module:
    """Return a deep copy of a network that refers to the same `kept` objects.

    Each module has a dozen empty dictionaries. Their copies are made here, because `deepcopy` would
    spend most of its time on them.
    """
    copies: dict[int, Any] = {id(part): part for part in kept}
    for module in net.modules():
        for part in vars(module).values():
            if type(part) in (dict, OrderedDict, set) and not part:
                copies.setdefault(id(part), type(part)())
    return copy.deepcopy(net, copies)


def _hooks(net: nn.Module) -> Iterator[object]:
    """Yield the hooks of a network, except methods of its own modules, which belong to a copy."""
    for module in net.modules():
        for kind in HOOKS:
            for hook in getattr(module, kind).values():
                if not isinstance(getattr(hook, "__self__", None), nn.Module):
                    yield hook


def _fold(module: nn.Module, fold: Fold) -> tuple[nn.Parameter, nn.Parameter]:
    """Remove a batch norm; return the empty weight and bias of its convolution."""
    conv, norm = module.get_submodule(fold.conv), module.get_submodule(fold.norm)
    assert isinstance(conv, nn.Conv2d)
    conv.weight = nn.Parameter(torch.empty_like(conv.weight))
    conv.bias = nn.Parameter(conv.weight.new_empty(conv.out_channels))
    rest: nn.Module = nn.Identity()
    if isinstance(norm, BatchNormAct2d):
        rest = nn.Sequential(OrderedDict(drop=norm.drop, act=norm.act))
    _replace(module, fold.norm, rest)
    return conv.weight, conv.bias


def _replace(net: nn.Module, name: str, part: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(net.get_submodule(parent), child, part)


def _pairs(net: nn.Module, folds: Sequence[Fold]) -> list[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    pairs = []
    for fold in folds:
        conv, norm = net.get_submodule(fold.conv), net.get_submodule(fold.norm)
        assert isinstance(conv, nn.Conv2d)
        assert isinstance(norm, nn.BatchNorm2d)
        pairs.append((conv, norm))
    return pairs


def _present(*parameters: Tensor | None) -> list[Tensor]:
    return [parameter for parameter in parameters if parameter is not None]


def _widened(maps: Tensor, channels: int) -> Tensor:
    """Add zeros along the second axis: [A, C, H, W] -> [A, channels, H, W]."""
    return F.pad(maps, (0, 0, 0, 0, 0, channels - maps.shape[1]))


def _is_strided(conv: nn.Conv2d) -> bool:
    """Whether a convolution has a stride of 2, and zeros as its padding."""
    return (
        type(conv) is nn.Conv2d
        and conv.stride == (STRIDE, STRIDE)
        and conv.dilation == (1, 1)
        and conv.padding_mode == "zeros"
        and not isinstance(conv.padding, str)
    )


def _blocks_of(weight: Tensor) -> Tensor:
    """Return the weights of blocks of 2 × 2 pixels: [O, 3, h, w] -> [O, 16, ⌈h/2⌉, ⌈w/2⌉]."""
    height, width = weight.shape[2:]
    even = F.pad(weight, (0, width % STRIDE, 0, height % STRIDE))
    return _widened(F.pixel_unshuffle(even, STRIDE), BLOCK_CHANNELS)


def _shaped_like(target: Tensor, value: Tensor) -> Tensor:
    """Return a value for a parameter of the copy; those of widened convolutions are reshaped."""
    if value.shape == target.shape:
        return value
    if target.shape[1] == BLOCK_CHANNELS:
        return _blocks_of(value)
    return _widened(value, target.shape[1])


class BlockInput:
    """A forward pre-hook that turns blocks of 2 × 2 pixels into channels.

    Output o of a convolution with a stride of 2 reads the padded pixels 2 o, 2 o + 1, ... These are
    the blocks o, o + 1, ..., so a convolution of the blocks has no stride.
    """

    def __init__(self, conv: nn.Conv2d) -> None:
        assert not isinstance(conv.padding, str)
        self.window, self.padding = conv.kernel_size, conv.padding

    def __call__(self, conv: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        """Pad images [B, 3, H, W] and return their blocks [B, 16, h, w]."""
        assert isinstance(conv, nn.Conv2d)
        images = inputs[0].to(conv.weight.dtype)
        margins: list[int] = []
        for side, window, padding in zip(images.shape[2:], self.window, self.padding, strict=True):
            outputs = (side + 2 * padding - window) // STRIDE + 1
            padded = STRIDE * (outputs + -(-window // STRIDE) - 1)
            margins = [padding, padded - side - padding, *margins]
        blocks = F.pixel_unshuffle(F.pad(images, margins), STRIDE)
        return _widened(blocks, conv.in_channels).contiguous(memory_format=torch.channels_last)


def _widen_input(conv: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """Extend the input of a convolution with more channels, as a forward pre-hook."""
    assert isinstance(conv, nn.Conv2d)
    return _widened(inputs[0].to(conv.weight.dtype), conv.in_channels)


def perturb(tensor: Tensor, generator: torch.Generator) -> None:
    """Change every element by 5 to 15 % of the root mean square of the tensor.

    A tensor of zeros is changed as if it had the usual size of initial weights.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return
    size = tensor.square().mean().sqrt()
    inputs = tensor[0].numel() if tensor.ndim else 1
    size = torch.where(size > 0, size, inputs**-0.5)
    noise = _uniform(tensor, generator, -1, 1)
    tensor.add_(0.1 * size * (noise + 0.5 * noise.sign()))


def _perturb_statistics(norm: nn.BatchNorm2d, generator: torch.Generator) -> None:
    mean, variance = norm.running_mean, norm.running_var
    assert mean is not None
    assert variance is not None
    mean.add_(_uniform(mean, generator, -0.3, 0.3) * variance.sqrt())
    variance.mul_(_uniform(variance, generator, 0.5, 2))


def _uniform(like: Tensor, generator: torch.Generator, low: float, high: float) -> Tensor:
    return torch.empty_like(like).uniform_(low, high, generator=generator)
