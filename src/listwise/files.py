"""Write files atomically, read text files, and check the headers of files that Listwise writes."""

import csv
import errno
import io
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from listwise import __version__
from listwise.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

FORMAT_VERSION: Final = 1

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
# Codes of SQLite: not permitted, read-only, an error of the disk, full, cannot be opened.
_SQLITE_CANNOT_WRITE = (3, 8, 10, 13, 14)


def write_failure(error: BaseException | None) -> str | None:
    """The reason of the system if an error or its cause is a full disk or a missing permission."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
            return error.strerror
        if (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF in _SQLITE_CANNOT_WRITE:
            return str(error)
        error = error.__cause__
    return None


# Names of PyTorch's dtypes in safetensors files.
_DTYPES = {
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    "bfloat16": "BF16",
    "bool": "BOOL",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def publish(partial: Path, final: Path) -> None:
    """Move a finished file to its final place, atomically.

    Readers see the old file or the new one, and so does the next run after a kill or a power
    failure; once the function has returned, it is the new one.

    Args:
        partial: the finished file, on the same file system.
        final: the path to move it to; an existing file is replaced.
    """
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, final)
    sync_folder(final.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names of the files in a folder are on the disk."""
    if os.name == "nt":  # Windows cannot open folders
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def write_bytes(path: Path, *content: bytes | memoryview) -> None:
    """Write the parts of a file, atomically.

    After an error the old file is there, and the error names it. Until the file is complete, its
    name ends in `.tmp`.
    """
    partial = path.with_name(f"{path.name}.tmp")
    try:
        with partial.open("wb") as file:
            file.writelines(content)
        publish(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_text(path: Path, text: str) -> None:
    r"""Write a text file atomically, in UTF-8; what is not Unicode, as in file names, as \udcNN."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_csv(path: Path, rows: Iterable[Iterable[object]]) -> None:
    """Write a table atomically; the first row is its header."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_text(path, text.getvalue())


def write_tensors(
    path: Path, tensors: Mapping[str, "Tensor"], metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file atomically.

    The library of this format would keep all other threads waiting, and copy the tensors.

    Args:
        path: path of the file; its folder is created if it does not exist.
        tensors: tensors on any device, by name.
        metadata: texts to store with them, by name.

    Raises:
        OSError: the file cannot be written; the message names it and the reason.
    """
    import torch

    header: dict[str, Any] = {"__metadata__": metadata or {}}
    values, end = [], 0
    for key in sorted(tensors, key=lambda key: (-tensors[key].element_size(), key)):
        tensor = tensors[key].detach().cpu().contiguous()
        start, end = end, end + tensor.nbytes
        kind = _DTYPES[str(tensor.dtype).removeprefix("torch.")]
        shape = list(tensor.shape)
        header[key] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
        values.append(tensor.reshape(-1).view(torch.uint8).numpy().data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, len(text).to_bytes(8, "little"), text, *values)


def read_json(path: Path, otherwise: str) -> dict[str, Any]:
    """Read a JSON object; for other content raise an `InputError`: the path, then `otherwise`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise InputError(f"{path} {otherwise}")
    return content


def read_text(path: Path) -> str:
    """Read a UTF-8 text file, with or without a byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not UTF-8 text; save it as UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


class FileHeader(BaseModel):
    """The header of a file: the version of its format, and of the Listwise that wrote it."""

    model_config = ConfigDict(frozen=True)

    format_version: int = FORMAT_VERSION
    listwise: str = __version__

    @classmethod
    def parse(cls, content: str | bytes, path: str | Path, repair: str) -> Self:
        """Read a header from JSON; an error names the file and ends with the advice `repair`."""
        try:
            version = FileHeader.model_validate_json(content)
            if version.format_version > FORMAT_VERSION:
                raise InputError(
                    f"{path} has the format {version.format_version} of a newer Listwise "
                    f"({version.listwise}): pip install --upgrade listwise"
                )
            return cls.model_validate_json(content)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            reason = f"its header cannot be read: {place}: {first['msg']}"
            raise InputError(f"{path} is damaged ({reason}): {repair}") from error
