"""A network's twin for half precision: frozen batch norm folded away, weights cast once a step.

A frozen batch norm multiplies each channel by a constant and adds another. A convolution right
before it can do both itself, with weights w·s and bias (b − μ)·s + β, where s = γ / √(σ² + ε): one
pass over the activations less, and half of them need not be kept for the backward pass.

The twin computes with such folded weights and leaves the network itself as it is. What it learns
goes back through the fold, which is an ordinary differentiable function of w, b, γ and β, so that
the network gets the gradient of its own parameters.
"""

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from timm.layers import BatchNormAct2d, Conv2dSame
from torch import Tensor, nn

# Exactly these: what a subclass does with its weights is its own affair.
_CONVOLUTIONS = (nn.Conv2d, Conv2dSame)
_NORMS = (nn.BatchNorm2d, BatchNormAct2d)
_CAST_BY_AUTOCAST = (*_CONVOLUTIONS, nn.Conv1d, nn.Conv3d, nn.Linear)
_FOLDED_DTYPES = (torch.float32, torch.float64)
# Two forwards in float32 are nearer to each other, also where convolutions round to TF32.
_SAME = 0.02


class Fold(NamedTuple):
    """The names of a convolution and of the batch norm that is all that sees its output."""

    conv: str
    norm: str


class Survey(NamedTuple):
    """What a forward pass shows: what can be folded, and whose weights autocast casts."""

    folds: list[Fold]
    cast: list[str]


