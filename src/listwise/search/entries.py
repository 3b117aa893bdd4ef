"""Entries of an index, their keys, and entries to be written."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from listwise.data.images import Box
from listwise.errors import InputError

Float32 = NDArray[np.float32]
Keys = NDArray[np.int64]
Names = str | int | Iterable[str | int]
"""One or several ids or keys of entries."""
LABEL = "label"
"""The attribute of an entry that names its class."""


class NoEntryError(InputError):
    """The index has no entry with the given id or key."""


@dataclass(frozen=True)
class Entry:
    """A photo in an index.

    Attributes:
        id: the name of the photo in its source, such as a path relative to the folder.
        path: the path of the file; empty if it is not known.
        width: the width of the whole photo in pixels.
        height: the height of the whole photo in pixels.
        box: the part of the photo that was described, x0, y0, x1, y1 in pixels; None for all.
        digest: a hash of the file and the box; empty if the file was not read.
        attributes: other columns of the table that the photo came from.
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
        """The number that identifies the entry in every engine."""
        return entry_key(self.id)


def with_attribute(entry: Entry, name: str, value: str) -> Entry:
    """The entry with an attribute set, or removed if the value is empty."""
    others = {key: text for key, text in entry.attributes.items() if key != name}
    return replace(entry, attributes=others | ({name: value} if value else {}))


def as_row(entry: Entry) -> dict[str, Any]:
    """Convert an entry to a row of numbers and strings."""
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
    """Convert a row of `as_row` back to an entry."""
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
    """The key of an entry: 63 bits of a hash of its id."""
    # Names from a terminal or a file system are not always UTF-8.
    content = name.encode(errors="surrogateescape")
    return int.from_bytes(blake2b(content, digest_size=8).digest()) >> 1


def key_of(name: str | int) -> int:
    """The key of an entry that is given by its id or its key."""
    return name if isinstance(name, int) else entry_key(name)


def list_names(names: Names) -> list[str | int]:
    """One or several ids or keys as a list."""
    return [names] if isinstance(names, str | int) else list(names)


def possible_keys(keys: Iterable[int]) -> list[int]:
    """The numbers among those given that can be keys; a user may type any number."""
    return [int(key) for key in keys if 0 <= key < 1 << 63]


def in_parts(values: Any, size: int) -> Iterator[Any]:
    """Split a sequence into slices of at most `size` values."""
    return (values[start : start + size] for start in range(0, len(values), size))


@dataclass(frozen=True, eq=False)
class NewEntries:
    """Entries to be written in one step.

    Attributes:
        entries: n entries.
        descriptors: their descriptors, float32 [n, C].
        thumbnails: n JPEG files as bytes; empty for an entry without a thumbnail.
        local: n codes of local features, empty for an entry without them; or no codes at all.
    """

    entries: Sequence[Entry]
    descriptors: Float32
    thumbnails: Sequence[bytes]
    local: Sequence[bytes] = ()
