"""The judgements of the revisited benchmarks, read from their pickles without running any code."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from listwise.errors import InputError

Box = tuple[float, float, float, float]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class GroundTruth:
    """What is to be found, and how hard it is to find, for every query of a benchmark.

    Shapes: `names` lists the N database images (no folder, no extension); `queries`, `boxes`
    (left, top, right, bottom in pixels), `easy`, `hard` and `junk` have one entry for each of the
    Q queries, the last three holding positions in `names`.
    """

    names: list[str]
    queries: list[str]
    boxes: list[Box]
    easy: list[Indices]
    hard: list[Indices]
    junk: list[Indices]


def read_ground_truth(path: str | Path) -> GroundTruth:
    """Read a `gnd_*.pkl` file: a dict of imlist, qimlist and gnd (bbx, easy, hard, junk)."""
    content = read_pickle_restricted(path)
    names = [str(name) for name in _field(content, "imlist", str(path))]
    queries = [str(name) for name in _field(content, "qimlist", str(path))]
    judgements = _field(content, "gnd", str(path))
    if len(judgements) != len(queries):
        raise InputError(
            f"{path}: {len(queries)} queries but {len(judgements)} judgements; give one for each"
        )
    truth = GroundTruth(names, queries, [], [], [], [])
    for query, judgement in zip(queries, judgements, strict=True):
        where = f"{path}, query {query}"
        truth.boxes.append(_box(_field(judgement, "bbx", where), where))
        found = [
            _indices(_field(judgement, key, where), key, len(names), where)
            for key in ("easy", "hard", "junk")
        ]
        everything = np.concatenate(found)
        if len(np.unique(everything)) != len(everything):
            raise InputError(f"{where}: an image is judged twice; easy, hard and junk must differ")
        truth.easy.append(found[0])
        truth.hard.append(found[1])
        truth.junk.append(found[2])
    return truth


def _field(content: Any, key: str, where: str) -> Any:
    if not isinstance(content, dict):
        raise InputError(f"{where}: expected a dict with '{key}', found {type(content).__name__}")
    if key not in content:
        raise InputError(f"{where}: the key '{key}' is missing from the ground truth")
    value = content[key]
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise InputError(f"{where}: '{key}' should be a list, found {type(value).__name__}")
    return value


def _box(value: Any, where: str) -> Box:
    try:
        left, top, right, bottom = (float(number) for number in value)
    except (TypeError, ValueError):
        raise InputError(f"{where}: 'bbx' should be four numbers") from None
    if not (left < right and top < bottom):
        raise InputError(
            f"{where}: 'bbx' should be left, top, right, bottom in that order, "
            f"found {left:g}, {top:g}, {right:g}, {bottom:g}"
        )
    return left, top, right, bottom


def _indices(value: Any, key: str, count: int, where: str) -> Indices:
    found = np.asarray(value)
    if found.size == 0:
        return np.zeros(0, np.int64)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise InputError(f"{where}: '{key}' should be a flat list of whole numbers")
    if found.min() < 0 or found.max() >= count:
        outside = int(found.min() if found.min() < 0 else found.max())
        raise InputError(f"{where}: '{key}' names image {outside}, but imlist has {count} images")
    return found.astype(np.int64)


def read_pickle_restricted(path: str | Path) -> Any:
    """Read a pickle that holds only containers, text, bytes, numbers and numpy arrays.

    Anything else in the file is refused before it is built, so a file from elsewhere cannot run
    code. Numpy objects are never rebuilt by numpy's own unpickling: plain stand-ins collect their
    parts, which are checked as the arrays are made.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            return _settle(_Reader(file, encoding="latin1").load(), {})
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except _ForbiddenError as error:
        raise InputError(f"{path}: refused, it would load {error}; only plain data may") from None
    except Exception as error:  # a malformed pickle may raise nearly anything
        reason = str(error).split("\n")[0] or type(error).__name__
        raise InputError(f"{path}: not a readable pickle of plain data ({reason})") from None


class _ForbiddenError(Exception):
    """The pickle names something outside the allow-list."""


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = {"__builtin__": "builtins"}.get(module, module)
        module = module.replace("numpy.core.", "numpy._core.")
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise _ForbiddenError(f"{module}.{name}") from None


class _Maker:
    """A function that a pickle may call but, unlike a plain function, cannot set attributes on."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def __call__(self, *arguments: Any) -> Any:
        return self.make(*arguments)

    def __setstate__(self, state: Any) -> NoReturn:
        raise pickle.UnpicklingError("a function has no state")


class _DType:
    """What the pickle says of a dtype."""

    __slots__ = ("real",)

    def __init__(self, code: str) -> None:
        self.real = np.dtype(code)
        if self.real.kind not in "biufcSUO":
            raise pickle.UnpicklingError(f"arrays of type {self.real} are not plain data")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.real = self.real.newbyteorder(state[1])


class _Array:
    """What the pickle says of an array; its parts come after it is made."""

    __slots__ = ("parts",)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, data = state
        order: Literal["F", "C"] = "F" if fortran else "C"
        self.parts = (data, dtype, tuple(int(size) for size in shape), order)

    def real(self, memo: dict[int, Any]) -> NDArray[Any]:
        data, dtype, shape, order = self.parts
        if dtype.real.kind != "O":
            return _from_buffer(data, dtype, shape, order)
        flat: NDArray[Any] = np.empty(len(data), dtype=object)
        for position, value in enumerate(data):
            flat[position] = _settle(value, memo)
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
    ("builtins", "bytes"): _Maker(lambda: b""),  # how protocol 2 writes no bytes at all
    ("_codecs", "encode"): _Maker(_to_bytes),
    ("numpy", "dtype"): _Maker(lambda code, *_: _DType(code)),
    ("numpy", "ndarray"): _Maker(lambda *_: _Array()),
    ("numpy._core.multiarray", "_reconstruct"): _Maker(lambda *_: _Array()),
    ("numpy._core.multiarray", "scalar"): _Maker(
        lambda dtype, data: _from_buffer(data, dtype, (1,), "C")[0]
    ),
    ("numpy._core.numeric", "_frombuffer"): _Maker(_from_buffer),
}


def _settle(value: Any, memo: dict[int, Any]) -> Any:
    """`value` with every stand-in replaced by what it stands for; shared parts are done once."""
    if id(value) in memo:
        return memo[id(value)]
    settled: Any = value
    if isinstance(value, dict):
        settled = {_settle(key, memo): _settle(item, memo) for key, item in value.items()}
    elif isinstance(value, (list, tuple, set, frozenset)):
        settled = type(value)(_settle(item, memo) for item in value)
    elif isinstance(value, _Array):
        settled = value.real(memo)
    elif isinstance(value, (_Maker, _DType, type)):
        raise _ForbiddenError("a type or function as a value")
    memo[id(value)] = settled
    return settled
