"""An index in Milvus: a server, a cluster, or a file of milvus-lite.

Each generation is a collection. The record of the generations is a property of the first one.
"""

import base64
import json
import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from listwise.errors import InputError
from listwise.search.entries import (
    ENTRY,
    SUMS,
    Entry,
    EntryCheck,
    Float32,
    Keys,
    NewEntries,
    damage,
    damaged_entries,
    descriptor_sums,
    examine_row,
    in_parts,
    possible_keys,
    with_attributes,
)
from listwise.search.filters import Filter, unknown_attribute
from listwise.search.mark_log import MilvusMarks
from listwise.search.milvus.connection import (
    KEYS,
    MOST,
    SESSION,
    Connection,
    Place,
    parse_place,
)
from listwise.search.milvus.method import EXACT, SEARCH, MilvusMethod, MilvusState, search_among
from listwise.search.milvus.rows import FIELDS, MESSAGE, as_rows, exists, fields, to_expression
from listwise.search.store import (
    GenerationRecord,
    Generations,
    IndexHeader,
    IndexUpgradedError,
    Rows,
    Store,
    Values,
    check_new,
    check_queries,
    with_contents,
)

HEADER = "listwise.header"  # property of the collection
_NAMED = 1000  # maximum keys or digests per request
_FEW = 1000  # entries that match a filter and are compared exactly
_ROW = 128 << 10  # bytes of texts that an entry rarely exceeds; servers accept 64 MiB
_WINDOW = 4096  # expected keys per step when all keys are read
_SCORE = 1.5  # times the norm of the query: no search of unit descriptors scores more
_RECORD = "listwise.generations"  # property of the collection of generation 0
_OWNER = "listwise.generation_of"  # property of the collection of another generation
_PAUSE = 60.0  # seconds after which a pause is one of a killed process
_POLL = 0.1  # seconds between two looks at the record during a pause


