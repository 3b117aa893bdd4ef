"""Find the batch norms that can be folded, by recording what reads the output of convolutions.

A convolution and a batch norm can become one layer only if nothing else reads the output of the
convolution. The values of a forward pass do not prove that: a second reader behind a gate that
starts at zero changes nothing until training opens the gate. `survey` therefore records every
operator that reads the output of a convolution, whatever the operator computes.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from timm.layers import BatchNormAct2d, Conv2dSame
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Exactly these classes: a subclass may use its weights in another way.
CONVOLUTIONS = (nn.Conv2d, Conv2dSame)
NORMS = (nn.BatchNorm2d, BatchNormAct2d)
_CAST_BY_AUTOCAST = (*CONVOLUTIONS, nn.Conv1d, nn.Conv3d, nn.Linear)
_FOLDED_DTYPES = (torch.float32, torch.float64)
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Fold(NamedTuple):
    """The names of a convolution and of the batch norm that is the only reader of its output."""

    conv: str
    norm: str


class Survey(NamedTuple):
    """The batch norms that can be folded, and the layers whose weights autocast casts."""

    folds: list[Fold]
    cast: list[str]


def survey(net: nn.Module, images: Tensor) -> Survey:
    """Observe a forward pass of images [b, 3, H, W] under the caller's autocast.

    A batch norm can be folded under these conditions: the convolution and the batch norm are called
    once and have no hooks; the batch norm is frozen, has one name, and is the only reader of the
    output of the convolution; nothing but the convolution reads its weights. Weights that other
    code reads are not cast either.

    Autocast must not cache cast weights, or a second reader of a weight would not be noticed.
    """
    watch = _Watch(net)
    try:
        with torch.no_grad(), watch:
            net(images)
    finally:
        watch.remove_hooks()
    layers = dict(net.named_modules())
    names = Counter(id(module) for _, module in net.named_modules(remove_duplicate=False))
    cast = [name for name, always in watch.cast.items() if always and watch.owns_weights(name)]
    folds = [
        fold
        for fold in watch.pairs
        if watch.calls[fold.conv] == watch.calls[fold.norm] == 1
        and watch.readers[fold.conv] == {fold.norm}
        and watch.owns_weights(fold.conv)
        and is_plain(layers[fold.conv])
        and is_plain(layers[fold.norm])
        and layers[fold.conv].weight.dtype in _FOLDED_DTYPES
        and not layers[fold.norm].training
        and names[id(layers[fold.norm])] == 1
    ]
    return Survey(folds, cast)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records, operator by operator, which layers read outputs of convolutions and weights.

    Attributes:
        calls: calls of each layer.
        pairs: pairs of a convolution and a batch norm that got its output unchanged.
        readers: for each convolution, the layers that read its output; "" is code outside of
            the observed layers.
        cast: for each plain layer that autocast can cast, whether it always did.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.pairs: list[Fold] = []
        self.readers: dict[str, set[str]] = defaultdict(set)
        self.cast: dict[str, bool] = {}
        self._running: list[str] = []
        # By address. The outputs are kept alive, so that their addresses are not reused.
        self._outputs: dict[int, tuple[str, Tensor, int]] = {}
        self._owners: dict[int, set[str]] = defaultdict(set)
        self._read_outside: set[int] = set()
        self._weights: dict[str, list[int]] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        for name, module in net.named_modules():
            if type(module) in (*NORMS, *_CAST_BY_AUTOCAST):
                self._watch(name, module)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: no compiled code runs in this mode, and loading the compiler is slow."""
        return False

    def _watch(self, name: str, module: nn.Module) -> None:
        self._weights[name] = [_address(weight) for weight in module.parameters(recurse=False)]
        for place in self._weights[name]:
            self._owners[place].add(name)
        plain = is_plain(module)  # before the hooks below are added
        self._hooks.append(module.register_forward_pre_hook(self._entered(name, plain)))
        self._hooks.append(module.register_forward_hook(self._left(name)))

    def _entered(self, name: str, plain: bool) -> Callable[..., None]:
        def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self.calls[name] += 1
            self._running.append(name)
            if type(module) in NORMS:
                maker, output, version = self._outputs.get(_address(inputs[0]), ("", None, -1))
                if output is inputs[0] and version == output._version:  # not changed in place
                    self.pairs.append(Fold(maker, name))
            elif plain:
                on = torch.is_autocast_enabled(inputs[0].device.type)
                self.cast[name] = self.cast.get(name, True) and on

        return note

    def _left(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self._running.pop()
            if type(module) in CONVOLUTIONS:
                self._outputs[_address(output)] = name, output, output._version

        return note

    def _record(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        running = self._running[-1] if self._running else ""
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                place = _address(tensor)
                if place in self._outputs:
                    self.readers[self._outputs[place][0]].add(running)
                if place in self._owners and running not in self._owners[place]:
                    self._read_outside.add(place)
        return func(*args, **(kwargs or {}))

    def owns_weights(self, name: str) -> bool:
        """Return whether only layers that contain the weights of this layer have read them."""
        return self._read_outside.isdisjoint(self._weights[name])

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()


# Not in the class: PyTorch would import its compiler, which takes seconds, to exclude the method.
_Watch.__torch_dispatch__ = _Watch._record  # type: ignore[method-assign,assignment]


def is_plain(module: nn.Module) -> bool:
    """Return whether a layer has neither hooks nor a `forward` of its own."""
    return "forward" not in vars(module) and not any(getattr(module, name) for name in HOOKS)


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which its views share."""
    return tensor.untyped_storage().data_ptr()
