"""An index in Milvus: a server, a cluster, or a file of milvus-lite."""

import base64
import json
import math
import secrets
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ValidationError

from listwise.errors import InputError
from listwise.search.checksums import (
    LOCAL_SUM,
    NO_LOCAL,
    SUMS,
    EntryCheck,
    check_entry,
    check_local,
    check_thumbnail,
    damage,
    damaged_entries,
    examine_rows,
    sound_descriptors,
    without_checksums,
)
from listwise.search.entries import (
    Entry,
    Float32,
    Keys,
    NewEntries,
    from_row,
    in_parts,
    possible_keys,
    with_attribute,
)
from listwise.search.exact import best_of
from listwise.search.filters import Filter, FilterError, attribute_names, unknown_attribute
from listwise.search.generations import GenerationRecord
from listwise.search.measuring import ExactNeighbors, measure
from listwise.search.milvus import filters
from listwise.search.milvus.connection import Connection, Place, parse_place
from listwise.search.milvus.mark_rows import MarkRows
from listwise.search.milvus.rows import (
    ENTRY,
    FIELDS,
    MESSAGE,
    OLD_FIELDS,
    OLDEST_FIELDS,
    as_rows,
    messages,
    schema,
)
from listwise.search.milvus.tuning import EXACT, Method, fast, take_sample
from listwise.search.store import IndexHeader, Note, SearchIntent, Store, TuningResult

_HEADER, _SEARCH = "listwise.header", "listwise.search"  # properties of the collection
_RECORD = "listwise.generations"  # property of the collection of generation 0
_OWNER = "listwise.generation_of"  # property of the collection of another generation
_MOST = 16384  # maximum rows per answer of a server
_NAMED = 1000  # maximum keys or digests per request
_FEW = 1000  # entries that match a filter and are compared exactly
_ROW = 64 << 10  # bytes of texts and thumbnail that an entry rarely exceeds
_KEYS = 1 << 63  # all keys are smaller
_WINDOW = 4096  # expected keys per step when all keys are read
_SESSION = "Session"  # a read sees the writes of this process
_STRONG = "Strong"  # a read sees the writes of all processes

_FAST = 200.0  # milliseconds up to which exact search is used by default
_RECALL = 0.99
_SCORE = 1.5  # times the norm of the query: no search of unit descriptors scores more
_GAIN = 0.001  # minimum gain of recall from twice the effort
_PAUSE = 60.0  # seconds after which a pause is one of a killed process
_POLL = 0.1  # seconds between two looks at the record during a pause
_NO_WALK: tuple[Keys, int] = (np.zeros(0, np.int64), 0)


class _State(BaseModel):
    """The search method of a collection, the intent it was chosen for, and measurements."""

    method: Method = EXACT
    intent: SearchIntent = SearchIntent()
    recall: float | None = None
    milliseconds: float | None = None


