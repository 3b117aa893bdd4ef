"""Checksums of stored entries, and what a damaged index reports.

An index stores checksums with every entry: of its descriptor, of its other values, of its thumbnail
and, if it has them, of its local features. Each is computed when the entry is written and compared
when it is read.
"""

import json
import shlex
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from listwise.errors import InputError
from listwise.search.entries import Entry, Float32, Keys, NewEntries, as_row, from_row

SUMS = ("descriptor_sum", "entry_sum", "thumbnail_sum")
"""Names of the checksum columns, in every engine."""
LOCAL_SUM = "local_sum"
"""Name of the column with the size and checksum of local features."""
NO_LOCAL = -1
"""In the place of that checksum, for an entry without local features."""

_VALUES = ("id", "path", "width", "height", "box", "digest", "attributes")
_NORM = 0.01  # a unit descriptor has a norm of 1 within this


class DamagedIndexError(InputError):
    """Stored data of an index is not what was written."""


@dataclass(frozen=True, eq=False)
class EntryCheck:
    """What `Store.examine` found of one entry.

    Attributes:
        place: where the store holds it; `Store.discard` takes it.
        name: its id, or its key if the id is damaged.
        entry: the entry; None if one of its values is damaged.
        descriptor: whether its descriptor is sound.
        thumbnail: whether its thumbnail is sound.
        local: whether its local features are sound, or it has none.
        verified: whether checksums are stored for it.
    """

    place: int
    name: str
    entry: Entry | None
    descriptor: bool
    thumbnail: bool
    local: bool
    verified: bool

    @property
    def sound(self) -> bool:
        """Whether no part of the entry is damaged."""
        return self.entry is not None and self.descriptor and self.thumbnail and self.local


def damage(uri: str, what: str) -> DamagedIndexError:
    """An error that reports what is damaged, and the command that repairs it."""
    place = shlex.quote(uri)
    return DamagedIndexError(f"{uri} is damaged: {what}; run listwise index check {place} --repair")


def without_checksums(uri: str) -> InputError:
    """An error for an index of an earlier version, and the command that adds checksums."""
    return InputError(
        f"{uri} was built by an earlier version of Listwise and has entries without checksums: run "
        f"listwise index check {shlex.quote(uri)} --repair first, or build another index"
    )


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
    values = [int(row["key"]), *(row[name] for name in _VALUES)]
    return zlib.crc32(json.dumps(values).encode())


def thumbnail_sum(key: int, thumbnail: bytes | None) -> int:
    """The checksum of an entry's thumbnail and key."""
    return zlib.crc32(thumbnail or b"", key & 0xFFFFFFFF)


def local_sum(key: int, local: bytes) -> int:
    """The size of an entry's local features in the upper half, a checksum in the lower half."""
    return len(local) << 32 | zlib.crc32(local, key & 0xFFFFFFFF)


def check_local(uri: str, key: int, local: bytes, stored: int) -> None:
    """Refuse local features that are not those that were written."""
    if local_sum(key, local) != stored:
        raise damage(uri, f"the checksum of the local features of entry {key} does not match")


def new_sums(new: NewEntries) -> dict[str, list[int]]:
    """The checksums of new entries by column name: n numbers each."""
    keys = [entry.key for entry in new.entries]
    descriptors = np.asarray(new.descriptors, np.float32)
    return {
        "descriptor_sum": descriptor_sums(np.array(keys, np.int64), descriptors).tolist(),
        "entry_sum": [entry_sum(as_row(entry)) for entry in new.entries],
        "thumbnail_sum": [thumbnail_sum(*pair) for pair in zip(keys, new.thumbnails, strict=True)],
    }


def sound_descriptors(
    keys: Keys, descriptors: Float32, sums: Sequence[int | None] | Keys | None
) -> NDArray[np.bool_]:
    """Which descriptors are as they were written: [n], [n, C], [n] -> bool [n].

    Args:
        keys: the keys of the entries.
        descriptors: the rows that were read.
        sums: the stored checksums, None for an entry without one, or None for all. Entries
            without a checksum, which earlier versions wrote, must be finite unit vectors.
    """
    if isinstance(sums, np.ndarray):
        return np.asarray(descriptor_sums(keys, descriptors) == sums)
    sound = _unit(descriptors)
    if sums is not None:
        known = np.array([value is not None for value in sums], bool)
        stored = np.array([value for value in sums if value is not None], np.int64)
        sound[known] = descriptor_sums(keys[known], descriptors[known]) == stored
    return sound


def _unit(descriptors: Float32) -> NDArray[np.bool_]:
    """Which rows are finite and have the norm 1, or are all zero: [n, C] -> bool [n]."""
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.einsum("ij,ij->i", descriptors, descriptors)
    sound: NDArray[np.bool_] = (np.abs(squares - 1) < 2 * _NORM) | (squares == 0)
    return sound


def check_entry(uri: str, row: Mapping[str, Any]) -> None:
    """Refuse an entry whose values are not those that were written."""
    if not _sound_entry(row):
        raise damaged_entries(uri, [str(row["id"])])


def check_thumbnail(uri: str, key: int, thumbnail: bytes | None, stored: int | None) -> None:
    """Refuse a thumbnail that is not the one that was written."""
    if not _sound_thumbnail(key, thumbnail, stored):
        raise damage(uri, f"the checksum of the thumbnail of entry {key} does not match")


def _sound_entry(row: Mapping[str, Any]) -> bool:
    stored = row.get("entry_sum")
    return stored is None or stored == entry_sum(row)


def _sound_thumbnail(key: int, thumbnail: bytes | None, stored: int | None) -> bool:
    return stored is None or stored == thumbnail_sum(key, thumbnail)


def _sound_local(key: int, local: bytes | None, stored: int | None) -> bool:
    return stored is None or stored == local_sum(key, local or b"")


def examine_rows(
    places: Sequence[int],
    rows: Sequence[Mapping[str, Any]] | None,
    sound: Sequence[bool] | None,
    thumbnails: Sequence[tuple[bytes | None, int | None]] | None,
    local: Sequence[tuple[bytes | None, int | None]] | None,
) -> list[EntryCheck]:
    """Compare n entries, as they are stored, with their checksums.

    Args:
        places: what `EntryCheck.place` becomes.
        rows: the values of each entry with its `entry_sum`; None if they cannot be read.
        sound: whether each descriptor is sound; None if descriptors cannot be read.
        thumbnails: each thumbnail with its checksum; None if they cannot be read.
        local: local features of each entry with their checksum, which is None for an entry
            without them; None if they cannot be read.
    """
    found = []
    for number, place in enumerate(places):
        row = {} if rows is None else rows[number]
        entry = _entry_or_none(row)
        key = 0 if entry is None else entry.key
        found.append(
            EntryCheck(
                place=int(place),
                name=_name(row, place) if entry is None else entry.id,
                entry=entry,
                descriptor=sound is not None and bool(sound[number]),
                thumbnail=thumbnails is not None and _sound_thumbnail(key, *thumbnails[number]),
                local=local is not None and _sound_local(key, *local[number]),
                verified=row.get("entry_sum") is not None,
            )
        )
    return found


def _entry_or_none(row: Mapping[str, Any]) -> Entry | None:
    """The entry of a row; None if a value of it is damaged."""
    try:
        entry = from_row(row)
        return entry if _sound_entry(row) and entry.key == row["key"] else None
    except (KeyError, TypeError, ValueError):
        return None


def _name(row: Mapping[str, Any], place: int) -> str:
    """How to name an entry whose values are damaged."""
    return f"{row['id']} ({row['path']})" if row else f"row {place}"
