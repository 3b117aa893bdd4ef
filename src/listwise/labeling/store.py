"""Local features of photos in files of some hundred photos each, which an interrupted run keeps."""

import json
import struct
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from listwise.data import ImageError, Images, PhotoFile
from listwise.data.photos import photo_digest
from listwise.errors import InputError
from listwise.files import publish
from listwise.labeling.workers import Workers

if TYPE_CHECKING:
    from listwise.local.features import Features

PART = 256  # photos per file
_MAGIC = b"LWLABEL1"
_HEAD = struct.Struct("<8sIII")  # magic, number of photos, bytes of errors, checksum of the tables
_ROW = np.dtype(
    [
        ("start", "<u8"),  # position of the features in the file
        ("size", "<u4"),  # bytes
        ("checksum", "<u4"),
        ("width", "<i4"),  # 0 for a photo that cannot be read
        ("height", "<i4"),
        ("look", "<u8"),  # see `_look`
        ("digest", "S32"),  # of the content of the file
    ]
)


class StoredPhoto(NamedTuple):
    """What is stored of a photo: encoded features, size, appearance and digest of the content."""

    code: bytes
    width: int
    height: int
    look: int
    digest: str


class FeatureStore:
    """The local features of N photos on disk, at most 40 kB per photo.

    A file appears only when it is complete, so the next run computes only what is missing.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.count = count
        self._rows: list[NDArray[Any] | None] = [None] * -(-count // PART)

    def path(self, part: int) -> Path:
        """Return the file of the photos from `part * PART`."""
        return self.folder / f"features-{part:06d}.bin"

    def fill(
        self,
        images: Images,
        features: int,
        workers: Workers,
        on_progress: Callable[[int], object],
    ) -> None:
        """Extract the features of all photos whose file is missing or damaged."""
        missing = [part for part in range(len(self._rows)) if not self._complete(part)]
        numbers = [self._numbers(part) for part in missing]
        on_progress(self.count - sum(map(len, numbers)))
        tasks = (images.file(i) for some in numbers for i in some)
        with closing(workers.results(partial(describe, count=features), tasks)) as results:
            for part, some in zip(missing, numbers, strict=True):
                found: list[StoredPhoto | str] = []
                for _ in some:
                    found.append(next(results))
                    on_progress(1)
                self._write(part, found)

    def _numbers(self, part: int) -> range:
        return range(part * PART, min((part + 1) * PART, self.count))

    def _complete(self, part: int) -> bool:
        try:
            return len(self._table(part)[0]) == len(self._numbers(part))
        except (OSError, InputError):
            return False

    def _write(self, part: int, photos: Sequence[StoredPhoto | str]) -> None:
        rows = np.zeros(len(photos), _ROW)
        errors = {str(i): error for i, error in enumerate(photos) if isinstance(error, str)}
        text = json.dumps(errors).encode()
        start = _HEAD.size + rows.nbytes + len(text)
        codes = []
        for row, photo in zip(rows, photos, strict=True):
            if isinstance(photo, str):
                continue
            row["start"], row["size"] = start, len(photo.code)
            row["checksum"] = zlib.crc32(photo.code)
            row["width"], row["height"] = photo.width, photo.height
            row["look"], row["digest"] = photo.look, photo.digest.encode()
            codes.append(photo.code)
            start += len(photo.code)
        tables = rows.tobytes() + text
        head = _HEAD.pack(_MAGIC, len(rows), len(text), zlib.crc32(tables))
        temporary = self.path(part).with_suffix(".tmp")
        temporary.write_bytes(b"".join([head, tables, *codes]))
        publish(temporary, self.path(part))
        self._rows[part] = None

    def _table(self, part: int) -> tuple[NDArray[Any], dict[str, str]]:
        with self.path(part).open("rb") as file:
            head = file.read(_HEAD.size)
            if len(head) == _HEAD.size:
                magic, count, size, checksum = _HEAD.unpack(head)
                tables = file.read(count * _ROW.itemsize + size)
                if magic == _MAGIC and zlib.crc32(tables) == checksum:
                    rows = np.frombuffer(tables, _ROW, count)
                    return rows, json.loads(tables[rows.nbytes :])
        raise InputError(f"{self.path(part)} is damaged: remove it and run again")

    def rows(self, part: int) -> NDArray[Any]:
        """Return the table of a part: a structured array with a row for each photo."""
        found = self._rows[part]
        if found is None:
            found = self._rows[part] = self._table(part)[0]
        return found

    def table(self) -> NDArray[Any]:
        """Return the table of all photos: [N]."""
        parts = [self.rows(part) for part in range(len(self._rows))]
        return np.concatenate(parts)

    def errors(self) -> dict[int, str]:
        """Return the number of each photo that cannot be read, with the reason."""
        return {
            part * PART + int(i): error
            for part in range(len(self._rows))
            for i, error in self._table(part)[1].items()
        }

    def size(self, photo: int) -> tuple[float, float]:
        """Return width and height of a photo."""
        part, place = divmod(photo, PART)
        row = self.rows(part)[place]
        return float(row["width"]), float(row["height"])

    def read(self, photo: int) -> "Features":
        """Return the features of a photo that can be read."""
        from listwise.local.compact import decode_features

        part, place = divmod(photo, PART)
        row = self.rows(part)[place]
        with self.path(part).open("rb") as file:
            file.seek(int(row["start"]))
            code = file.read(int(row["size"]))
        if zlib.crc32(code) != row["checksum"]:
            raise InputError(f"{self.path(part)} is damaged: remove it and run again")
        return decode_features(code)


def describe(file: PhotoFile, count: int) -> StoredPhoto | str:
    """Extract what is stored of a photo, or return the reason why it cannot be read."""
    from listwise.local.compact import compact_features
    from listwise.local.features import LARGE

    try:
        file = file.read()
        photo = file.image(min_side=LARGE)
        width, height = file.size()
    except ImageError as error:
        return str(error)
    corner, zoom = (0, 0), width / photo.width
    if file.box is not None:
        corner, zoom = (max(0, round(file.box[0])), max(0, round(file.box[1]))), 1.0
    code = compact_features(photo, corner, zoom, count)
    digest = photo_digest(file.content or b"", file.box)
    return StoredPhoto(code, width, height, _look(photo), digest)


def _look(photo: Any) -> int:
    """Return 64 bits that are almost equal for resized and recompressed copies of a photo.

    Each bit tells whether a cell of a grid of 8 × 9 cells is brighter than the cell before it.
    """
    cells = np.asarray(photo.convert("L").resize((9, 8)), np.int16)
    bits = np.packbits(cells[:, 1:] > cells[:, :-1])
    return int.from_bytes(bits.tobytes(), "big")