class MilvusStore(Store):
    """A store in a collection of Milvus. Several threads and processes may use it.

    A process sees its own changes immediately, and the changes of others shortly after, or
    immediately after `refresh`.
    """

    engine = "milvus"

    generations: "MilvusGenerations"
    method: MilvusMethod

    def __init__(self, generations: "MilvusGenerations") -> None:
        self.uri, self.generations = generations.uri, generations
        self.connection = generations.base.generation(generations.number)
        self.mark_log = MilvusMarks(generations.base)
        self._names: set[str] = set()  # attributes that entries are known to have
        self.header = self._read_header()
        self.method = MilvusMethod(self, self.connection)
        self.connection.wait_for_writes()
        # Entries per message.
        self._together = max(1, MESSAGE // (4 * self.header.dim + _ROW))

    def __len__(self) -> int:
        return self.connection.count()

    def put(self, new: NewEntries) -> None:
        """Write entries; they replace entries with the same keys.

        Each message of entries is written in one step.
        """
        if not new.entries:
            return
        rows = list(as_rows(check_new(self, new)))
        with self.generations.changing():
            for some in in_parts(rows, self._together):
                self.connection.call("upsert", data=some)

    def remove(self, keys: Sequence[int]) -> int:
        """Remove entries and return their number."""
        removed = 0
        with self.generations.changing() as record:
            for some in in_parts(sorted({int(key) for key in keys}), MOST):
                parts = self.rows([], possible_keys(some))
                present = [row["key"] for part in parts for row in part]
                if present and record is not None and record.previous is not None:
                    # First from the generation that a rollback would return to: after a kill in
                    # between, the entries are still there to be removed again.
                    earlier = self.generations.base.generation(record.previous)
                    earlier.call("delete", ids=present)
                if present:
                    self.connection.call("delete", ids=present)
                removed += len(present)
        if removed:
            self.connection.wait_for_writes()
        self._names = set()
        return removed

    def set_attributes(self, keys: Sequence[int], values: Mapping[str, str]) -> int:
        """Set attributes of entries; each message of entries is written in one step."""
        changed = 0
        for some in in_parts(possible_keys(keys), self._together):
            entries = [with_attributes(entry, values) for entry in self.get(some).values()]
            self.put(self._as_stored(entries))
            changed += len(entries)
        return changed

    def _as_stored(self, entries: Sequence[Entry]) -> NewEntries:
        """Entries with the descriptors, thumbnails and local features that they have already."""
        keys = [entry.key for entry in entries]
        return with_contents(self, keys, entries, self.vectors(keys))

    def keys(self, where: Filter | None = None, most: int | None = None) -> Keys:
        """Return the keys of the entries that match a filter, or of all, sorted."""
        expression = "" if where is None else self._expression(where)
        found = [np.zeros(0, np.int64)]
        left = math.inf if most is None else most
        width = KEYS // max(1, self.connection.count(expression)) * _WINDOW
        for rows in self.connection.walk(["key"], expression, width):
            found.append(np.array([row["key"] for row in rows], np.int64))
            left -= len(rows)
            if left <= 0:
                break
        return np.concatenate(found)[:most]

    def check_filter(self, where: Filter) -> None:
        """Refuse a filter with an attribute that no entry has."""
        self._expression(where)

    def count(self, where: Filter | None = None) -> int:
        """The number of entries that match a filter, or of all."""
        return self.connection.count("" if where is None else self._expression(where))

    def change_header(self, **values: Any) -> None:
        """Set fields of the header in one step."""
        if self.header.model_copy(update=values) != self.header:
            self.header = header = self._read_header().model_copy(update=values)
            self.connection.set_properties({HEADER: header.model_dump_json()})

    def put_local(self, entries: Sequence[Entry], local: Sequence[bytes]) -> None:
        """Write the local features of n entries; each message is written in one step."""
        present = self.get([entry.key for entry in entries])
        same = {
            entry.key: content
            for entry, content in zip(entries, local, strict=True)
            if entry.key in present and present[entry.key].digest == entry.digest
        }
        stored = self._as_stored([present[key] for key in same])
        self.put(replace(stored, local=list(same.values())))

    def search(
        self, queries: ArrayLike, k: int, /, where: Filter | None = None
    ) -> tuple[Float32, Keys]:
        """Find the k nearest entries, best first: [Q, C] -> scores and keys, both [Q, k']."""
        vectors = check_queries(self, queries, k)
        if k > MOST:
            raise InputError(f"`k` must be {MOST} or less, the maximum of Milvus, not {k}")
        expression = "" if where is None else self._expression(where)
        count = None
        if where is not None:
            count = self.connection.count(expression)
            if count <= _FEW and self.method.state.index != EXACT:
                return search_among(self, vectors, k, self.keys(where))
        scores = np.full((len(vectors), k), -np.inf, np.float32)
        keys = np.full((len(vectors), k), -1, np.int64)
        step = max(1, min(MESSAGE // (4 * self.header.dim), (1 << 20) // k))
        parts = (self._nearest(part, k, expression) for part in in_parts(vectors, step))
        for row, hits in enumerate(chain.from_iterable(parts)):
            found = len(hits.ids)
            scores[row, :found], keys[row, :found] = hits.distances, hits.ids
            self._check_scores(vectors[row], scores[row, :found])
        width = int((keys >= 0).sum(axis=1).max(initial=0))
        if width < k:
            width = min(k, max(width, len(self) if count is None else count))
        return scores[:, :width], keys[:, :width]

    def descriptors(self, keys: Keys) -> Iterator[tuple[Keys, Float32]]:
        """Read descriptors by key, one message after the other: keys [n], rows [n, C]."""
        for rows in self.rows(["descriptor", "descriptor_sum"], keys.tolist()):
            if rows:
                found_keys, found, sound = _descriptors(rows)
                if not sound.all():
                    names = [f"key {key}" for key in found_keys[~sound]]
                    raise damaged_entries(self.uri, names)
                yield found_keys, found

    def examine(self) -> Iterator[list[EntryCheck]]:
        """Read every entry and compare it with its checksums, part by part."""
        for rows in self.rows([*ENTRY, "thumbnail", "local", "descriptor", *SUMS]):
            sound = _descriptors(rows)[2].tolist() if rows else []
            yield [
                examine_row(row["key"], row, good) for row, good in zip(rows, sound, strict=True)
            ]

    def discard(self, places: Sequence[int]) -> None:
        """Remove damaged entries by the `place` of their `EntryCheck`."""
        self.remove(places)

    def refresh(self) -> None:
        """Read the changes of other processes."""
        self.header = self._read_header()
        self.method.refresh()
        self.connection.wait_for_writes()
        self._names = set()

    def versions(self) -> dict[int, int]:
        """A number for each entry by key, which changes with what does not depend on a model."""
        self.connection.wait_for_writes()
        return super().versions()

    def close(self) -> None:
        """Close the connection; milvus-lite releases its file."""
        self.generations.close()

    def _read_header(self) -> IndexHeader:
        found = self.connection.properties().get(HEADER)
        if found is None:
            raise InputError(f"{self.uri} is not an index, or a damaged one: build it again")
        return IndexHeader.parse(found, self.uri, "build the index again")

    def _check_scores(self, query: Float32, scores: Float32) -> None:
        """Refuse scores that unit descriptors cannot have: the server does not check its data."""
        most = _SCORE * float(np.linalg.norm(query))
        if not (np.abs(scores) <= most).all():
            raise damage(self.uri, f"a search returned the score {scores[np.abs(scores).argmax()]}")

    def _expression(self, where: Filter) -> str:
        """The expression of a filter; an attribute that no entry has is an error."""
        for name in set(where.names) - self._names:
            if not self.connection.query(["key"], filter=exists(name), limit=1):
                raise unknown_attribute(
                    name, {own for each, _ in self.attributes() for own in each}
                )
            self._names.add(name)
        return to_expression(where)

    def rows(self, columns: Sequence[str], values: Values = None, by: str = "key") -> Rows:
        """Read the key and other columns of entries, part by part, in order of their keys."""
        contents = {"thumbnail", "local"}.intersection(columns)
        size = 1 + 4 * self.header.dim * ("descriptor" in columns) + _ROW * bool(contents)
        keys = self.keys().tolist() if values is None else values
        for some in in_parts(keys, max(1, min(_NAMED, MESSAGE // size))):
            which: dict[str, Any] = {"ids": some}
            if by == "digest":
                which = {
                    "filter": f"digest in {json.dumps(some, ensure_ascii=False)}",
                    "limit": MOST,
                }
            rows = self.connection.query(["key", *columns], **which)
            for name in contents:
                for row in rows:
                    row[name] = _decoded(row[name])
            yield rows

    def _nearest(self, queries: Float32, k: int, expression: str) -> Any:
        params = dict(self.method.state.index.search)
        if "ef" in params:
            params["ef"] = max(params["ef"], k)
        return self.connection.call(
            "search",
            data=list(queries),
            anns_field="descriptor",
            limit=k,
            filter=expression,
            output_fields=["key"],
            search_params={"metric_type": "IP", "params": params},
            consistency_level=SESSION,
        )


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text)
    except ValueError:
        return b"not base64"  # no checksum matches it


def _descriptors(rows: Sequence[Mapping[str, Any]]) -> tuple[Keys, Float32, NDArray[np.bool_]]:
    """Keys and descriptors of n rows, and which are sound: [n], [n, C], bool [n]."""
    keys = np.array([row["key"] for row in rows], np.int64)
    found = np.array([row["descriptor"] for row in rows], np.float32)
    return keys, found, descriptor_sums(keys, found) == [row["descriptor_sum"] for row in rows]


class MilvusGenerations(Generations):
    """The generations of an index in Milvus, for the store of one of them.

    Attributes:
        base: the connection to the collection of generation 0, which has the record.
    """

    def __init__(self, place: Place, number: int, aside: bool = False) -> None:
        self.uri, self.number, self.aside = place.shown, number, aside
        self.base = Connection(place)
        self._pause = ""  # the mark of this process in the record

    @staticmethod
    def exists(place: str) -> bool:
        """Whether an index exists; an unfinished one does not count."""
        where = parse_place(place)
        if where.file is not None and not where.file.is_dir():
            return False
        with closing(Connection(where)) as connection:
            return HEADER in connection.properties()

    @staticmethod
    def open_index(place: str) -> MilvusStore:
        """Open the current generation of an index that exists."""
        with closing(MilvusGenerations(parse_place(place), 0)) as generations:
            return generations.open(generations.record().current)

    @staticmethod
    def create_index(place: str, header: IndexHeader) -> MilvusStore:
        """Create an empty index; it replaces an unfinished one."""
        with closing(MilvusGenerations(parse_place(place), 0)) as generations:
            return generations.create(0, header, aside=False)

    def record(self) -> GenerationRecord:
        """Read which generations the index has now."""
        found = self.base.properties().get(_RECORD)
        return GenerationRecord() if found is None else GenerationRecord.model_validate_json(found)

    def save_record(self, record: GenerationRecord) -> None:
        """Replace the record in one step."""
        self.base.set_properties({_RECORD: record.model_dump_json()})

    def open(self, number: int, *, aside: bool = False) -> MilvusStore:
        """Open another generation of the index."""
        generations = MilvusGenerations(self.base.place, number, aside)
        try:
            return MilvusStore(generations)
        except BaseException:
            generations.close()
            raise

    def create(self, number: int, header: IndexHeader, *, aside: bool = True) -> MilvusStore:
        """Create an empty generation and open it; it replaces an unfinished one."""
        connection = self.base.generation(number)
        if not number or connection.properties().get(_OWNER) != self.base.collection:
            _make_place(connection)
            connection.create(fields(header.dim))
            connection.load("descriptor", EXACT.type, EXACT.build)
            owner = {_OWNER: self.base.collection} if number else {}
            # Written last: a collection without a header is not an index.
            state = MilvusState().model_dump_json()
            connection.set_properties({HEADER: header.model_dump_json(), SEARCH: state, **owner})
        return self.open(number, aside=aside)

    def drop_unused(self) -> None:
        """Delete the data of the generations that the record does not name."""
        base, numbers = self.base, self.record().numbers
        kept = {base.generation(number).collection for number in numbers}
        for name in base.call("list_collections"):
            if name not in kept and name.startswith(f"{base.collection}_generation_"):
                other = base.beside(name.removeprefix(base.collection))
                if other.properties().get(_OWNER) == base.collection:
                    other.call("drop_collection")
        if 0 not in numbers:
            # The collection itself stays, because it has the record.
            base.call("load_collection", timeout=None)
            base.call("delete", filter="key >= 0", timeout=None)
            base.call("release_collection")

    @contextmanager
    def upgrading(self) -> Iterator[None]:
        """Do not lock: processes on several machines have no lock in common."""
        self.check_current()
        yield

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Hold back changes of the entries by all processes, for the moment of a switch.

        A process looks at the record before and after each of its changes. If it finds a pause, it
        waits for the end; if it then finds another generation, it repeats the change there.
        """
        record = self._current_record()
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
    def changing(self) -> Iterator[GenerationRecord | None]:
        """Make a change that no switch to another generation can miss."""
        if self.aside:
            yield None
            return
        yield self._running_record()
        self._running_record()

    def _running_record(self) -> GenerationRecord:
        """The record, after the end of a pause; `IndexUpgradedError` for another generation."""
        started = time.monotonic()
        while True:
            record = self._current_record()
            if not record.paused:
                return record
            if time.monotonic() > started + _PAUSE:
                self.save_record(record.model_copy(update={"paused": ""}))
            time.sleep(_POLL)

    def _current_record(self) -> GenerationRecord:
        """The record; `IndexUpgradedError` if another generation is the current one."""
        record = self.record()
        if record.current != self.number:
            raise IndexUpgradedError(self.uri)
        return record

    def close(self) -> None:
        """Close the connection; milvus-lite releases its file."""
        self.base.close()


def _make_place(connection: Connection) -> None:
    """Drop the collection of an unfinished index."""
    if not connection.call("has_collection"):
        return
    found = connection.call("describe_collection")
    if HEADER in (found.get("properties") or {}):
        raise InputError(f"an index at {connection.place.shown} exists already")
    if {field["name"] for field in found["fields"]} != FIELDS:
        raise InputError(
            f"{connection.place.shown} is a collection of another program: give another name"
        )
    connection.call("drop_collection")
