"""Read pickles and checkpoints from other people without running code.

Files of `torch.save` contain a pickle too. Both formats are supported: the zip archive, and the
stream of pickles that torch wrote before 1.6.
"""

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from listwise.errors import InputError, first_line

_MAGIC: Final = 0x1950A86A20F9469CFC6C
_PROTOCOL: Final = 1001

_STORAGES: Final = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


def read_pickle_restricted(path: str | Path) -> Any:
    """Read a pickle of containers, text, bytes, numbers and NumPy arrays.

    Everything else in the file is refused before it is created, so the file cannot run code. The
    unpickling of NumPy is not used: placeholders collect the parts of arrays, which are checked
    before the arrays are created.
    """
    path = Path(path)
    with _opened(path, "pickle of plain data") as file:
        return _real_value(_Reader(file).load(), {})


def read_checkpoint(path: str | Path) -> Any:
    """Read a file of `torch.save`; objects of known classes become dictionaries.

    Besides what `read_pickle_restricted` reads, it may contain tensors, and objects of the few
    classes that released checkpoints use. Any other class is an error.
    """
    path = Path(path)
    with _opened(path, "torch checkpoint") as file:
        limit = path.stat().st_size
        zipped = file.read(4) == b"PK\x03\x04"
        file.seek(0)
        content = _read_zip(file, limit) if zipped else _read_stream(file, limit)
        return _real_value(content, {})


@contextmanager
def _opened(path: Path, what: str) -> Iterator[BinaryIO]:
    """Open a file; every error becomes an `InputError` of one line."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error})") from None
    except _ForbiddenError as error:
        raise InputError(
            f"{path} contains {error}: only tensors, arrays and plain data are allowed"
        ) from None
    except Exception as error:  # a malformed file may raise nearly anything
        raise InputError(
            f"{path} is not a readable {what} ({first_line(error)}): copy it again, or give "
            "another file"
        ) from None


def _read_zip(file: BinaryIO, limit: int) -> Any:
    with zipfile.ZipFile(file) as archive:
        if any(member.file_size > limit for member in archive.infolist()):
            raise pickle.UnpicklingError("a part of the archive is larger than the file")
        names = archive.namelist()
        found = [name for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(found) != 1:
            raise pickle.UnpicklingError("the archive must have one data.pkl")
        reader = _Reader(io.BytesIO(archive.read(found[0])), limit)
        content = reader.load()
        for key, storage in reader.storages.items():
            storage.fill(archive.read(f"{found[0].removesuffix('data.pkl')}data/{key}"))
    return content


def _read_stream(file: BinaryIO, limit: int) -> Any:
    if (_Reader(file).load(), _Reader(file).load()) != (_MAGIC, _PROTOCOL):
        raise pickle.UnpicklingError("neither a zip archive nor an older torch file")
    _Reader(file).load()  # about the machine that wrote it
    reader = _Reader(file, limit)
    content = reader.load()
    keys = _Reader(file).load()
    if set(keys) != reader.storages.keys():
        raise pickle.UnpicklingError("the tensors have other storages than the file")
    for key in keys:
        flat = reader.storages[key].flat
        if struct.unpack("<q", file.read(8))[0] != len(flat):
            raise pickle.UnpicklingError(f"storage {key} has another length than declared")
        reader.storages[key].fill(file.read(flat.nbytes))
    return content


class _ForbiddenError(Exception):
    """The pickle names something outside the allow-list."""


class _Reader(pickle.Unpickler):
    """An unpickler that loads only names on the allow-list.

    Attributes:
        storages: the storages of tensors by key, whose values are filled in later.
    """

    def __init__(self, file: BinaryIO, limit: int = 0) -> None:
        super().__init__(file, encoding="latin1")
        self.limit = limit
        self.storages: dict[str, _Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return the placeholder for a global name."""
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        module = module.replace("numpy.core.", "numpy._core.").removeprefix("dirtorch.")
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise _ForbiddenError(f"{module}.{name}") from None

    def persistent_load(self, identity: Any) -> "_Tensor":
        """Return the storage of a tensor."""
        kind, dtype, key, _, count = identity[:5]
        if kind != "storage" or not isinstance(dtype, torch.dtype) or any(identity[5:]):
            raise pickle.UnpicklingError("a storage of an unknown kind")
        if not 0 <= count * dtype.itemsize <= self.limit:
            raise pickle.UnpicklingError("a storage larger than the file")
        return self.storages.setdefault(str(key), _Tensor(torch.empty(count, dtype=dtype)))


