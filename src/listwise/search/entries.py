"""Entries of an index, their keys, entries to be written, and their checksums."""

import json
import shlex
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from listwise.errors import InputError

if TYPE_CHECKING:
    from listwise.data.images import Box

Float32 = NDArray[np.float32]
Keys = NDArray[np.int64]
Names = str | int | Iterable[str | int]
"""One or several ids or keys of entries."""
LABEL = "label"
"""The attribute of an entry that names its class."""
UPLOADED_AS = "uploaded_as"
"""The attribute of a photo that a client of a server added: the name of its file."""
SUMS = ("descriptor_sum", "entry_sum", "thumbnail_sum", "local_sum")
"""Names of the checksum columns, in every engine."""
VALUES = ("id", "path", "width", "height", "box", "digest", "attributes", "copies")
"""Names of the columns of an entry's values."""
ENTRY = (*VALUES, "entry_sum")
"""Names of the columns from which an entry is made."""
NO_CONTENT = -1
"""In the place of a checksum, for an entry without a thumbnail or without local features."""


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
        copies: paths of other files with the same content.
    """

    id: str
    path: str
    width: int
    height: int
    box: "Box | None" = None
    digest: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)
    copies: tuple[str, ...] = ()

    @property
    def key(self) -> int:
        """The number that identifies the entry in every engine."""
        return entry_key(self.id)

    @property
    def copy_names(self) -> list[str]:
        """The names of the copies: relative to the folder of the entry if they are below it."""
        folder = self.path.removesuffix(self.id)
        inside = bool(folder) and folder != self.path
        return [
            path.removeprefix(folder) if inside and path.startswith(folder) else Path(path).name
            for path in self.copies
        ]


def with_attributes(entry: Entry, values: Mapping[str, str]) -> Entry:
    """The entry with attributes set, or removed where the value is empty."""
    others = {name: text for name, text in entry.attributes.items() if name not in values}
    return replace(entry, attributes=others | {name: text for name, text in values.items() if text})


def as_row(entry: Entry) -> dict[str, Any]:
    """Convert an entry to a row of numbers and strings."""
    values = {name: getattr(entry, name) for name in VALUES}
    box = "" if entry.box is None else json.dumps(entry.box)
    attributes = json.dumps(dict(entry.attributes), ensure_ascii=False)
    others = {"attributes": attributes, "copies": json.dumps(entry.copies)}
    return {"key": entry.key, **values, "box": box, **others}


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


def spread(keys: Keys, count: int) -> Keys:
    """At most `count` of sorted keys, at even distances; keys are hashes, so these are a sample."""
    return keys[np.linspace(0, len(keys) - 1, min(count, len(keys))).astype(np.int64)]


@dataclass(frozen=True, eq=False)
class NewEntries:
    """Entries to be written in one step.

    Attributes:
        entries: n entries.
        descriptors: their descriptors, float32 [n, C].
        thumbnails: n JPEG files as bytes; empty for an entry without a thumbnail.
        local: n codes of local features, empty for an entry without them; by default all are.
    """

    entries: Sequence[Entry]
    descriptors: Float32
    thumbnails: Sequence[bytes]
    local: Sequence[bytes] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "local", self.local or [b""] * len(self.entries))

    def at(self, places: Sequence[int]) -> "NewEntries":
        """Those at some places."""
        return NewEntries(
            [self.entries[place] for place in places],
            self.descriptors[places],
            [self.thumbnails[place] for place in places],
            [self.local[place] for place in places],
        )


class DamagedIndexError(InputError):
    """Stored data of an index is not what was written.

    An index stores checksums with every entry: of its descriptor, of its other values, of its
    thumbnail and, if it has them, of its local features. Each is computed when the entry is written
    and compared when it is read.
    """


@dataclass(frozen=True, eq=False)
class EntryCheck:
    """What `Store.examine` found of one entry.

    Attributes:
        place: where the store holds it; `Store.discard` takes it.
        name: its id; with its path if one of its values is damaged.
        entry: the entry; None if one of its values is damaged.
        sound: whether its values, descriptor, thumbnail and local features are what was written.
    """

    place: int
    name: str
    entry: Entry | None
    sound: bool


def damage(uri: str, what: str) -> DamagedIndexError:
    """An error that reports what is damaged, and the command that repairs it."""
    place = shlex.quote(uri)
    return DamagedIndexError(f"{uri} is damaged: {what}; run listwise index check {place} --repair")


def damaged_entries(uri: str, names: Sequence[str]) -> DamagedIndexError:
    """An error that names the first of the damaged entries and counts them."""
    count = "1 entry" if len(names) == 1 else f"{len(names)} entries"
    return damage(uri, f"the checksums of {count} do not match ({', '.join(names[:3])})")


def descriptor_sums(keys: Keys, descriptors: Float32) -> Keys:
    """Checksums of descriptors and their keys: [n], [n, C] -> int64 [n].

    The checksum is a sum of the 64-bit words of a row with odd weights, modulo 2^64. Any change
    within one word changes it, and NumPy computes it about as fast as memory is read.
    """
    rows = np.ascontiguousarray(descriptors, np.float32)
    if rows.shape[1] % 2:
        rows = np.pad(rows, ((0, 0), (0, 1)))
    words = rows.view(np.uint64)
    weights = _weights(words.shape[1] + 1)
    total = np.einsum("ij,j->i", words, weights[1:])
    total += keys.astype(np.uint64) * weights[0]
    sums: Keys = total.view(np.int64)
    return sums


@lru_cache(maxsize=4)
def _weights(count: int) -> NDArray[np.uint64]:
    """Odd 64-bit numbers that look random and are the same everywhere: [count]."""
    found = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    found ^= found >> np.uint64(31)
    found *= np.uint64(0xD6E8FEB86659FD93)
    found ^= found >> np.uint64(29)
    return found | np.uint64(1)


def entry_sum(row: Mapping[str, Any]) -> int:
    """The checksum of an entry's values and key; `row` is what `as_row` returns."""
    values = [row[name] for name in ("key", *VALUES)]
    # Damage can change the type of a value to bytes.
    return zlib.crc32(json.dumps(values, default=repr).encode())


