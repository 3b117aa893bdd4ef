"""Checksums inside Parquet and Arrow files, which find a damaged byte before it is used.

Both formats end with a footer, its length, and a mark of the format. The checksums are stored just
before the footer, where other programs that read the file do not look.
"""

import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from listwise.errors import InputError

_MARK: Final = b"lw-sums1"
# Checksum of the record and the footer, length of the record, and the mark.
_TAIL: Final = struct.Struct("<II8s")


class Checksums(BaseModel):
    """CRC-32 checksums of a table, which grow as its rows are written.

    Attributes:
        rows: number of rows.
        ids: checksum of all ids.
        sizes: checksum of all widths and heights.
        values: checksums of the other columns, one for each block of rows.
    """

    rows: int = 0
    ids: int = 0
    sizes: int = 0
    values: list[int] = []

    def add(self, ids: Sequence[str], sizes: NDArray[np.int32]) -> None:
        """Include the ids and sizes of n more rows: n texts, int32 [n, 2]."""
        self.rows += len(ids)
        self.ids = zlib.crc32("".join(f"{name}\0" for name in ids).encode(), self.ids)
        self.sizes = zlib.crc32(np.ascontiguousarray(sizes, np.int32).data, self.sizes)


def append_checksums(path: Path, checksums: Checksums, mark: bytes) -> None:
    """Store checksums in a finished file that ends with the mark of its format."""
    record = checksums.model_dump_json().encode()
    with path.open("r+b") as file:
        start, footer = _read_footer(file.fileno(), mark)
        # Arrow aligns what it stores to eight bytes.
        record = record.ljust(len(record) + -(start + len(record) + _TAIL.size) % 8)
        crc = zlib.crc32(footer, zlib.crc32(record))
        file.seek(start)
        file.write(record + _TAIL.pack(crc, len(record), _MARK) + footer)


def read_checksums(path: Path, mark: bytes) -> Checksums | None:
    """Read the checksums of a file, None if it has none; refuse a file with a damaged footer."""
    with path.open("rb") as file:
        try:
            start, footer = _read_footer(file.fileno(), mark)
        except ValueError:
            return None  # not a file of this format, or cut off: whoever reads it reports this
        if start < _TAIL.size:
            return None
        crc, length, found = _TAIL.unpack(os.pread(file.fileno(), _TAIL.size, start - _TAIL.size))
        if found != _MARK:
            return None
        place = start - _TAIL.size - length
        record = os.pread(file.fileno(), length, place) if place >= 0 else b""
    if zlib.crc32(footer, zlib.crc32(record)) != crc:
        raise damaged(path)
    try:
        return Checksums.model_validate_json(record)
    except ValidationError:
        raise damaged(path) from None


def damaged(path: Path) -> InputError:
    """Make the error for a file whose content does not match its checksums."""
    return InputError(
        f"{path} is damaged (its checksums do not match): copy it again, or extract again"
    )


def _read_footer(file: int, mark: bytes) -> tuple[int, bytes]:
    """Read the footer of a file with its length and mark, and the position where it begins."""
    size = os.fstat(file).st_size
    ending = os.pread(file, 4 + len(mark), max(0, size - 4 - len(mark)))
    if len(ending) != 4 + len(mark) or not ending.endswith(mark):
        raise ValueError("no footer")
    start = size - len(ending) - int.from_bytes(ending[:4], "little")
    if start < 0:
        raise ValueError("no footer")
    return start, os.pread(file, size - start, start)