class _Maker:
    """A function that a pickle may call, but whose attributes it cannot set."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def __call__(self, *arguments: Any) -> Any:
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


class _Array:
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
            flat[position] = _real_value(value, memo)
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


class _Tensor(_Array):
    """A placeholder for a tensor, or for the storage of tensors, which are views of it."""

    __slots__ = ("flat",)

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat

    def fill(self, data: bytes) -> None:
        """Set the values of a storage."""
        if len(data) != self.flat.nbytes:
            raise pickle.UnpicklingError("the file ends early")
        self.flat.view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)

    def view(self, offset: int, size: Any, stride: Any, *_: Any) -> "_Tensor":
        """Return a tensor of this storage."""
        if math.prod(size) > len(self.flat):
            raise pickle.UnpicklingError("a tensor larger than its storage")
        # torch raises an error for a view outside of the storage.
        return _Tensor(self.flat.as_strided(tuple(size), tuple(stride), offset))

    def real(self, memo: dict[int, Any]) -> Any:
        """Return the tensor."""
        return self.flat


class _Record(_Array):
    """An object of a known class, which is not imported: its attributes become a dictionary."""

    __slots__ = ("state",)

    def __init__(self, *_: Any) -> None:
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def real(self, memo: dict[int, Any]) -> Any:
        """Return the attributes."""
        # An object without attributes is made without a state.
        return _real_value(getattr(self, "state", {}), memo)


def _reconstruct(kind: Any, *_: Any) -> _Record:
    if kind is not _Record:
        raise pickle.UnpicklingError("only records may be reconstructed")
    return _Record()


_nothing = _Maker(lambda: None)
_ALLOWED: Final[dict[tuple[str, str], Any]] = {
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "bytes"): _Maker(lambda: b""),  # protocol 2 writes empty bytes this way
    ("collections", "OrderedDict"): OrderedDict,
    ("_codecs", "encode"): _Maker(str.encode),
    ("numpy", "dtype"): _Maker(lambda code, *_: _DType(code)),
    ("numpy", "ndarray"): _Maker(lambda *_: _Array()),
    ("numpy._core.multiarray", "_reconstruct"): _Maker(lambda *_: _Array()),
    ("numpy._core.multiarray", "scalar"): _Maker(
        lambda dtype, data: _from_buffer(data, dtype, (1,), "C")[0]
    ),
    ("numpy._core.numeric", "_frombuffer"): _Maker(_from_buffer),
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
    ("torch._utils", "_rebuild_tensor_v2"): _Maker(_Tensor.view),
    ("torch._utils", "_rebuild_tensor"): _Maker(_Tensor.view),
    ("torch._utils", "_rebuild_parameter"): _Maker(lambda data, *_: data),
    ("torch", "Size"): _Maker(tuple),
    ("copyreg", "_reconstructor"): _Maker(_reconstruct),
    # A device becomes its name, a dictionary loses its default, a generator becomes its state.
    ("torch", "device"): _Maker(lambda *parts: ":".join(map(str, parts))),
    ("collections", "defaultdict"): _Maker(lambda *_: {}),
    **{("builtins", name): _nothing for name in ("object", "list", "dict", "int", "float")},
    ("numpy.random._pickle", "__randomstate_ctor"): _Maker(lambda *_: _Record()),
    ("numpy.random._pickle", "__bit_generator_ctor"): _Maker(lambda *_: _Record()),
    ("numpy.random._mt19937", "MT19937"): _nothing,
    # scikit-learn has moved the class PCA more than once. Some checkpoints contain the meters of a
    # training run; they are read and ignored.
    ("sklearn.decomposition.pca", "PCA"): _Record,
    ("sklearn.decomposition._pca", "PCA"): _Record,
    ("utils.watcher", "AverageMeter"): _Record,
    ("utils.watcher", "Watch"): _Record,
    ("argparse", "Namespace"): _Record,
}


def _real_value(value: Any, memo: dict[int, Any]) -> Any:
    """Replace every placeholder in `value` by the real object; shared parts only once."""
    if id(value) in memo:
        return memo[id(value)]
    real: Any = value
    if isinstance(value, dict):
        real = {_real_value(key, memo): _real_value(item, memo) for key, item in value.items()}
    elif isinstance(value, (list, tuple, set, frozenset)):
        real = type(value)(_real_value(item, memo) for item in value)
    elif isinstance(value, _Array):
        real = value.real(memo)
    elif isinstance(value, (_Maker, _DType, type)):
        raise _ForbiddenError("a type or function as a value")
    memo[id(value)] = real
    return real