def content_sum(key: int, content: bytes | None) -> int:
    """The checksum of an entry's thumbnail or local features, with their size in the upper half.

    It is `NO_CONTENT` if there are none.
    """
    return len(content) << 32 | zlib.crc32(content, key & 0xFFFFFFFF) if content else NO_CONTENT


def new_rows(new: NewEntries) -> Iterator[dict[str, Any]]:
    """New entries as rows of `as_row` with thumbnail, local features, descriptor and checksums."""
    keys = np.array([entry.key for entry in new.entries], np.int64)
    descriptors = np.ascontiguousarray(new.descriptors, np.float32)
    sums = descriptor_sums(keys, descriptors).tolist()
    parts = zip(new.entries, descriptors, sums, new.thumbnails, new.local, strict=True)
    for entry, descriptor, total, thumbnail, local in parts:
        row = as_row(entry)
        row |= {"entry_sum": entry_sum(row), "descriptor": descriptor, "descriptor_sum": total}
        row |= {"thumbnail": thumbnail, "thumbnail_sum": content_sum(row["key"], thumbnail)}
        row |= {"local": local, "local_sum": content_sum(row["key"], local)}
        yield row


def read_entry(uri: str, row: Mapping[str, Any]) -> Entry:
    """Convert a row of `as_row` back to an entry; refuse values that are not what was written."""
    if row["entry_sum"] != entry_sum(row):
        raise damaged_entries(uri, [str(row["id"])])
    values = {name: row[name] for name in VALUES}
    box = tuple(json.loads(row["box"])) if row["box"] else None
    attributes, copies = json.loads(row["attributes"]), tuple(json.loads(row["copies"]))
    return Entry(**{**values, "box": box, "attributes": attributes, "copies": copies})


def check_content(uri: str, what: str, key: int, content: bytes, stored: int) -> None:
    """Refuse a thumbnail or local features that are not what was written."""
    if stored != content_sum(key, content):
        raise damage(uri, f"the checksum of the {what} of entry {key} does not match")


def examine_row(place: int, row: Mapping[str, Any], descriptor: bool) -> EntryCheck:
    """Compare an entry, as it is stored, with its checksums.

    Args:
        place: what `EntryCheck.place` becomes.
        row: its values, thumbnail, local features and checksums.
        descriptor: whether its descriptor is sound.
    """
    try:
        entry = read_entry("", row)
    except (InputError, KeyError, TypeError, ValueError):
        entry = None
    if entry is None or entry.key != row["key"]:
        return EntryCheck(place, f"{row['id']} ({row['path']})", None, False)
    sound = descriptor and all(
        row[f"{kind}_sum"] == content_sum(entry.key, row[kind]) for kind in ("thumbnail", "local")
    )
    return EntryCheck(place, entry.id, entry, sound)
