"""The truth of an embedded index: a LanceDB table of entries, each change of it one commit."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from listwise.errors import InputError
from listwise.search.entries import Entry, Float32, Keys, NewEntries, as_row, from_row, in_parts

# LanceDB's settings, read when it is imported: be silent, hold little of what is read in advance,
# and let an update be as large as the descriptors that are in memory for it anyway.
os.environ.setdefault("LANCE_LOG", "error")
os.environ.setdefault("LANCE_DEFAULT_IO_BUFFER_SIZE", str(256 << 20))
os.environ.setdefault("LANCE_MEM_POOL_SIZE", str(16 << 30))
import lancedb
from lancedb.index import BTree

_NAME = "entries"
_NAMED = 1000  # keys in one condition
_BATCH = 64 << 20  # bytes of descriptors read at a time
_DESCRIPTORS = ["key", "stamp", "descriptor"]
_COLUMNS = ["key", "id", "path", "width", "height", "box", "digest", "attributes"]
_TIDY_EVERY = 16  # commits
_SMALL_FILES = 32  # are made into larger ones
_LARGE_FILE = 128 << 20  # bytes: left as it is
_SLACK = 64 << 20  # bytes of old versions that are always allowed
_OLD = timedelta(minutes=1)  # a version this old is read by nobody


class Rows(NamedTuple):
    """Descriptors as they stand in the table: keys, stamps, both [n], and rows [n, C]."""

    keys: Keys
    stamps: Keys
    descriptors: Float32


class EntryTable:
    """Entries in LanceDB. Several threads and processes may read while one writes.

    Each row has a stamp, which changes whenever its entry is written.
    """

    def __init__(self, folder: Path, table: Any) -> None:
        self.folder = folder
        self._table = table
        self._dropped = -np.inf

    @classmethod
    def create(cls, folder: Path, dim: int) -> "EntryTable":
        """An empty table, in place of one that may be there."""
        with _one_line_errors(folder):
            mode = "overwrite" if (folder / f"{_NAME}.lance").exists() else "create"
            table = _connect(folder).create_table(_NAME, schema=_schema(dim), mode=mode)
            created = cls(folder, table)
            created._index_columns()
            return created

    @classmethod
    def open(cls, folder: Path) -> "EntryTable":
        """The table of an index."""
        with _one_line_errors(folder):
            return cls(folder, _connect(folder).open_table(_NAME))

    @property
    def version(self) -> int:
        """The number of the last commit of any process."""
        with _one_line_errors(self.folder):
            return int(self._table.version)

    def count(self) -> int:
        """The number of entries."""
        with _one_line_errors(self.folder):
            return int(self._table.count_rows())

    def put(self, new: NewEntries, stamp: int, replacing: bool) -> None:
        """Write entries with distinct keys in one commit, in place of any with the same keys.

        Without such ones, which the writer's lock lets one know, it is faster.
        """
        with _one_line_errors(self.folder):
            rows = _as_table(new, stamp)
            if replacing:
                self._merge(rows)
            else:
                self._table.add(rows)

    def remove(self, keys: Sequence[int]) -> int:
        """Remove entries in one commit, and return how many there were."""
        with _one_line_errors(self.folder):
            # One condition, or a kill might come between two.
            return int(self._table.delete(_among("key", keys)).num_deleted_rows)

    def has_any(self, keys: Keys) -> bool:
        """Whether there is an entry with one of these keys."""
        with _one_line_errors(self.folder):
            parts = in_parts(keys.tolist(), _NAMED)
            return any(self._table.count_rows(_among("key", part)) for part in parts)

    def stamps(self) -> tuple[Keys, Keys]:
        """Keys and stamps of all entries: [N], [N]."""
        with _one_line_errors(self.folder):
            found = self._table.search().select(["key", "stamp"]).to_arrow()
        return found["key"].to_numpy(), found["stamp"].to_numpy()

    def rows(self, keys: Keys | None = None) -> Iterator[Rows]:
        """The descriptors of the entries with these keys, or of all, part by part."""
        with _one_line_errors(self.folder):
            if keys is None:
                query = self._table.search().select(_DESCRIPTORS)
                dim = self._table.schema.field("descriptor").type.list_size
                for batch in query.to_batches(batch_size=min(65536, max(256, _BATCH // (4 * dim)))):
                    yield _as_rows(pa.Table.from_batches([batch]))
                return
            for part in in_parts(keys, _NAMED):
                yield _as_rows(self._taken(np.unique(part).tolist(), _DESCRIPTORS))

    def get(self, keys: Sequence[int]) -> list[Entry]:
        """The entries with these keys, in any order."""
        with _one_line_errors(self.folder):
            parts = [self._taken(part, _COLUMNS) for part in in_parts(keys, _NAMED)]
            return [entry for part in parts for entry in _as_entries(part)]

    def with_digests(self, digests: Sequence[str]) -> list[Entry]:
        """The entries with these digests, in any order."""
        asked = [digest for digest in digests if digest]
        found: list[Entry] = []
        with _one_line_errors(self.folder):
            for part in in_parts(asked, _NAMED):
                query = self._table.search().where(_among("digest", part)).select(_COLUMNS)
                found += _as_entries(query.to_arrow())
        return found

    def page(self, start: int, count: int) -> list[Entry]:
        """Some entries in the table's order."""
        with _one_line_errors(self.folder):
            query = self._table.search().select(_COLUMNS).offset(start).limit(count)
            return _as_entries(query.to_arrow())

    def thumbnail(self, key: int) -> bytes | None:
        """The thumbnail of an entry, None if there is none."""
        with _one_line_errors(self.folder):
            found = self._taken([key], ["key", "thumbnail"])["thumbnail"].to_pylist()
        return bytes(found[0]) if found and found[0] else None

    def tidy(self) -> None:
        """Keep reading fast and the disk small, now and then; for the one process that writes.

        Entries and stamps stay as they are.
        """
        with _one_line_errors(self.folder):
            if self._table.version % _TIDY_EVERY:
                return
            self._join_small_files()
            known = self._table.index_stats("key_idx")
            if known.num_unindexed_rows > max(20_000, known.num_indexed_rows // 4):
                self._index_columns()
            self._drop_dead_rows()

    def _merge(self, rows: pa.Table) -> None:
        merge = self._table.merge_insert("key").when_matched_update_all()
        # With the index it reads whole rows where the index does not reach; keys alone are quick.
        merge.when_not_matched_insert_all().use_index(False).execute(rows)

    def _taken(self, keys: Sequence[int], columns: list[str]) -> pa.Table:
        """Columns of some keys' rows, the key among them.

        First where they are, then the rows: a condition on rows that the index does not reach
        would read all columns of all of them.
        """
        condition = _among("key", keys)
        places = self._table.search().where(condition).select(["key"]).with_row_id(True).to_arrow()
        query = self._table.take_row_ids(places["_rowid"].to_pylist()).select(columns)
        found = query.to_arrow()
        if not np.array_equal(np.sort(found["key"].to_numpy()), np.sort(places["key"].to_numpy())):
            # Another process moved them just now.
            found = self._table.search().where(condition).select(columns).to_arrow()
        return found

    def _index_columns(self) -> None:
        for column in ("key", "digest"):
            self._table.create_index(column, config=BTree())

    def _join_small_files(self) -> None:
        """Write the rows of small files again, together, in one commit.

        LanceDB's own compaction would rewrite almost the whole table each time.
        """
        found = self._table.search().select(["key"]).with_row_id(True).to_arrow()
        if not found.num_rows:
            return
        # A row's number begins with that of its file.
        _, owner, counts = np.unique(
            found["_rowid"].to_numpy() >> 32, return_inverse=True, return_counts=True
        )
        large = _LARGE_FILE * found.num_rows / max(1, self._table.stats()["total_bytes"])
        small = np.flatnonzero(counts < large)
        if len(small) < _SMALL_FILES:
            return
        joined: list[int] = []
        total = 0
        for file in small[np.argsort(counts[small], kind="stable")]:
            # Of like size only: a row is written again a few times, not each time.
            if (len(joined) > 1 and counts[file] > 2 * total) or total > large:
                break
            joined.append(int(file))
            total += int(counts[file])
        rows = found["_rowid"].to_numpy()[np.isin(owner, joined)]
        self._merge(self._table.take_row_ids(rows.tolist()).to_arrow())

    def _drop_dead_rows(self) -> None:
        """Rewrite the table if most of the disk holds removed rows and old versions."""
        stats = self._table.stats()
        files = stats["fragment_stats"]
        rows = files["num_fragments"] * files["lengths"]["mean"]  # the removed ones too
        alive = stats["total_bytes"] * stats["num_rows"] / max(1, rows)
        if disk_bytes(self.folder / f"{_NAME}.lance") < 2 * alive + _SLACK:
            return
        # What was dropped stays on disk until it is old: doing it again earlier frees nothing.
        if time.monotonic() > self._dropped + _OLD.total_seconds():
            # Writers hold the index's lock: files that no version knows are a killed one's.
            self._table.optimize(cleanup_older_than=_OLD, delete_unverified=True)
            self._dropped = time.monotonic()


def _connect(folder: Path) -> Any:
    # Each read sees the last commit.
    return lancedb.connect(folder, read_consistency_interval=timedelta(0))


def _schema(dim: int) -> pa.Schema:
    return pa.schema(
        [
            pa.field("key", pa.int64(), nullable=False),
            pa.field("stamp", pa.int64(), nullable=False),
            pa.field("id", pa.string(), nullable=False),
            pa.field("path", pa.string(), nullable=False),
            pa.field("width", pa.int32(), nullable=False),
            pa.field("height", pa.int32(), nullable=False),
            pa.field("box", pa.string()),
            pa.field("digest", pa.string(), nullable=False),
            pa.field("attributes", pa.string(), nullable=False),
            pa.field("thumbnail", pa.binary()),
            pa.field("descriptor", pa.list_(pa.float32(), dim), nullable=False),
        ]
    )


def _as_table(new: NewEntries, stamp: int) -> pa.Table:
    descriptors = np.ascontiguousarray(new.descriptors, np.float32)
    schema = _schema(descriptors.shape[1])
    rows = [as_row(entry) for entry in new.entries]
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in _COLUMNS}
    columns["stamp"] = [stamp] * len(rows)
    columns["thumbnail"] = [thumbnail or None for thumbnail in new.thumbnails]
    columns["descriptor"] = pa.FixedSizeListArray.from_arrays(
        pa.array(descriptors.ravel()), descriptors.shape[1]
    )
    return pa.table({name: columns[name] for name in schema.names}, schema=schema)


def _as_rows(found: pa.Table) -> Rows:
    column = found["descriptor"].combine_chunks()
    descriptors = column.flatten().to_numpy().reshape(len(column), column.type.list_size)
    return Rows(found["key"].to_numpy(), found["stamp"].to_numpy(), descriptors)


def _as_entries(found: pa.Table) -> list[Entry]:
    return [from_row(row) for row in found.to_pylist()]


def _among(column: str, values: Sequence[int] | Sequence[str]) -> str:
    """The condition that a column has one of these values."""
    quoted = (
        "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(int(value))
        for value in values
    )
    return f"{column} IN ({', '.join(quoted)})"


def disk_bytes(folder: Path) -> int:
    """Bytes of all files in a folder and below."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(place, name)).st_size
            except FileNotFoundError:  # another process tidies
                continue
    return total


@contextmanager
def _one_line_errors(folder: Path) -> Iterator[None]:
    """Raise an error of LanceDB as an `InputError` of one line."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"the index {folder} cannot be used: {reason}") from error
