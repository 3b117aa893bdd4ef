"""Pickles from elsewhere, read without running any code."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from listwise.errors import InputError


def read_pickle_restricted(path: str | Path) -> Any:
    """Read a pickle that holds only containers, text, bytes, numbers and numpy arrays.

    Anything else in the file is refused before it is built, so a file from elsewhere cannot run
    code. Numpy objects are never rebuilt by numpy's own unpickling: plain stand-ins collect their
    parts, which are checked as the arrays are made.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            return real_value(Reader(file, encoding="latin1").load(), {})
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except ForbiddenError as error:
        raise InputError(f"{path}: refused, it would load {error}; only plain data may") from None
    except Exception as error:  # a malformed pickle may raise nearly anything
        reason = str(error).split("\n")[0] or type(error).__name__
        raise InputError(f"{path}: not a readable pickle of plain data ({reason})") from None


class ForbiddenError(Exception):
    """The pickle names something outside the allow-list."""


class Reader(pickle.Unpickler):
    """An unpickler that finds only what is on the allow-list."""

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a global."""
        module = {"__builtin__": "builtins"}.get(module, module)
        module = module.replace("numpy.core.", "numpy._core.")
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise ForbiddenError(f"{module}.{name}") from None


class Maker:
    """A function that a pickle may call but, unlike a plain function, cannot set attributes on."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        return self.make(*arguments)

    def __setstate__(self, state: Any) -> NoReturn:
        raise pickle.UnpicklingError("a function has no state")


class _DType:
    """A dtype as the pickle describes it."""

    __slots__ = ("real",)

    def __init__(self, code: str) -> None:
        self.real = np.dtype(code)
        if self.real.kind not in "biufcSUO":
            raise pickle.UnpicklingError(f"arrays of type {self.real} are not plain data")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.real = self.real.newbyteorder(state[1])


class Array:
    """An array as the pickle describes it; its parts come after it is made."""

    __slots__ = ("parts",)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        order: Literal["F", "C"] = "F" if fortran else "C"
        self.parts = (data, dtype, tuple(int(size) for size in shape), order)

    def real(self, memo: dict[int, Any]) -> NDArray[Any]:
        """The array itself."""
        data, dtype, shape, order = self.parts
        if dtype.real.kind != "O":
            return _from_buffer(data, dtype, shape, order)
        flat: NDArray[Any] = np.empty(len(data), dtype=object)
        for position, value in enumerate(data):
            flat[position] = real_value(value, memo)
        return flat.reshape(shape, order=order)


def _from_buffer(
    data: bytes | str,
    dtype: _DType,
    shape: tuple[int, ...],
    order: Any,
    axes: tuple[int, ...] | None = None,
) -> NDArray[Any]:
    if isinstance(data, str):  # bytes, as Python 2 wrote them
        data = data.encode("latin1")
    flat: NDArray[Any] = np.frombuffer(data, dtype.real).copy()
    if axes is not None:
        return flat.reshape(shape).transpose(axes)
    return flat.reshape(shape, order=order)


def _to_bytes(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes written as {encoding}")
    return text.encode(encoding)


_ALLOWED: dict[tuple[str, str], Any] = {
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "bytes"): Maker(lambda: b""),  # how protocol 2 writes no bytes at all
    ("_codecs", "encode"): Maker(_to_bytes),
    ("numpy", "dtype"): Maker(lambda code, *_: _DType(code)),
    ("numpy", "ndarray"): Maker(lambda *_: Array()),
    ("numpy._core.multiarray", "_reconstruct"): Maker(lambda *_: Array()),
    ("numpy._core.multiarray", "scalar"): Maker(
        lambda dtype, data: _from_buffer(data, dtype, (1,), "C")[0]
    ),
    ("numpy._core.numeric", "_frombuffer"): Maker(_from_buffer),
}


def real_value(value: Any, memo: dict[int, Any]) -> Any:
    """`value` with every stand-in replaced by what it stands for; shared parts are done once."""
    if id(value) in memo:
        return memo[id(value)]
    real: Any = value
    if isinstance(value, dict):
        real = {real_value(key, memo): real_value(item, memo) for key, item in value.items()}
    elif isinstance(value, (list, tuple, set, frozenset)):
        real = type(value)(real_value(item, memo) for item in value)
    elif isinstance(value, Array):
        real = value.real(memo)
    elif isinstance(value, (Maker, _DType, type)):
        raise ForbiddenError("a type or function as a value")
    memo[id(value)] = real
    return real
