"""The descriptors that FAISS searches, kept equal to the table."""

from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from listwise.errors import InputError
from listwise.search.checksums import DamagedIndexError, damage
from listwise.search.entries import Keys
from listwise.search.folder.compressed import CompressedSearch
from listwise.search.folder.descriptor_file import SavedDescriptors
from listwise.search.folder.flat import FlatSearch
from listwise.search.folder.keymap import KeyMap
from listwise.search.folder.table import EntryTable, Rows

_TRIES = 3


DescriptorSearch = FlatSearch | CompressedSearch
Search = TypeVar("Search", bound=DescriptorSearch, covariant=True)


class Mirror(Generic[Search]):
    """A search structure, the stamps of the rows that it holds, and the version it has read."""

    def __init__(self, search: Search, stamps: KeyMap | None = None) -> None:
        self._search = search
        self.stamps = KeyMap() if stamps is None else stamps
        self.seen = -1
        self.unsaved = 0  # changes that are not in the saved files
        self.copy: SavedDescriptors | None = None  # the saved copy of the descriptors

    @property
    def search(self) -> Search:
        """The search structure."""
        return self._search

    def put(self, rows: Rows) -> None:
        """Add rows; they replace rows with the same keys."""
        known, _ = self.stamps.find(rows.keys)
        self.search.put(rows.keys, rows.descriptors, known)
        self.stamps.put(rows.keys, rows.stamps)
        self.unsaved += len(rows.keys)

    def remove(self, keys: Keys) -> None:
        """Remove rows; unknown keys [n] are ignored."""
        keys = np.unique(keys)
        keys = keys[self.stamps.find(keys)[0]]
        self.search.remove(keys)
        self.stamps.remove(keys)
        self.unsaved += len(keys)

    def catch_up(
        self, table: EntryTable, on_rows: Callable[[Rows], object] = lambda rows: None
    ) -> None:
        """Read the rows that changed in the table since the last call.

        Args:
            table: the table.
            on_rows: called with the rows that were read.

        Raises:
            DamagedIndexError: a row is not what was written, or is missing.
        """
        for _ in range(_TRIES - 1):
            try:
                return self._catch_up(table, on_rows)
            except DamagedIndexError:
                raise
            except InputError:
                # Another process removed the version during the read; rows read so far are kept.
                continue
        return self._catch_up(table, on_rows)

    def _catch_up(self, table: EntryTable, on_rows: Callable[[Rows], object]) -> None:
        # If the table changes during the read, `seen` is too small and the next call reads again.
        seen = table.version
        if seen == self.seen:
            return
        there = KeyMap()
        there.put(*table.stamps())
        kept, _ = there.find(self.stamps.keys)
        if not kept.all():
            self.remove(self.stamps.keys[~kept])
        wanted = there.keys[self._new(there.keys, there.values)]
        for rows in table.rows(wanted if 2 * len(wanted) < len(there) else None):
            new = self._new(rows.keys, rows.stamps)
            if not new.all():
                rows = Rows(rows.keys[new], rows.stamps[new], rows.descriptors[new])
            self.put(rows)
            on_rows(rows)
        lacking = int(self._new(there.keys, there.values).sum())
        if lacking and table.version == seen:
            what = f"{lacking} of {len(there)} entries cannot be found by their keys"
            raise damage(table.uri, what)
        self.seen = seen

    def _new(self, keys: Keys, stamps: Keys) -> NDArray[np.bool_]:
        """Which rows are missing or have another stamp: keys [n], stamps [n] -> bool [n]."""
        new, held = self.stamps.find(keys)
        new[new] = stamps[new] == held
        return ~new
