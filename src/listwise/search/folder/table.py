"""The LanceDB table that holds the entries of an index in a folder; each change is one commit."""

import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from listwise.errors import InputError
from listwise.imports import without_lance_client
from listwise.search.checksums import (
    LOCAL_SUM,
    NO_LOCAL,
    SUMS,
    check_entry,
    check_local,
    check_thumbnail,
    damage,
    damaged_entries,
    entry_sum,
    local_sum,
    new_sums,
    sound_descriptors,
    without_checksums,
)
from listwise.search.entries import (
    Entry,
    Float32,
    Keys,
    NewEntries,
    as_row,
    from_row,
    in_parts,
    with_attribute,
)

# LanceDB reads these settings when it is imported: log errors only, limit the memory for reading
# ahead, and allow updates as large as the descriptors that are in memory for them anyway.
os.environ.setdefault("LANCE_LOG", "error")
os.environ.setdefault("LANCE_DEFAULT_IO_BUFFER_SIZE", str(256 << 20))
os.environ.setdefault("LANCE_MEM_POOL_SIZE", str(16 << 30))
with without_lance_client():
    import lancedb
    from lancedb.index import BTree

# Processes that are forked later decode photos, and do not use LanceDB.
warnings.filterwarnings("ignore", "lancedb fork support is experimental", RuntimeWarning)

_NAME = "entries"
_NAMED = 1000  # keys in one condition
_BATCH = 64 << 20  # bytes of descriptors per batch
_DESCRIPTORS = ["key", "stamp", "descriptor", "descriptor_sum"]
_COLUMNS = ["key", "id", "path", "width", "height", "box", "digest", "attributes", "entry_sum"]
_THUMBNAIL = ["key", "thumbnail", "thumbnail_sum"]
_LOCAL = ["local", LOCAL_SUM]  # columns of a table that holds local features
_TEXTS = 65536  # texts of attributes per batch
_NUMBERS = 1 << 20  # keys and stamps per batch
_TIDY_EVERY = 16  # commits
_SMALL_FILES = 32  # this many are joined into a larger one
_LARGE_FILE = 128 << 20  # bytes: a file of this size is not joined
_SLACK = 64 << 20  # bytes of old versions that are always allowed
_OLD = timedelta(minutes=1)  # no process reads a version that is older


class Rows(NamedTuple):
    """Rows of the table: keys and stamps, both int64 [n], and descriptors, float32 [n, C]."""

    keys: Keys
    stamps: Keys
    descriptors: Float32


class RawRows(NamedTuple):
    """Rows as they are stored, unchecked: their numbers [n], and Arrow tables of n rows.

    A table is None if LanceDB cannot read it.
    """

    numbers: NDArray[np.uint64]
    entries: pa.Table | None
    descriptors: pa.Table | None
    thumbnails: pa.Table | None
    local: pa.Table | None


