"""Detect changes to the layers, settings and hooks of a network; values of tensors may change."""

from collections.abc import Collection
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_WHOLE = (nn.Module, Tensor, np.ndarray, type, FunctionType, MethodType, BuiltinFunctionType)
# Attributes of every module that do not affect the forward pass.
_IGNORED = frozenset(
    {
        "_non_persistent_buffers_set",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    }
)


class Snapshot:
    """The parts, settings and hooks of a network at one time.

    Numbers, text and containers are compared by value; modules, tensors, functions and arrays by
    identity; other objects by identity and attributes.

    Attributes:
        shared: the tensors and arrays; changes of their values are not detected.
    """

    def __init__(self, net: nn.Module) -> None:
        modules = list(net.modules())
        self._modules = [*map(id, modules)]
        self._states = [_ModuleState(module) for module in modules]
        kept = [part for state in self._states for part in state.kept]
        self.shared = [part for part in kept if isinstance(part, (Tensor, np.ndarray))]

    def matches(self, net: nn.Module) -> bool:
        """Return whether the network has the same parts, settings and hooks."""
        same = [*map(id, net.modules())] == self._modules
        return same and all(state.matches() for state in self._states)


class _ModuleState:
    """The attributes of one module at one time.

    A network is compared before every update, so the comparison checks identities first, which is
    faster than describing the module again.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._entries = vars(module)
        self.kept: list[Any] = [*self._entries.values()]  # kept alive, so that ids are not reused
        self._ids = [*map(id, self._entries.values())]
        self._description = _describe(module, self.kept)
        self._dicts = [entry for entry in self._entries.values() if _is_flat_dict(entry)]
        self._sizes = [*map(len, self._dicts)]
        self._filled = [(entry, _identities(entry)) for entry in self._dicts if entry]
        self._shallow = all(
            name in _IGNORED or _is_shallow(entry) for name, entry in self._entries.items()
        )

    def matches(self) -> bool:
        """Return whether the module has the same attributes."""
        if (
            self._shallow
            and [*map(id, self._entries.values())] == self._ids
            and [*map(len, self._dicts)] == self._sizes
            and all(_identities(entry) == ids for entry, ids in self._filled)
        ):
            return True
        return self._description == _describe(self._module, [])


def _is_flat_dict(entry: Any) -> bool:
    return isinstance(entry, dict) and all(
        type(part) in _VALUES or isinstance(part, _WHOLE) for part in entry.values()
    )


def _is_shallow(entry: Any) -> bool:
    """Return whether identities show all changes of an attribute."""
    if type(entry) is tuple:
        return all(type(part) in _VALUES for part in entry)
    return type(entry) in _VALUES or isinstance(entry, _WHOLE) or _is_flat_dict(entry)


def _identities(entry: dict[Any, Any]) -> list[int]:
    return [*map(id, entry.values())]


def _describe(module: nn.Module, kept: list[Any]) -> list[Any]:
    found: list[Any] = []
    seen: set[int] = set()
    for name, value in vars(module).items():
        if name not in _IGNORED:
            found.append(name)
            _add(value, found, seen, kept)
    return found


def _add(
    value: Any, found: list[Any], seen: set[int], kept: list[Any], inside_object: bool = False
) -> None:
    """Append a description of a value; each container is visited once."""
    kind = type(value)
    if kind in _VALUES:
        found.append(value)
        return
    inside: Collection[Any] = ()
    if kind in (tuple, list):
        inside = value
    elif isinstance(value, dict):
        found.append(tuple(key if type(key) in _VALUES else id(key) for key in value))
        inside = value.values()
    elif isinstance(value, (set, frozenset)):
        found.append(frozenset(value))
    else:
        found.append(id(value))
        kept.append(value)
        # Objects inside an object are compared by identity: it may refer to half of the program.
        if not inside_object and not isinstance(value, _WHOLE) and hasattr(value, "__dict__"):
            inside, inside_object = vars(value).values(), True
    if inside and id(value) not in seen:
        seen.add(id(value))
        found.append(len(inside))
        for part in inside:
            _add(part, found, seen, kept, inside_object)