class MilvusStore(Store):
    """A store in a collection of Milvus. Several threads and processes may use it.

    A process sees its own changes immediately, and the changes of others shortly after, or
    immediately after `refresh`.
    """

    engine = "milvus"

    def __init__(
        self,
        connection: Connection,
        header: IndexHeader,
        state: _State,
        generation: int,
        aside: bool = False,
    ) -> None:
        self.uri = connection.place.shown
        self.generation = generation
        self.header = header
        self._connection = connection
        self._pause = ""  # the mark of this process in the record
        self._aside = aside  # may be changed although it is not the current generation
        # The last search that uses a generation closes its connection after a switch.
        weakref.finalize(self, connection.close_in_background).atexit = False
        self._state = state
        self._walk: tuple[Keys, int] = _NO_WALK
        found = connection.call("describe_collection")["fields"]
        # Collections of earlier versions have no fields for checksums, filters and local features.
        self._fields = {field["name"] for field in found}
        self._has_sums = self._fields >= set(SUMS)
        self._has_filters = filters.FIELD in self._fields
        self._names: set[str] = set()  # attributes that entries are known to have
        self._mark_rows = MarkRows(connection)

    @staticmethod
    def exists(place: str) -> bool:
        """Whether an index exists; an unfinished one does not count."""
        where = parse_place(place)
        if where.file is not None and not where.file.is_dir():
            return False
        connection = Connection(where)
        try:
            return _HEADER in _properties(connection)
        finally:
            connection.close()

    @classmethod
    def open(cls, place: str) -> "MilvusStore":
        """Open an index that exists."""
        where = parse_place(place)
        connection = Connection(where)
        try:
            current = _read_record(connection).current
        finally:
            connection.close()
        return cls._open(where, current)

    @classmethod
    def _open(cls, place: Place, number: int, aside: bool = False) -> "MilvusStore":
        connection = Connection(place, number)
        try:
            index = cls(connection, *_remembered(connection), number, aside)
            index._build()
            index._wait_for_writes()
        except BaseException:
            connection.close()
            raise
        return index

    @classmethod
    def create(cls, place: str, header: IndexHeader) -> "MilvusStore":
        """Create an empty index; it replaces an unfinished one."""
        return cls._create(parse_place(place), header, 0)

    @classmethod
    def _create(
        cls, place: Place, header: IndexHeader, number: int, aside: bool = False
    ) -> "MilvusStore":
        connection = Connection(place, number)
        try:
            _make_place(connection)
            connection.call(
                "create_collection", schema=schema(header.dim), consistency_level=_SESSION
            )
            index = cls(connection, header, _State(), number, aside)
            index._build()
            # Written last: a collection without a header is not an index.
            owner = {_OWNER: place.collection} if number else {}
            index._remember({_HEADER: header.model_dump_json(), **owner})
        except BaseException:
            connection.close()
            raise
        return index

    def __len__(self) -> int:
        return self._count(_SESSION)

    def put(self, new: NewEntries) -> None:
        """Write entries; they replace entries with the same keys.

        Each message of entries is written in one step.
        """
        if not new.entries:
            return
        self.check_new(new)
        made = as_rows(new, self._fields)
        rows = {entry.key: row for entry, row in zip(new.entries, made, strict=True)}
        with self._change():
            for message in messages(rows.values()):
                self._connection.call("upsert", data=message)
        self._walk = _NO_WALK

    def remove(self, keys: Sequence[int]) -> int:
        """Remove entries and return their number."""
        removed = 0
        with self._change() as record:
            for some in in_parts(sorted({int(key) for key in keys}), _MOST):
                present = [row["key"] for row in self._rows(some, ["key"])]
                if present and record is not None and record.previous is not None:
                    # First from the generation that a rollback would return to: after a kill in
                    # between, the entries are still there to be removed again.
                    earlier = self._connection.collection_of(record.previous)
                    self._connection.call("delete", collection=earlier, ids=present)
                if present:
                    self._connection.call("delete", ids=present)
                removed += len(present)
        if removed:
            self._wait_for_writes()
        self._walk = _NO_WALK
        self._names = set()
        return removed

    def set_attribute(self, keys: Sequence[int], name: str, value: str) -> int:
        """Set an attribute of entries; each message of entries is written in one step."""
        changed = 0
        for some in in_parts(possible_keys(keys), MESSAGE // (4 * self.header.dim + _ROW)):
            entries = [with_attribute(entry, name, value) for entry in self.get(some).values()]
            self._put_again(entries)
            changed += len(entries)
        return changed

    def _put_again(
        self, entries: Sequence[Entry], local: Mapping[int, bytes] = MappingProxyType({})
    ) -> None:
        """Write entries with their descriptors, thumbnails, and local features or these ones."""
        keys = [entry.key for entry in entries]
        if not keys:
            return
        small = self.thumbnails(keys)
        codes = {**self.local(keys), **local}
        vectors = self.vectors(np.array(keys, np.int64))
        thumbnails = [small.get(key, b"") for key in keys]
        self.put(NewEntries(entries, vectors, thumbnails, [codes.get(key, b"") for key in keys]))

    @property
    def mark_log(self) -> MarkRows:
        """The log of the marks, which all generations share."""
        return self._mark_rows

    def get(self, keys: Sequence[int]) -> dict[int, Entry]:
        """Return the entries with these keys; unknown keys are left out."""
        rows = self._rows(keys, self._with_sum(ENTRY, "entry_sum"))
        return {row["key"]: self._entry(row) for row in rows}

    def with_digests(self, digests: Sequence[str]) -> dict[str, Entry]:
        """Return entries by digest; unknown digests are left out."""
        found: dict[str, Entry] = {}
        for some in in_parts(sorted({digest for digest in digests if digest}), _NAMED):
            named = json.dumps(some, ensure_ascii=False)
            fields = self._with_sum(["key", *ENTRY], "entry_sum")
            rows = self._query(fields, filter=f"digest in {named}", limit=_MOST)
            found |= {row["digest"]: self._entry(row) for row in rows}
        return found

    def page(self, start: int, count: int, where: Filter | None = None) -> list[Entry]:
        """Return `count` entries from position `start`, ordered by key."""
        found_keys = self._keys(start + count) if where is None else self.matching(where)
        keys = found_keys[start : start + count].tolist()
        found = self.get(keys)
        return [found[key] for key in keys if key in found]

    def matching(self, where: Filter) -> Keys:
        """Return the keys of all entries that match a filter, sorted."""
        expression = self._expression(where)
        return self._walk_keys(expression, self._count(_SESSION, expression))[0]

    def check_filter(self, where: Filter) -> None:
        """Refuse a filter with an attribute that no entry has."""
        self._expression(where)

    def count(self, where: Filter | None = None) -> int:
        """The number of entries that match a filter, or of all."""
        return self._count(_SESSION, "" if where is None else self._expression(where))

    def attribute_texts(self) -> Iterator[list[str]]:
        """Read the attributes of all entries as JSON texts, part by part."""
        for keys in in_parts(self._keys(), _NAMED):
            yield [row["attributes"] for row in self._rows(keys, ["attributes"])]

    def thumbnails(self, keys: Sequence[int]) -> dict[int, bytes]:
        """Return the thumbnails of entries by key; entries without one are left out."""
        found: dict[int, bytes] = {}
        for some in in_parts(keys, MESSAGE // _ROW):
            for row in self._rows(some, self._with_sum(["thumbnail"], "thumbnail_sum")):
                content = _decoded(row["thumbnail"])
                check_thumbnail(self.uri, row["key"], content, row.get("thumbnail_sum"))
                if content:
                    found[row["key"]] = content
        return found

    def store_local(self) -> None:
        """Store local features of photos from now on; the header says so."""
        if self.header.local:
            return
        if LOCAL_SUM not in self._fields:
            raise InputError(
                f"{self.uri} was built by an earlier version and cannot store local features: "
                "build it again"
            )
        self.header = self.header.model_copy(update={"local": True})
        self._remember({_HEADER: self.header.model_dump_json()})

    def local(self, keys: Sequence[int]) -> dict[int, bytes]:
        """Return the encoded local features of entries; entries without them are left out."""
        found: dict[int, bytes] = {}
        if self.header.local:
            for some in in_parts(keys, MESSAGE // _ROW):
                for row in self._rows(some, ["local", LOCAL_SUM]):
                    if row[LOCAL_SUM] != NO_LOCAL:
                        found[row["key"]] = _decoded(row["local"])
                        check_local(self.uri, row["key"], found[row["key"]], row[LOCAL_SUM])
        return found

    def put_local(self, entries: Sequence[Entry], local: Sequence[bytes]) -> None:
        """Write the local features of n entries; each message is written in one step."""
        present = self.get([entry.key for entry in entries])
        same = {
            entry.key: content
            for entry, content in zip(entries, local, strict=True)
            if entry.key in present and present[entry.key].digest == entry.digest
        }
        self._put_again([present[key] for key in same], same)

    def without_local(self) -> list[int]:
        """Return the keys of the entries without local features."""
        sums = self._local_sums()
        return [key for key, value in sums.items() if value == NO_LOCAL]

    def count_local(self) -> tuple[int, int]:
        """Return the number of entries with local features, and the bytes of all of them."""
        sizes = [value >> 32 for value in self._local_sums().values() if value != NO_LOCAL]
        return len(sizes), sum(sizes)

    def search(
        self, queries: ArrayLike, k: int, /, where: Filter | None = None
    ) -> tuple[Float32, Keys]:
        """Find the k nearest entries, best first: [Q, C] -> scores and keys, both [Q, k']."""
        vectors = self.check_queries(queries, k)
        if k > _MOST:
            raise InputError(f"`k` must be {_MOST} or less, the maximum of Milvus, not {k}")
        expression = "" if where is None else self._expression(where)
        count = None
        if where is not None:
            count = self._count(_SESSION, expression)
            if count <= _FEW and self._state.method != EXACT:
                return self._exact(vectors, k, self._walk_keys(expression, count)[0])
        scores = np.full((len(vectors), k), -np.inf, np.float32)
        keys = np.full((len(vectors), k), -1, np.int64)
        width = 0
        step = max(1, min(MESSAGE // (4 * self.header.dim), (1 << 20) // k))
        for start in range(0, len(vectors), step):
            for row, hits in enumerate(
                self._nearest(vectors[start : start + step], k, expression), start
            ):
                found = len(hits.ids)
                scores[row, :found] = hits.distances
                self._check_scores(vectors[row], scores[row, :found])
                keys[row, :found] = hits.ids
                width = max(width, found)
        if width < k:
            width = min(k, max(width, len(self) if count is None else count))
        return scores[:, :width], keys[:, :width]

    def descriptors(self, keys: Keys) -> Iterator[tuple[Keys, Float32]]:
        """Read descriptors by key, one message after the other: keys [n], rows [n, C]."""
        for some in in_parts(keys, max(1, min(_NAMED, MESSAGE // (4 * self.header.dim)))):
            rows = self._rows(some, self._with_sum(["descriptor"], "descriptor_sum"))
            if rows:
                found, sound = _descriptors(rows)
                names = [
                    f"key {row['key']}" for row, good in zip(rows, sound, strict=True) if not good
                ]
                if names:
                    raise damaged_entries(self.uri, names)
                yield np.array([row["key"] for row in rows], np.int64), found

    def examine(self) -> Iterator[list[EntryCheck]]:
        """Read every entry and compare it with its checksums, part by part."""
        fields = [*ENTRY, "thumbnail", "descriptor", *(SUMS if self._has_sums else ())]
        fields += ["local", LOCAL_SUM] if self.header.local else []
        size = 4 * self.header.dim + _ROW * (1 + self.header.local)
        for some in in_parts(self._keys(), max(1, min(_NAMED, MESSAGE // size))):
            rows = self._rows(some, fields)
            small = [(_decoded(row["thumbnail"]), row.get("thumbnail_sum")) for row in rows]
            local = [_local(row) for row in rows]
            sound = _descriptors(rows)[1].tolist() if rows else []
            yield examine_rows([row["key"] for row in rows], rows, sound, small, local)

    def discard(self, places: Sequence[int]) -> None:
        """Remove damaged entries by the `place` of their `EntryCheck`."""
        self.remove(places)

    def add_checksums(self) -> None:
        """Do nothing: fields cannot be added to a collection on every version of Milvus."""

    def tune(self, intent: SearchIntent, on_note: Note = lambda note: None) -> TuningResult:
        """Choose a search method that meets the intent, measure it, and save the choice.

        The methods are exact search, HNSW, and compressed descriptors, in this order; the first
        that is fast enough and fits into memory is used. milvus-lite always searches exactly.
        """
        lite = self._connection.place.file is not None
        self._connection.call("flush", timeout=None)
        keys = self._keys()
        on_note(f"reading {len(keys)} descriptors to measure recall with")
        sample = take_sample(self, keys)
        exact = None
        if lite or EXACT.memory(len(keys), self.header.dim) <= (intent.memory or math.inf):
            exact = self._try(EXACT, intent, sample)
            on_note(f"{exact.method}: {exact.milliseconds:.1f} ms per query")
            limit = intent.milliseconds or _FAST
            if lite or intent.recall == 1 or exact.milliseconds <= limit:
                return exact
        # Standalone servers before 2.5 delete descriptors that are read while an index exists
        # that does not hold them.
        lossy = self._connection.version_numbers >= (2, 5)
        method = fast(len(keys), self.header.dim, intent.memory, lossy)
        if method is not None:
            return self._tune_fast(method, intent, sample, on_note)
        if exact is not None:
            return exact
        raise InputError(
            f"{len(keys)} descriptors of {self.header.dim} dimensions do not fit into "
            f"{intent.memory} bytes: allow more `memory`"
            + ("" if lossy else ", or use Milvus 2.5 or later")
        )

    def facts(self) -> dict[str, Any]:
        """Version of the server, search method and measurements."""
        state = self._state
        return {
            "server": self._connection.version,
            "intent": state.intent.model_dump(mode="json"),
            "method": str(state.method),
            "recall": state.recall,
            "milliseconds": state.milliseconds,
            "memory": state.method.memory(len(self), self.header.dim),
        }

    def refresh(self) -> None:
        """Read the changes of other processes."""
        self.header, self._state = _remembered(self._connection)
        self._wait_for_writes()
        self._walk = _NO_WALK
        self._names = set()

    def versions(self) -> tuple[Keys, Keys]:
        """Keys of all entries, and checksums of what does not depend on a model: [N], [N, 3]."""
        if LOCAL_SUM not in self._fields:
            raise without_checksums(self.uri)
        self._wait_for_writes()
        self._walk = _NO_WALK
        names = ["entry_sum", "thumbnail_sum", LOCAL_SUM]
        rows = [
            [row["key"], *(row[name] for name in names)]
            for some in in_parts(self._keys(), _NAMED)
            for row in self._rows(some, names)
        ]
        found = np.array(rows, np.int64).reshape(-1, 4)
        return found[:, 0], found[:, 1:]

    def record(self) -> GenerationRecord:
        """Read which generations the index has now."""
        return _read_record(self._connection)

    def save_record(self, record: GenerationRecord) -> None:
        """Replace the record of the generations in one step."""
        self._connection.call(
            "alter_collection_properties",
            collection=self._connection.place.collection,
            properties={_RECORD: record.write()},
        )

    def open_generation(self, number: int, *, aside: bool = False) -> "MilvusStore":
        """Open another generation of the index."""
        return self._open(self._connection.place, number, aside)

    def create_generation(self, number: int, header: IndexHeader) -> "MilvusStore":
        """Create an empty generation; it replaces an unfinished one."""
        collection = self._connection.collection_of(number)
        found = _properties(self._connection, collection)
        if found.get(_OWNER) == self._connection.place.collection:
            return self.open_generation(number, aside=True)
        return self._create(self._connection.place, header, number, aside=True)

    def drop_generations(self) -> None:
        """Delete the data of the generations that the record does not name."""
        base, numbers = self._connection.place.collection, self.record().numbers
        named = {self._connection.collection_of(number) for number in numbers}
        for name in self._connection.collections():
            if name in named or not name.startswith(f"{base}_generation_"):
                continue
            if _properties(self._connection, name).get(_OWNER) == base:
                self._connection.call("drop_collection", collection=name)
        if 0 not in numbers:
            # The collection itself stays, because it has the record.
            self._connection.call("load_collection", collection=base, timeout=None)
            self._connection.call("delete", collection=base, filter="key >= 0", timeout=None)
            self._connection.call("release_collection", collection=base)

    @contextmanager
    def upgrading(self) -> Iterator[None]:
        """Do nothing: processes on several machines have no lock in common."""
        yield

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Hold back changes of the entries by all processes, for the moment of a switch.

        A process looks at the record before and after each of its changes. If it finds a pause, it
        waits for the end; if it then finds another generation, it repeats the change there.
        """
        record = self.record()
        if record.current != self.generation:
            raise self.upgraded()
        self._pause = secrets.token_hex(8)
        self.save_record(record.model_copy(update={"paused": self._pause}))
        try:
            yield
        finally:
            now = self.record()
            if now.paused == self._pause:
                self.save_record(now.model_copy(update={"paused": ""}))

    def switch(self, to: int) -> None:
        """Make another generation the current one, in one step; call it within `pausing`."""
        record = self.record()
        if record.paused != self._pause:
            raise InputError(
                f"{self.uri} answers too slowly: another process ended the pause of its changes; "
                "run the command again"
            )
        self.save_record(record.switched(to))

    @contextmanager
    def _change(self) -> Iterator[GenerationRecord | None]:
        """Make a change that no switch to another generation can miss."""
        if self._aside:
            yield None
            return
        yield self._running_record()
        self._running_record()

    def _running_record(self) -> GenerationRecord:
        """The record, after the end of a pause; `IndexUpgradedError` for another generation."""
        started = time.monotonic()
        while True:
            record = self.record()
            if record.current != self.generation:
                raise self.upgraded()
            if not record.paused:
                return record
            if time.monotonic() > started + _PAUSE:
                self.save_record(record.model_copy(update={"paused": ""}))
            time.sleep(_POLL)

    def close(self) -> None:
        """Close the connection; milvus-lite releases its file."""
        self._connection.close()

    def _with_sum(self, fields: list[str], name: str) -> list[str]:
        """Fields to read, with a checksum if the collection stores them."""
        return [*fields, name] if self._has_sums else fields

    def _entry(self, row: Mapping[str, Any]) -> Entry:
        check_entry(self.uri, row)
        return from_row(row)

    def _check_scores(self, query: Float32, scores: Float32) -> None:
        """Refuse scores that unit descriptors cannot have: the server does not check its data."""
        most = _SCORE * float(np.linalg.norm(query))
        if not (np.abs(scores) <= most).all():
            raise damage(self.uri, f"a search returned the score {scores[np.abs(scores).argmax()]}")

    def _wait_for_writes(self) -> None:
        """Wait until reads see the writes of every process.

        Reads of this process wait for its own upserts, but not for its own deletions.
        """
        self._count(_STRONG)

    def _count(self, level: str, expression: str = "") -> int:
        return int(self._query(["count(*)"], level, filter=expression)[0]["count(*)"])

    def _expression(self, where: Filter) -> str:
        """The expression of a filter; an attribute that no entry has is an error."""
        if not self._has_filters:
            raise FilterError(
                "`where`: this index was built by an earlier version of Listwise, which did not "
                "support filters: build it again"
            )
        for name in set(where.names) - self._names:
            if not self._query(["key"], filter=filters.exists(name), limit=1):
                raise unknown_attribute(name, attribute_names(self.attribute_texts()))
            self._names.add(name)
        return filters.to_expression(where)

    def _exact(self, queries: Float32, k: int, among: Keys) -> tuple[Float32, Keys]:
        """Compare queries with all descriptors of these keys: [Q, C] -> both [Q, min(k, n)]."""
        scores = np.zeros((len(queries), 0), np.float32)
        keys = np.zeros((len(queries), 0), np.int64)
        for some, rows in self.descriptors(among):
            new = queries @ rows.T
            all_keys = np.hstack([keys, np.broadcast_to(some, new.shape)])
            all_scores = np.hstack([scores, new])
            scores, keys = best_of(all_scores, all_keys, min(k, all_scores.shape[1]))
        return scores, keys

    def _query(self, fields: list[str], level: str = _SESSION, **which: Any) -> list[Any]:
        """Read fields of the entries that a filter or a list of ids selects."""
        which |= {"output_fields": fields, "consistency_level": level}
        return list(self._connection.call("query", **which))

    def _rows(self, keys: Sequence[int] | Keys, fields: Sequence[str]) -> list[dict[str, Any]]:
        """Read fields of the entries with these keys, in any order."""
        found: list[dict[str, Any]] = []
        for some in in_parts(possible_keys(keys), _NAMED):
            found += self._query(["key", *fields], ids=list(some))
        return found

    def _local_sums(self) -> dict[int, int]:
        """Sizes and checksums of the local features of all entries, by key."""
        found: dict[int, int] = {}
        for some in in_parts(self._keys(), _NAMED):
            found |= {row["key"]: row[LOCAL_SUM] for row in self._rows(some, [LOCAL_SUM])}
        return found

    def _keys(self, count: int | None = None) -> Keys:
        """The `count` smallest keys, or all, sorted."""
        keys, start = self._walk
        if start < _KEYS and (count is None or len(keys) < count):
            self._walk = self._walk_keys("", len(self), self._walk, count)
        return self._walk[0][:count]

    def _walk_keys(
        self,
        expression: str,
        expected: int,
        walk: tuple[Keys, int] = _NO_WALK,
        count: int | None = None,
    ) -> tuple[Keys, int]:
        """Read keys of entries that match an expression: sorted keys, and where the walk ended.

        They are read window by window, because a server returns a limited number of rows. Keys
        are hashes and evenly spread, so the width of a window determines how many it holds.
        """
        keys, start = walk
        width = _KEYS // max(1, expected) * _WINDOW
        matching = f" and ({expression})" if expression else ""
        while start < _KEYS and (count is None or len(keys) < count):
            stop = start + width
            # Milvus does not accept a number as large as the end.
            end = f" and key < {stop}" if stop < _KEYS else ""
            rows = self._query(["key"], filter=f"key >= {start}{end}{matching}", limit=_MOST)
            if len(rows) == _MOST:
                width //= 2
                continue
            found = np.array([row["key"] for row in rows], np.int64)
            keys, start = np.concatenate([keys, np.sort(found)]), stop
        return keys, start

    def _nearest(self, queries: Float32, k: int, expression: str) -> Any:
        params = dict(self._state.method.search)
        if "ef" in params:
            params["ef"] = max(params["ef"], k)
        return self._connection.call(
            "search",
            data=list(queries),
            anns_field="descriptor",
            limit=k,
            filter=expression,
            output_fields=["key"],
            search_params={"metric_type": "IP", "params": params},
            consistency_level=_SESSION,
        )

    def _remember(self, others: Mapping[str, str] | None = None) -> None:
        texts = {**(others or {}), _SEARCH: self._state.model_dump_json()}
        self._connection.call("alter_collection_properties", properties=texts)

    def _build(self) -> None:
        """Build and load the Milvus index of the saved method, if it does not exist yet."""
        method = self._state.method
        wanted = {"index_type": method.type, **method.build}
        present = self._connection.call("list_indexes", field_name="descriptor")
        if present:
            built = self._connection.call("describe_index", index_name="descriptor")
            if any(str(built.get(name)) != str(value) for name, value in wanted.items()):
                self._connection.call("release_collection")
                self._connection.call("drop_index", index_name="descriptor")
                present = []
        if not present:
            from pymilvus.milvus_client.index import IndexParams

            params = IndexParams()
            params.add_index(
                "descriptor",
                index_name="descriptor",
                metric_type="IP",
                index_type=method.type,
                params=method.build,
            )
            self._connection.call("create_index", index_params=params, timeout=None)
        if self._connection.call("get_load_state")["state"].name != "Loaded":
            self._connection.call("load_collection", timeout=None)

    def _tune_fast(
        self, method: Method, intent: SearchIntent, sample: ExactNeighbors, on_note: Note
    ) -> TuningResult:
        """Increase the search effort until recall is reached, stops growing, or is too slow."""
        on_note(f"building {method.type}")
        easier, best = method, None
        for harder in method.efforts():
            tuned = self._try(harder, intent, sample)
            on_note(
                f"{tuned.method}: recall {tuned.recall:.3f}, {tuned.milliseconds:.1f} ms per query"
            )
            over = intent.recall is None and tuned.milliseconds > (intent.milliseconds or math.inf)
            if best is not None and (over or tuned.recall < best.recall + _GAIN):
                return self._try(easier, intent, sample)
            easier, best = harder, tuned
            if over or tuned.recall >= (intent.recall or _RECALL):
                break
        assert best is not None
        return best

    def _try(self, method: Method, intent: SearchIntent, sample: ExactNeighbors) -> TuningResult:
        """Use a method from now on, and measure it."""
        # Saved first, so that a process that opens the index meanwhile builds the same.
        self._state = _State(method=method, intent=intent)
        self._remember()
        self._build()
        self._wait_for_writes()
        recall, milliseconds = measure(self.search, sample)
        self._state = _State(method=method, intent=intent, recall=recall, milliseconds=milliseconds)
        self._remember()
        memory = method.memory(len(self), self.header.dim)
        return TuningResult(str(method), recall, milliseconds, memory)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text)
    except ValueError:
        return b"not base64"  # no checksum matches it


def _local(row: Mapping[str, Any]) -> tuple[bytes, int | None]:
    """The local features of a row with their checksum, None for a row without them."""
    stored = row.get(LOCAL_SUM, NO_LOCAL)
    return _decoded(row.get("local", "")), None if stored == NO_LOCAL else stored


def _descriptors(rows: Sequence[Mapping[str, Any]]) -> tuple[Float32, NDArray[np.bool_]]:
    """Descriptors of rows, and which are sound: n rows -> [n, C], bool [n]."""
    found = np.array([row["descriptor"] for row in rows], np.float32)
    keys = np.array([row["key"] for row in rows], np.int64)
    return found, sound_descriptors(keys, found, [row.get("descriptor_sum") for row in rows])


def _properties(connection: Connection, collection: str = "") -> dict[str, str]:
    """The properties of a collection; empty if it does not exist."""
    if not connection.call("has_collection", collection=collection):
        return {}
    found = connection.call("describe_collection", collection=collection)
    return dict(found.get("properties") or {})


def _read_record(connection: Connection) -> GenerationRecord:
    """Read the record of the generations of an index."""
    where = connection.place
    found = _properties(connection, where.collection).get(_RECORD)
    if found is None:
        return GenerationRecord()
    record = GenerationRecord.read(found)
    if record is None:
        raise InputError(f"the record of the generations of {where.shown} is damaged")
    return record


def _make_place(connection: Connection) -> None:
    """Drop the collection of an unfinished index."""
    if not connection.call("has_collection"):
        return
    found = connection.call("describe_collection")
    if _HEADER in (found.get("properties") or {}):
        raise InputError(f"an index at {connection.place.shown} exists already")
    if {field["name"] for field in found["fields"]} not in (FIELDS, OLD_FIELDS, OLDEST_FIELDS):
        raise InputError(
            f"{connection.place.shown} is a collection of another program: give another name"
        )
    connection.call("drop_collection")


def _remembered(connection: Connection) -> tuple[IndexHeader, _State]:
    where, found = connection.place.shown, _properties(connection)
    if _HEADER not in found or _SEARCH not in found:
        raise InputError(f"{where} is not an index, or a damaged one: build it again")
    header = IndexHeader.parse(found[_HEADER], where, "build the index again")
    try:
        return header, _State.model_validate_json(found[_SEARCH])
    except ValidationError as error:
        raise InputError(f"{where} is damaged: build the index again") from error
