"""Read files of `torch.save` without running any code in them.

Both file formats are supported: the zip archive, and the stream of pickles that torch wrote before
1.6. The pickle may contain plain data, NumPy arrays, tensors, and objects of the few classes that
released checkpoints use, which become plain dictionaries; any other class is an error.
"""

import io
import math
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from listwise.data.pickles import Array, ForbiddenError, Maker, Reader, real_value
from listwise.errors import InputError

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
# scikit-learn has moved the class PCA more than once. Some checkpoints contain the meters of a
# training run; they are read and ignored.
_RECORDS: Final = {
    ("sklearn.decomposition.pca", "PCA"),
    ("sklearn.decomposition._pca", "PCA"),
    ("utils.watcher", "AverageMeter"),
    ("utils.watcher", "Watch"),
    ("argparse", "Namespace"),
}


def read_checkpoint(path: str | Path) -> Any:
    """Read a file of `torch.save`; objects of known classes become dictionaries."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            limit = path.stat().st_size
            zipped = file.read(4) == b"PK\x03\x04"
            file.seek(0)
            return _read_zip(file, limit) if zipped else _read_stream(file, limit)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error})") from None
    except ForbiddenError as error:
        raise InputError(
            f"{path} contains {error}: only tensors, arrays and plain data are allowed"
        ) from None
    except Exception as error:  # a malformed file may raise nearly anything
        reason = str(error).split("\n")[0] or type(error).__name__
        raise InputError(
            f"{path} is not a readable torch checkpoint ({reason}): give a .pt or .pth file"
        ) from None


def _read_zip(file: BinaryIO, limit: int) -> Any:
    with zipfile.ZipFile(file) as archive:
        if any(member.file_size > limit for member in archive.infolist()):
            raise pickle.UnpicklingError("a part of the archive is larger than the file")
        names = set(archive.namelist())
        found = [name for name in names if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(found) != 1:
            raise pickle.UnpicklingError("the archive must have one data.pkl")
        root = found[0].removesuffix("data.pkl")
        order = f"{root}byteorder"
        if order in names and archive.read(order) != sys.byteorder.encode():
            raise pickle.UnpicklingError("written on a machine with another byte order")
        reader = _CheckpointReader(io.BytesIO(archive.read(found[0])), limit)
        content = reader.load()
        for key, storage in reader.storages.items():
            storage.fill(archive.read(f"{root}data/{key}"))
    return real_value(content, {})


def _read_stream(file: BinaryIO, limit: int) -> Any:
    if (Reader(file).load(), Reader(file).load()) != (_MAGIC, _PROTOCOL):
        raise pickle.UnpicklingError("neither a zip archive nor an older torch file")
    system = Reader(file).load()
    if system.get("little_endian", True) != (sys.byteorder == "little"):
        raise pickle.UnpicklingError("written on a machine with another byte order")
    reader = _CheckpointReader(file, limit)
    content = reader.load()
    for key in Reader(file).load():
        storage = reader.storages[key]
        if struct.unpack("<q", file.read(8))[0] != storage.count:
            raise pickle.UnpicklingError(f"storage {key} has another length than declared")
        storage.fill(file.read(storage.nbytes))
    return real_value(content, {})


class _Type:
    """A storage class that the pickle names."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    __setstate__ = Maker.__setstate__


class _Storage:
    """The values of one or more tensors; their bytes are read after the pickle."""

    __slots__ = ("count", "dtype", "flat")

    def __init__(self, dtype: torch.dtype, count: int) -> None:
        self.dtype = dtype
        self.count = count
        self.flat: Tensor | None = None

    __setstate__ = Maker.__setstate__

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    def fill(self, data: bytes) -> None:
        if len(data) != self.nbytes:
            raise pickle.UnpicklingError("the file ends early")
        self.flat = torch.frombuffer(bytearray(data), dtype=self.dtype) if data else None


class _Tensor(Array):
    """A tensor as the pickle describes it: a view of a storage."""

    __slots__ = ("view",)

    def __init__(self, storage: _Storage, offset: Any, size: Any, stride: Any) -> None:
        self.view = (storage, offset, size, stride)

    def real(self, memo: dict[int, Any]) -> Any:
        storage, offset, size, stride = self.view
        if math.prod(size) > storage.count:
            raise pickle.UnpicklingError("a tensor larger than its storage")
        flat = torch.empty(0, dtype=storage.dtype) if storage.flat is None else storage.flat
        # torch raises an error for a view outside of the storage.
        return flat.as_strided(tuple(size), tuple(stride), int(offset)).clone()


def _make_tensor(storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> _Tensor:
    if not isinstance(storage, _Storage):
        raise pickle.UnpicklingError("a tensor without a storage")
    return _Tensor(storage, offset, size, stride)


class _Record(Array):
    """An object of a known class, which is not imported: its attributes become a dictionary."""

    __slots__ = ("state",)

    def __init__(self, *_: Any) -> None:
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def real(self, memo: dict[int, Any]) -> Any:
        # An object without attributes is made without a state.
        return real_value(getattr(self, "state", {}), memo)


def _reconstruct(kind: Any, *_: Any) -> _Record:
    if kind is not _Record:
        raise pickle.UnpicklingError("only records may be reconstructed")
    return _Record()


def _device_name(kind: Any, *number: Any) -> str:
    if type(kind) is not str or not all(type(part) is int for part in number):
        raise pickle.UnpicklingError("a device of an unknown form")
    return ":".join([kind, *map(str, number)])


_MAKERS: Final[dict[tuple[str, str], Callable[..., Any]]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _make_tensor,
    ("torch._utils", "_rebuild_tensor"): _make_tensor,
    ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    ("torch", "Size"): tuple,
    ("copyreg", "_reconstructor"): _reconstruct,
    ("builtins", "object"): lambda: None,
    # A device becomes its name, a dictionary loses its default, a generator becomes its state.
    ("torch", "device"): _device_name,
    ("collections", "defaultdict"): lambda *_: {},
    **{("builtins", name): lambda: None for name in ("list", "dict", "int", "float")},
    ("numpy.random._pickle", "__randomstate_ctor"): lambda *_: _Record(),
    ("numpy.random._pickle", "__bit_generator_ctor"): lambda *_: _Record(),
    ("numpy.random._mt19937", "MT19937"): lambda: None,
}


class _CheckpointReader(Reader):
    """Reads one pickle; `storages` has the storages by key, whose values are filled in later."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        super().__init__(file, encoding="latin1")
        self.limit = limit
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _STORAGES:
            return _Type(_STORAGES[name])
        if (module, name) in _MAKERS:
            return Maker(_MAKERS[module, name])
        if (module.removeprefix("dirtorch."), name) in _RECORDS:
            return _Record
        return super().find_class(module, name)

    def persistent_load(self, identity: Any) -> _Storage:
        kind, storage_type, key, _, count = identity[:5]
        if kind != "storage" or not isinstance(storage_type, _Type) or any(identity[5:]):
            raise pickle.UnpicklingError("a storage of an unknown kind")
        storage = _Storage(storage_type.dtype, int(count))
        if not 0 <= storage.nbytes <= self.limit:
            raise pickle.UnpicklingError("a storage larger than the file")
        return self.storages.setdefault(str(key), storage)
