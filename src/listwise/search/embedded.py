"""An index in a folder: LanceDB holds the entries, FAISS searches their descriptors."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from secrets import randbits
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import ArrayLike
from pydantic import ValidationError

from listwise.blocks import as_queries
from listwise.errors import InputError
from listwise.files import write_text
from listwise.search.flat import FlatSearch
from listwise.search.index import (
    FORMAT_VERSION,
    Entry,
    Float32,
    Index,
    IndexHeader,
    Keys,
    NewEntries,
    SearchIntent,
    Tuned,
)
from listwise.search.keymap import KeyMap
from listwise.search.lance_table import EntryTable

_HEADER = "index.json"
_LOCK = "lock"
_OURS = {_LOCK, "entries.lance", f"{_HEADER}.tmp"}  # of an index that was not finished
_FEW = 20_000  # entries that are read by name rather than in one pass over all


class EmbeddedIndex(Index):
    """Entries in LanceDB, searched with FAISS; several threads may use one."""

    def __init__(self, folder: Path, header: IndexHeader, table: EntryTable) -> None:
        self.uri = str(folder)
        self.header = header
        self._folder = folder
        self._table = table
        self._changes = threading.RLock()  # of the table by this process, and of what is below
        self._search: FlatSearch | None = None  # read when it is first needed
        self._stamps = KeyMap()  # what is searched
        self._seen = -1  # the version that this was

    @staticmethod
    def exists(place: str) -> bool:
        """Whether a folder holds an index."""
        return (Path(place) / _HEADER).is_file()

    @classmethod
    def open(cls, place: str) -> "EmbeddedIndex":
        """Open the index in a folder."""
        folder = Path(place)
        header = _read_header(folder / _HEADER)
        return cls(folder, header, EntryTable.open(folder))

    @classmethod
    def create(cls, place: str, header: IndexHeader) -> "EmbeddedIndex":
        """Make an empty index in a new or empty folder."""
        folder = Path(place)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            foreign = {path.name for path in folder.iterdir()} - _OURS
            if foreign:
                raise InputError(
                    f"{folder} holds other things ({min(foreign)}): give the index a folder "
                    "of its own"
                )
            with FileLock(folder / _LOCK):
                if cls.exists(place):
                    raise InputError(f"there is an index at {folder} already")
                table = EntryTable.create(folder, header.dim)
                # Last: before it there is no index, and the next attempt starts anew.
                write_text(folder / _HEADER, header.model_dump_json(indent=2))
        except OSError as error:
            raise InputError(f"cannot make an index at {folder}: {error.strerror}") from error
        return cls(folder, header, table)

    def __len__(self) -> int:
        return self._table.count()

    def put(self, new: NewEntries) -> None:
        """Write entries in one commit, in place of those with the same keys."""
        if not len(new.entries):
            return
        keys = np.array([entry.key for entry in new.entries], np.int64)
        with self._commit():
            self.checked(new)
            stamp = randbits(63)
            self._table.put(new, stamp)
            if self._search is not None:
                self._search.put(keys, np.ascontiguousarray(new.descriptors, np.float32))
                self._stamps.put(keys, np.full(len(keys), stamp))

    def remove(self, keys: Sequence[int]) -> int:
        """Remove entries in one commit, and say how many there were."""
        if not len(keys):
            return 0
        with self._commit():
            count = self._table.remove(keys)
            if self._search is not None:
                gone = np.array(keys, np.int64)
                self._search.remove(gone)
                self._stamps.remove(np.unique(gone))
        return count

    def get(self, keys: Sequence[int]) -> dict[int, Entry]:
        """The entries with these keys, as far as there are any."""
        return {entry.key: entry for entry in self._table.get(keys)}

    def with_digests(self, digests: Sequence[str]) -> dict[str, Entry]:
        """Entries by digest, as far as there are any."""
        return {entry.digest: entry for entry in self._table.with_digests(digests)}

    def page(self, start: int, count: int) -> list[Entry]:
        """Some entries, in the table's order."""
        return self._table.page(start, count)

    def thumbnail(self, key: int) -> bytes | None:
        """An entry's thumbnail, a JPEG file's content; None if it has none."""
        return self._table.thumbnail(key)

    def search(self, queries: ArrayLike, k: int, /) -> tuple[Float32, Keys]:
        """Scores and keys of the k nearest entries, best first: [Q, C] -> [Q, k'], [Q, k']."""
        if k < 1:
            raise InputError(f"k is {k}; ask for one neighbour at least")
        vectors = np.ascontiguousarray(as_queries(queries), np.float32)
        if vectors.shape[1] != self.header.dim:
            raise InputError(
                f"{self.uri} holds descriptors of {self.header.dim} dimensions, "
                f"the queries have {vectors.shape[1]}"
            )
        if not np.isfinite(vectors).all():
            raise InputError("a query is not finite; look for broken descriptors")
        return self._searched().search(vectors, k)

    def vectors(self, keys: ArrayLike, /) -> Float32:
        """The descriptors of entries: [n] -> [n, C]."""
        wanted, inverse = np.unique(np.asarray(keys, np.int64), return_inverse=True)
        found = np.empty((len(wanted), self.header.dim), np.float32)
        missing = np.ones(len(wanted), bool)
        for rows in self._table.rows(wanted):
            places = np.searchsorted(wanted, rows.keys)
            found[places], missing[places] = rows.descriptors, False
        if missing.any():
            raise InputError(f"{self.uri} has no entry with the key {wanted[missing][0]}")
        return found[inverse]

    def tune(
        self, intent: SearchIntent, on_note: Callable[[str], object] = lambda note: None
    ) -> Tuned:
        """Choose how to search from what the user wants, measure it, and remember both."""
        search = self._searched()
        return Tuned("exact", 1.0, 0.0, search.memory)

    def info(self) -> dict[str, Any]:
        """What there is to know of the index."""
        return {
            "engine": "embedded",
            "entries": len(self),
            "dim": self.header.dim,
            "model": self.header.model[:12],
            "model_folder": self.header.model_folder,
            "whitened": self.header.whitened,
            "settings": self.header.settings.model_dump(mode="json"),
            "bytes": self._table.size,
        }

    def refresh(self) -> None:
        """See what other processes have written since."""
        if self._search is not None and self._table.version != self._seen:
            with self._changes:
                self._catch_up(self._search)

    def close(self) -> None:
        """Let go of files and threads."""
        with self._changes:
            if self._search is not None:
                self._search.close()
            self._search = None
            self._stamps = KeyMap()

    @contextmanager
    def _commit(self) -> Iterator[None]:
        """The right to change the table: one thread of one process at a time has it."""
        with self._changes, FileLock(self._folder / _LOCK):
            nothing_missed = self._table.version == self._seen
            yield
            self._table.tidy()
            if nothing_missed:
                self._seen = self._table.version

    def _searched(self) -> FlatSearch:
        if self._search is None:
            with self._changes:
                if self._search is None:
                    search = FlatSearch(self.header.dim)
                    self._catch_up(search)
                    self._search = search
        return self._search

    def _catch_up(self, search: FlatSearch) -> None:
        """Search through what the table holds now, reading only what is new of it."""
        # Should the table change meanwhile, the number is too small and the next call looks again.
        seen = self._table.version
        keys, stamps = self._table.stamps()
        there = KeyMap()
        there.put(keys, stamps)
        kept, _ = there.find(self._stamps.keys)
        gone = self._stamps.keys[~kept]
        search.remove(gone)
        self._stamps.remove(gone)
        known, old = self._stamps.find(there.keys)
        new = ~known
        new[known] = there.values[known] != old
        wanted = there.keys[new]
        for rows in self._table.rows(wanted if len(wanted) <= _FEW else None):
            search.put(rows.keys, rows.descriptors)
            self._stamps.put(rows.keys, rows.stamps)
        self._seen = seen


def _read_header(path: Path) -> IndexHeader:
    try:
        header = IndexHeader.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        raise InputError(f"{path} is damaged: {error.errors()[0]['msg']}") from error
    if header.format_version != FORMAT_VERSION:
        raise InputError(
            f"{path.parent} has the format {header.format_version}, this listwise "
            f"reads {FORMAT_VERSION}: use the listwise {header.listwise} that made it"
        )
    return header
