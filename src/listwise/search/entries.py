"""The photos of an index: entries, their keys, and entries to be written."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from listwise.data.images import Box
from listwise.errors import InputError

Float32 = NDArray[np.float32]
Keys = NDArray[np.int64]


class NoEntryError(InputError):
    """An index has no entry with a key."""


@dataclass(frozen=True)
class Entry:
    """A photo of an index.

    `id` is its name as the source wrote it, `path` where it lies (empty if that is not known);
    `box` is the part of it that was described, all of it if None; `digest` is a hash of the file
    and the box, empty if the file was not read; `attributes` are the user's.
    """

    id: str
    path: str
    width: int
    height: int
    box: Box | None = None
    digest: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> int:
        """The entry's number in every engine."""
        return entry_key(self.id)


def as_row(entry: Entry) -> dict[str, Any]:
    """An entry as a row of a table: numbers and texts."""
    return {
        "key": entry.key,
        "id": entry.id,
        "path": entry.path,
        "width": entry.width,
        "height": entry.height,
        "box": "" if entry.box is None else json.dumps(entry.box),
        "digest": entry.digest,
        "attributes": json.dumps(dict(entry.attributes), ensure_ascii=False),
    }


def from_row(row: Mapping[str, Any]) -> Entry:
    """The entry of a row that `as_row` made."""
    return Entry(
        row["id"],
        row["path"],
        row["width"],
        row["height"],
        tuple(json.loads(row["box"])) if row["box"] else None,
        row["digest"],
        json.loads(row["attributes"]),
    )


def entry_key(name: str) -> int:
    """63 bits of a hash of an id: an entry's number in every engine."""
    # What a terminal or a file system gives need not be UTF-8.
    content = name.encode(errors="surrogateescape")
    return int.from_bytes(blake2b(content, digest_size=8).digest()) >> 1


def possible_keys(keys: Iterable[int]) -> list[int]:
    """Those that can be keys: a number that a user typed may be any."""
    return [int(key) for key in keys if 0 <= key < 1 << 63]


def in_parts(values: Any, size: int) -> Iterator[Any]:
    """Slices of a sequence, each of at most so many values."""
    return (values[start : start + size] for start in range(0, len(values), size))


@dataclass(frozen=True, eq=False)
class NewEntries:
    """Entries to be written together: n of them, their descriptors [n, C], their thumbnails.

    A thumbnail is a JPEG file's content, empty if there is none.
    """

    entries: Sequence[Entry]
    descriptors: Float32
    thumbnails: Sequence[bytes]