class EntryTable:
    """Entries in LanceDB. Several threads and processes may read while one writes.

    Each row has a stamp, a random number that is new whenever its entry is written, and the
    checksums of `listwise.search.checksums`.
    """

    def __init__(self, folder: Path, table: Any, uri: str = "") -> None:
        self.folder = folder
        self.uri = uri or str(folder)  # the name of the index in messages
        self._table = table
        self._dropped = -np.inf
        self._has_sums = False

    @classmethod
    def create(cls, folder: Path, dim: int, uri: str = "") -> "EntryTable":
        """Create an empty table; it replaces the table of an unfinished attempt."""
        with _one_line_errors(uri or folder):
            mode = "overwrite" if (folder / f"{_NAME}.lance").exists() else "create"
            table = _connect(folder).create_table(_NAME, schema=_schema(dim), mode=mode)
            created = cls(folder, table, uri)
            created._index_columns()
            return created

    @classmethod
    def open(cls, folder: Path, uri: str = "") -> "EntryTable":
        """Open the table of an index; `uri` is its name in messages, by default the folder."""
        with _one_line_errors(uri or folder):
            return cls(folder, _connect(folder).open_table(_NAME), uri)

    @classmethod
    def can_read(cls, folder: Path) -> bool:
        """Whether LanceDB can read all rows of a table."""
        try:
            parts = cls.open(folder).raw()
            return all(table is not None for part in parts for table in part[1:])
        except InputError:
            return False

    @property
    def version(self) -> int:
        """The number of the last commit of any process."""
        with _one_line_errors(self.uri):
            return int(self._table.version)

    def count(self) -> int:
        """The number of entries."""
        with _one_line_errors(self.uri):
            return int(self._table.count_rows())

    def put(self, new: NewEntries, stamp: int, replacing: bool) -> None:
        """Write entries with distinct keys in one commit.

        With `replacing`, they replace entries with the same keys. Without, no entry may have one
        of the keys, and writing is faster.
        """
        with _one_line_errors(self.uri):
            rows = _as_table(new, stamp, self._table.schema)
            if replacing:
                self._merge(rows)
            else:
                self._table.add(rows)

    def remove(self, keys: Sequence[int]) -> int:
        """Remove entries in one commit and return their number."""
        with _one_line_errors(self.uri):
            # A single condition, because a kill could come between two deletions.
            return int(self._table.delete(_among("key", keys)).num_deleted_rows)

    def has_any(self, keys: Keys) -> bool:
        """Whether an entry has one of these keys."""
        with _one_line_errors(self.uri):
            parts = in_parts(keys.tolist(), _NAMED)
            return any(self._table.count_rows(_among("key", part)) for part in parts)

    def stamps(self) -> tuple[Keys, Keys]:
        """Keys and stamps of all entries: [N], [N]."""
        with _one_line_errors(self.uri):
            query = self._table.search().select(["key", "stamp"])
            found = query.to_batches(batch_size=_NUMBERS).read_all()
        return found["key"].to_numpy(), found["stamp"].to_numpy()

    def rows(self, keys: Keys | None = None) -> Iterator[Rows]:
        """The descriptors of the entries with these keys, or of all, part by part.

        Raises:
            DamagedIndexError: a descriptor is not what was written.
        """
        with _one_line_errors(self.uri):
            columns = self._present(_DESCRIPTORS)
            if keys is None:
                query = self._table.search().select(columns)
                for batch in query.to_batches(batch_size=self._batch_rows()):
                    yield self._sound_rows(pa.Table.from_batches([batch]))
                return
            for part in in_parts(keys, _NAMED):
                yield self._sound_rows(self._taken(np.unique(part).tolist(), columns))

    def get(self, keys: Sequence[int]) -> list[Entry]:
        """The entries with these keys, in any order."""
        with _one_line_errors(self.uri):
            columns = self._present(_COLUMNS)
            parts = [self._taken(part, columns) for part in in_parts(keys, _NAMED)]
            return [entry for part in parts for entry in self._as_entries(part)]

    def with_digests(self, digests: Sequence[str]) -> list[Entry]:
        """The entries with these digests, in any order."""
        asked = [digest for digest in digests if digest]
        found: list[Entry] = []
        with _one_line_errors(self.uri):
            columns = self._present(_COLUMNS)
            for part in in_parts(asked, _NAMED):
                query = self._table.search().where(_among("digest", part)).select(columns)
                found += self._as_entries(query.to_arrow())
        return found

    def page(self, start: int, count: int) -> list[Entry]:
        """`count` entries from position `start`, in the order of the table."""
        with _one_line_errors(self.uri):
            query = self._table.search().select(self._present(_COLUMNS))
            return self._as_entries(query.offset(start).limit(count).to_arrow())

    def attributes(self) -> Iterator[tuple[Keys, pa.Array]]:
        """Keys and attributes of all entries as JSON texts, part by part: [n], n texts."""
        with _one_line_errors(self.uri):
            query = self._table.search().select(["key", "attributes"])
            for batch in query.to_batches(batch_size=_TEXTS):
                yield batch["key"].to_numpy(), batch["attributes"]

    def thumbnails(self, keys: Sequence[int]) -> dict[int, bytes]:
        """The thumbnails of entries that have one, by key."""
        thumbnails: dict[int, bytes] = {}
        with _one_line_errors(self.uri):
            for part in in_parts(keys, _NAMED):
                for row in self._taken(part, self._present(_THUMBNAIL)).to_pylist():
                    content = bytes(row["thumbnail"] or b"")
                    check_thumbnail(self.uri, row["key"], content, row.get("thumbnail_sum"))
                    if content:
                        thumbnails[row["key"]] = content
        return thumbnails

    def versions(self) -> tuple[Keys, Keys]:
        """Keys of all entries, and checksums of what does not depend on a model: [N], [N, 3]."""
        names = ["entry_sum", "thumbnail_sum", *([LOCAL_SUM] if self.has_local() else [])]
        with _one_line_errors(self.uri):
            found = self._table.search().select(self._present(["key", *names])).to_arrow()
        if len(found.column_names) <= len(names) or found["entry_sum"].null_count:
            raise without_checksums(self.uri)
        sums = np.full((found.num_rows, 3), NO_LOCAL, np.int64)
        for place, name in enumerate(names):
            sums[:, place] = found[name].fill_null(NO_LOCAL).to_numpy()
        return found["key"].to_numpy(), sums

    def has_local(self) -> bool:
        """Whether the table has columns for local features."""
        with _one_line_errors(self.uri):
            return LOCAL_SUM in self._table.schema.names

    def add_local_columns(self) -> None:
        """Add the columns of local features if they are missing."""
        with _one_line_errors(self.uri):
            if not self.has_local():
                kinds = (pa.binary(), pa.int64())
                self._table.add_columns([*map(pa.field, _LOCAL, kinds)])

    def local(self, keys: Sequence[int]) -> dict[int, bytes]:
        """The local features of entries that have them, by key."""
        found: dict[int, bytes] = {}
        with _one_line_errors(self.uri):
            if not self.has_local():
                return found
            for part in in_parts(keys, _NAMED):
                for row in self._taken(part, ["key", *_LOCAL]).to_pylist():
                    if row[LOCAL_SUM] is not None:
                        found[row["key"]] = row["local"]
                        check_local(self.uri, row["key"], row["local"], row[LOCAL_SUM])
        return found

    def put_local(self, digests: Mapping[int, str], local: Mapping[int, bytes]) -> None:
        """Write local features in one commit, for the keys whose entry has the digest.

        Rows are written as a whole: to change a column, LanceDB would rewrite it for all rows of
        a file.
        """
        with _one_line_errors(self.uri):
            rows = self._taken(list(digests), self._table.schema.names)
            keys = rows["key"].to_pylist()
            same = [
                digests[key] == digest
                for key, digest in zip(keys, rows["digest"].to_pylist(), strict=True)
            ]
            rows = rows.filter(pa.array(same, pa.bool_()))
            if rows.num_rows:
                keys = rows["key"].to_pylist()
                values = _local_columns(keys, [local[key] for key in keys])
                self._merge(_with_columns(rows, values))

    def set_attribute(self, keys: Sequence[int], name: str, value: str) -> int:
        """Set an attribute in one commit, or remove it if the value is empty; how many have it."""
        with _one_line_errors(self.uri):
            rows = self._taken(keys, self._table.schema.names)
            entries = self._as_entries(rows.select(self._present(_COLUMNS)))
            new = [as_row(with_attribute(entry, name, value)) for entry in entries]
            values: dict[str, list[Any]] = {"attributes": [row["attributes"] for row in new]}
            if "entry_sum" in rows.schema.names:
                values["entry_sum"] = [entry_sum(row) for row in new]
            if rows.num_rows and values["attributes"] != rows["attributes"].to_pylist():
                self._merge(_with_columns(rows, values))
            return int(rows.num_rows)

    def without_local(self) -> list[int]:
        """The keys of the entries without local features."""
        with _one_line_errors(self.uri):
            query = self._table.search().select(["key"])
            if self.has_local():
                query = query.where(f"{LOCAL_SUM} IS NULL")
            keys: list[int] = query.to_arrow()["key"].to_pylist()
            return keys

    def local_sums(self) -> Keys:
        """Sizes and checksums of the local features of the entries that have them: [n]."""
        with _one_line_errors(self.uri):
            if not self.has_local():
                return np.zeros(0, np.int64)
            found = self._table.search().select([LOCAL_SUM]).to_arrow()[LOCAL_SUM]
            sums: Keys = found.drop_null().to_numpy()
            return sums

    def raw(self) -> Iterator[RawRows]:
        """All rows part by part, unchecked, with None for what LanceDB cannot read."""
        with _one_line_errors(self.uri):
            numbers = self._table.search().select(["_rowid"]).with_row_id(True).to_arrow()
            groups = [self._present(names) for names in (_COLUMNS, _DESCRIPTORS, _THUMBNAIL)]
            groups.append(["key", *(_LOCAL if self.has_local() else ())])
        for part in in_parts(numbers["_rowid"].to_numpy(), min(1024, self._batch_rows())):
            tables = [self._read_or_none(part, names) for names in groups]
            yield RawRows(part, *tables)

    def remove_rows(self, numbers: Sequence[int]) -> None:
        """Remove rows by their numbers in the current version, in one commit."""
        with _one_line_errors(self.uri):
            self._table.delete(_among("_rowid", numbers))

    def add_sum_columns(self) -> None:
        """Add the checksum columns that a table of an earlier version does not have."""
        with _one_line_errors(self.uri):
            missing = [name for name in SUMS if name not in self._table.schema.names]
            if missing:
                self._table.add_columns([pa.field(name, pa.int64()) for name in missing])

    def set_sums(self, keys: Sequence[int], sums: dict[str, list[int]]) -> None:
        """Set the checksums of entries: n keys, n checksums of each kind."""
        with _one_line_errors(self.uri):
            rows = pa.table({"key": keys, **sums})
            self._table.merge_insert("key").when_matched_update_all().execute(rows)

    def rebuild_indices(self) -> None:
        """Build the indices of keys and digests again."""
        with _one_line_errors(self.uri):
            self._index_columns()

    def tidy(self) -> None:
        """Join small files and remove old versions, after every few commits.

        Only the process that holds the lock may call it. Entries and stamps do not change.
        """
        with _one_line_errors(self.uri):
            if self._table.version % _TIDY_EVERY:
                return
            self._join_small_files()
            known = self._table.index_stats("key_idx")
            if known.num_unindexed_rows > max(20_000, known.num_indexed_rows // 4):
                self._index_columns()
            self._drop_dead_rows()

    def _merge(self, rows: pa.Table) -> None:
        merge = self._table.merge_insert("key").when_matched_update_all()
        # With the index, LanceDB would read all columns of the rows that are not indexed yet.
        merge.when_not_matched_insert_all().use_index(False).execute(rows)

    def _taken(self, keys: Sequence[int], columns: list[str]) -> pa.Table:
        """Read columns, with the key among them, of the rows with these keys.

        It finds the row numbers first and then reads those rows: a query with a condition would
        read all columns of all rows that are not indexed yet.
        """
        condition = _among("key", keys)
        places = self._table.search().where(condition).select(["key"]).with_row_id(True).to_arrow()
        query = self._table.take_row_ids(places["_rowid"].to_pylist()).select(columns)
        found = query.to_arrow()
        if not np.array_equal(np.sort(found["key"].to_numpy()), np.sort(places["key"].to_numpy())):
            # Another process has just moved the rows.
            found = self._table.search().where(condition).select(columns).to_arrow()
        return found

    def _present(self, columns: list[str]) -> list[str]:
        """Those columns that the table has: earlier versions stored no checksums."""
        # Checksum columns are added but never dropped, so this is looked up until they exist.
        self._has_sums = self._has_sums or SUMS[0] in self._table.schema.names
        return [name for name in columns if self._has_sums or name not in SUMS]

    def _batch_rows(self) -> int:
        dim = int(self._table.schema.field("descriptor").type.list_size)
        return min(65536, max(256, _BATCH // (4 * dim)))

    def _read_or_none(self, numbers: Any, columns: list[str]) -> pa.Table | None:
        try:
            with _one_line_errors(self.uri):
                found = self._table.take_row_ids(numbers.tolist()).select(columns).to_arrow()
                return found if len(found) == len(numbers) else None
        except InputError:
            return None

    def _sound_rows(self, found: pa.Table) -> Rows:
        rows = as_rows(found)
        sound = sound_descriptors(rows.keys, rows.descriptors, sums_of(found))
        if not sound.all():
            raise damaged_entries(self.uri, self._names(rows.keys[~sound]))
        return rows

    def _names(self, keys: Keys) -> list[str]:
        """The ids of damaged entries as far as they can be read, otherwise their keys."""
        try:
            ids = {entry.key: entry.id for entry in self.get(keys[:3].tolist())}
        except InputError:
            ids = {}
        return [ids.get(key, f"key {key}") for key in keys.tolist()]

    def _as_entries(self, found: pa.Table) -> list[Entry]:
        rows = found.to_pylist()
        for row in rows:
            check_entry(self.uri, row)
        return [from_row(row) for row in rows]

    def _index_columns(self) -> None:
        for column in ("key", "digest"):
            self._table.create_index(column, config=BTree())

    def _join_small_files(self) -> None:
        """Rewrite the rows of small files into one file, in one commit.

        The compaction of LanceDB would rewrite almost the whole table each time.
        """
        found = self._table.search().select(["key"]).with_row_id(True).to_arrow()
        if not found.num_rows:
            return
        # The upper 32 bits of a row number are the number of its file.
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
            # Only files of similar size, so that a row is rewritten a few times, not every time.
            if (len(joined) > 1 and counts[file] > 2 * total) or total > large:
                break
            joined.append(int(file))
            total += int(counts[file])
        rows = found["_rowid"].to_numpy()[np.isin(owner, joined)]
        self._merge(self._table.take_row_ids(rows.tolist()).to_arrow())

    def _drop_dead_rows(self) -> None:
        """Rewrite the table if most of its disk space holds removed rows and old versions."""
        stats = self._table.stats()
        files = stats["fragment_stats"]
        rows = files["num_fragments"] * files["lengths"]["mean"]  # including removed ones
        alive = stats["total_bytes"] * stats["num_rows"] / max(1, rows)
        if disk_bytes(self.folder / f"{_NAME}.lance") < 2 * alive + _SLACK:
            return
        # Old versions stay on disk until they are old enough; cleaning earlier frees nothing.
        if time.monotonic() > self._dropped + _OLD.total_seconds():
            # This process holds the lock, so files without a version are from a killed writer.
            self._table.optimize(cleanup_older_than=_OLD, delete_unverified=True)
            self._dropped = time.monotonic()


def _connect(folder: Path) -> Any:
    # Every read sees the last commit.
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
            *(pa.field(name, pa.int64()) for name in SUMS),
        ]
    )


def _as_table(new: NewEntries, stamp: int, schema: pa.Schema) -> pa.Table:
    """Entries as rows of a table, with checksums if it stores them."""
    descriptors = np.ascontiguousarray(new.descriptors, np.float32)
    rows = [as_row(entry) for entry in new.entries]
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    columns |= new_sums(new)
    local = new.local or [b""] * len(rows)
    columns |= _local_columns(columns["key"], local)
    columns["stamp"] = [stamp] * len(rows)
    columns["thumbnail"] = [thumbnail or None for thumbnail in new.thumbnails]
    columns["descriptor"] = pa.FixedSizeListArray.from_arrays(
        pa.array(descriptors.ravel()), descriptors.shape[1]
    )
    return pa.table({name: columns[name] for name in schema.names}, schema=schema)


def _local_columns(keys: Sequence[int], local: Sequence[bytes]) -> dict[str, list[Any]]:
    """The columns of local features; None for entries without them."""
    return {
        "local": [content or None for content in local],
        LOCAL_SUM: [
            local_sum(key, content) if content else None
            for key, content in zip(keys, local, strict=True)
        ],
    }


def _with_columns(rows: pa.Table, values: Mapping[str, list[Any]]) -> pa.Table:
    """Rows with other values in some columns."""
    for name, column in values.items():
        place = rows.schema.get_field_index(name)
        field = rows.schema.field(name)
        rows = rows.set_column(place, field, pa.array(column, field.type))
    return rows


def sums_of(found: pa.Table) -> Any:
    """The checksums of descriptors in a table that was read; None if it stores none."""
    if "descriptor_sum" not in found.column_names:
        return None
    column = found["descriptor_sum"]
    return column.to_pylist() if column.null_count else column.to_numpy()


def as_rows(found: pa.Table) -> Rows:
    """Keys, stamps and descriptors of a table that was read."""
    column = found["descriptor"].combine_chunks()
    descriptors = column.flatten().to_numpy().reshape(len(column), column.type.list_size)
    return Rows(found["key"].to_numpy(), found["stamp"].to_numpy(), descriptors)


def _among(column: str, values: Sequence[int] | Sequence[str]) -> str:
    """The SQL condition that a column has one of these values."""
    quoted = (
        "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(int(value))
        for value in values
    )
    return f"{column} IN ({', '.join(quoted)})"


def disk_bytes(folder: Path) -> int:
    """Total size of the files in a folder and its subfolders, in bytes."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(place, name)).st_size
            except FileNotFoundError:  # removed by another process
                continue
    return total


@contextmanager
def _one_line_errors(uri: str | Path) -> Iterator[None]:
    """Raise an error of LanceDB as an `InputError` of one line."""
    try:
        yield
    except InputError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise _plain(uri, error) from error
    except BaseException as error:
        # An unexpected value in a file makes LanceDB panic, which is not an `Exception`.
        if type(error).__name__ != "PanicException":
            raise
        raise damage(str(uri), "LanceDB cannot read one of its files") from None


def _plain(uri: str | Path, error: Exception) -> InputError:
    """An error of LanceDB without the names of its source files."""
    reason = " ".join(str(error).split())
    reason = re.sub(r",? ?\(?(/[^\s,]*|[\w./-]*)\.rs:\d+(:\d+)?\)?", "", reason)[:200]
    return InputError(
        f"the index {uri} cannot be used: {reason.rstrip(' .,:')}; listwise index check "
        f"{uri} shows whether it is damaged"
    )