def folded(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Weight [O, I, h, w] and bias [O] of the convolution that does what the two do together."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = (norm.running_var + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight
    shift = -norm.running_mean if conv.bias is None else conv.bias - norm.running_mean
    shift = shift * scale
    if norm.bias is not None:
        shift = shift + norm.bias
    return conv.weight * scale.view(-1, 1, 1, 1), shift


def survey(net: nn.Module, images: Tensor) -> Survey:
    """Watch a forward pass of images [b, 3, H, W] under the caller's autocast.

    The folds are candidates: that nothing else sees a convolution's output does not show here.
    """
    calls: Counter[str] = Counter()
    made: dict[int, tuple[str, Tensor, int]] = {}
    folds: list[Fold] = []
    cast: dict[str, bool] = {}

    def convolved(name: str) -> Callable[..., None]:
        def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            # The tensor is kept, or its place in memory could be another's soon.
            made[id(output)] = name, output, output._version

        return note

    def entered(name: str) -> Callable[..., None]:
        def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            calls[name] += 1
            if type(module) in _NORMS:
                maker, _, version = made.get(id(inputs[0]), ("", None, -1))
                if version == inputs[0]._version:  # not changed in place since
                    folds.append(Fold(maker, name))
            else:
                on = torch.is_autocast_enabled(inputs[0].device.type)
                cast[name] = cast.get(name, True) and on

        return note

    hooks = []
    for name, module in net.named_modules():
        if type(module) in (*_NORMS, *_CAST_BY_AUTOCAST):
            hooks.append(module.register_forward_pre_hook(entered(name)))
        if type(module) in _CONVOLUTIONS and module.weight.dtype in _FOLDED_DTYPES:
            hooks.append(module.register_forward_hook(convolved(name)))
    try:
        with torch.no_grad():
            net(images)
    finally:
        for hook in hooks:
            hook.remove()
    once = [fold for fold in folds if calls[fold.conv] == calls[fold.norm] == 1]
    return Survey(once, [name for name, always in cast.items() if always])


def folds_hold(net: nn.Module, folds: Sequence[Fold], images: Tensor) -> bool:
    """Whether the folded network gives the same descriptors of images [b, 3, H, W].

    Tried with other batch norms than the network's own: fresh ones change nothing, so that a
    wrong fold would show only after some training.
    """
    changed = _sharing_copy(net)
    generator = torch.Generator().manual_seed(0)
    for fold in folds:
        norm = copy.deepcopy(changed.get_submodule(fold.norm))
        assert isinstance(norm, nn.BatchNorm2d)
        _change(norm, generator)
        changed.set_submodule(fold.norm, norm)
    changed.eval()
    other = _sharing_copy(changed)
    with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
        for fold in folds:
            for target, value in zip(_fold(other, fold), _value(changed, fold), strict=True):
                target.copy_(value)
        expected, actual = changed(images), other(images)
    return bool((actual - expected).norm() <= _SAME * expected.norm())


class Twin:
    """A network that computes what `net` computes, folded and with its weights cast beforehand.

    Parameters that are neither folded nor cast are the network's own, shared. Call `refresh`
    when the network's weights have changed, `collect` after each backward, and `give_back` to add
    the gradients to the network's own.

    Args:
        net: the network; its batch norms frozen, where there are any.
        images: [b, 3, H, W], for a trial; a single one will do.
        autocast: the dtype the network would run in under autocast; float64 stays float64.

    Attributes:
        module: the network to call, under autocast still, in channels-last order.
        folds: what was folded; nothing if the trial came out differently.
    """

    def __init__(self, net: nn.Module, images: Tensor, autocast: torch.dtype) -> None:
        self.net = net
        self._parts = _parts(net)
        self.module = _sharing_copy(net).eval()
        with torch.autocast(images.device.type, autocast):
            self.folds, cast = survey(self.module, images)
        if not folds_hold(net, self.folds, images):
            self.folds = []
        self._targets: list[nn.Parameter] = []
        self._makers: list[Callable[[], Sequence[Tensor]]] = []
        for fold in self.folds:
            self._targets += _fold(self.module, fold)
            self._makers.append(lambda fold=fold: _value(net, fold))  # type: ignore[misc]
        in_folds = {fold.conv for fold in self.folds}
        for name in cast:
            if name not in in_folds:
                self._cast(name)
        for target in self._targets:
            narrow = autocast if target.dtype == torch.float32 else target.dtype
            order = torch.channels_last if target.ndim == 4 else torch.contiguous_format
            target.data = target.data.to(narrow, memory_format=order)
        self._values: list[Tensor] = []
        self._sums: dict[int, Tensor] = {}
        self.refresh()

    def _cast(self, name: str) -> None:
        """Give a layer of the twin parameters of its own, to be cast."""
        layer = self.module.get_submodule(name)
        for parameter_name, parameter in list(layer.named_parameters(recurse=False)):
            own = nn.Parameter(parameter.detach().clone())
            setattr(layer, parameter_name, own)
            self._targets.append(own)
            self._makers.append(lambda parameter=parameter: (parameter,))  # type: ignore[misc]

    def fits(self) -> bool:
        """Whether the network still has the parts it had; their values may have changed."""
        return self._parts == _parts(self.net)

    def refresh(self) -> None:
        """Take over the network's weights and modes; forget gradients."""
        with torch.enable_grad():
            self._values = [value for make in self._makers for value in make()]
        with torch.no_grad():
            for target, value in zip(self._targets, self._values, strict=True):
                target.copy_(value)
                target.requires_grad_(value.requires_grad)
                target.grad = None
        self._sums = {}
        theirs = dict(self.net.named_modules())
        for name, module in self.module.named_modules():
            if name in theirs:
                module.training = theirs[name].training

    def collect(self) -> None:
        """Add up the gradients so far in the network's precision: half has too few digits."""
        for i, (target, value) in enumerate(zip(self._targets, self._values, strict=True)):
            if target.grad is None:
                continue
            if i in self._sums:
                self._sums[i].add_(target.grad)
            else:
                self._sums[i] = target.grad.to(value.dtype)
            target.grad = None

    def give_back(self) -> None:
        """Add what was collected to `.grad` of the network's own parameters."""
        if self._sums:
            roots = [self._values[i] for i in self._sums]
            torch.autograd.backward(roots, list(self._sums.values()))
        self._values, self._sums = [], {}


def _sharing_copy(net: nn.Module) -> nn.Module:
    """A copy of the modules with the same parameters and buffers."""
    return copy.deepcopy(
        net, {id(tensor): tensor for tensor in (*net.parameters(), *net.buffers())}
    )


def _fold(module: nn.Module, fold: Fold) -> tuple[nn.Parameter, nn.Parameter]:
    """Take the batch norm out; the weight and bias that the convolution has now, to be filled."""
    conv, norm = module.get_submodule(fold.conv), module.get_submodule(fold.norm)
    assert isinstance(conv, nn.Conv2d)
    conv.weight = nn.Parameter(torch.empty_like(conv.weight))
    conv.bias = nn.Parameter(conv.weight.new_empty(conv.out_channels))
    rest: nn.Module = nn.Identity()
    if isinstance(norm, BatchNormAct2d):
        rest = nn.Sequential(OrderedDict(drop=norm.drop, act=norm.act))
    module.set_submodule(fold.norm, rest)
    return conv.weight, conv.bias


def _value(net: nn.Module, fold: Fold) -> tuple[Tensor, Tensor]:
    conv, norm = net.get_submodule(fold.conv), net.get_submodule(fold.norm)
    assert isinstance(conv, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    return folded(conv, norm)


def _change(norm: nn.BatchNorm2d, generator: torch.Generator) -> None:
    """Give a batch norm other constants."""

    def draw(low: float, high: float) -> Tensor:
        numbers = low + (high - low) * torch.rand(norm.num_features, generator=generator)
        return numbers.to(mean)

    mean, variance = norm.running_mean, norm.running_var
    assert mean is not None
    assert variance is not None
    with torch.no_grad():
        mean.add_(draw(-0.3, 0.3) * variance.sqrt())
        variance.mul_(draw(0.5, 2))
        if norm.weight is not None:
            norm.weight.add_(draw(0.1, 0.4))
        if norm.bias is not None:
            norm.bias.add_(draw(-0.3, 0.3))


def _parts(net: nn.Module) -> list[int]:
    return [id(part) for part in (*net.modules(), *net.parameters(), *net.buffers())]
