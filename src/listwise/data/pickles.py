"""Read pickles from other people without running code."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from listwise.errors import InputError


def read_pickle_restricted(path: str | Path) -> Any:
    """Read a pickle of containers, text, bytes, numbers and NumPy arrays.

    Everything else in the file is refused before it is created, so the file cannot run code. The
    unpickling of NumPy is not used: placeholders collect the parts of arrays, which are checked
    before the arrays are created.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            return real_value(Reader(file, encoding="latin1").load(), {})
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except ForbiddenError as error:
        raise InputError(
            f"{path}: refused, because it contains {error}; only plain data is allowed"
        ) from None
    except Exception as error:  # a malformed pickle raises many kinds of errors
        reason = str(error).split("\n")[0] or type(error).__name__
        raise InputError(f"{path}: not a readable pickle of plain data ({reason})") from None


class ForbiddenError(Exception):
    """The pickle names something outside the allow-list."""


class Reader(pickle.Unpickler):
    """An unpickler that loads only names on the allow-list."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the placeholder for a global name."""
        module = {"__builtin__": "builtins"}.get(module, module)
        module = module.replace("numpy.core.", "numpy._core.")
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise ForbiddenError(f"{module}.{name}") from None


class Maker:
    """A function that a pickle may call, but whose attributes it cannot set."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        return self.make(*arguments)

    def __setstate__(self, state: Any) -> NoReturn:
        raise pickle.UnpicklingError("a function has no state")


class _DType:
    """A placeholder for a dtype."""

    __slots__ = ("real",)

    def __init__(self, code: str) -> None:
        self.real = np.dtype(code)
        if self.real.kind not in "biufcSUO":
            raise pickle.UnpicklingError(f"arrays of type {self.real} are not plain data")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.real = self.real.newbyteorder(state[1])


class Array:
    """A placeholder for an array, whose parts follow in the pickle."""

    __slots__ = ("parts",)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        order: Literal["F", "C"] = "F" if fortran else "C"
        self.parts = (data, dtype, tuple(int(size) for size in shape), order)

    def real(self, memo: dict[int, Any]) -> NDArray[Any]:
        """Create the array."""
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
    ("builtins", "bytes"): Maker(lambda: b""),  # protocol 2 writes empty bytes this way
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
    """Replace every placeholder in `value` by the real object; shared parts only once."""
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
