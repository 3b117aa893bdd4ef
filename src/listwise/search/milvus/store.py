"""An index in Milvus: a server, a cluster, or a file of milvus-lite."""

import base64
import json
import math
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

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
    with_attribute,
)
from listwise.search.exact import ExactNeighbors, best_of
from listwise.search.filters import Filter, attribute_names, unknown_attribute
from listwise.search.milvus.connection import KEYS, MOST, Connection, Place, parse_place
from listwise.search.milvus.marks import MarkRows
from listwise.search.milvus.rows import (
    FIELDS,
    MESSAGE,
    as_rows,
    exists,
    fields,
    to_expression,
)
from listwise.search.store import (
    GenerationRecord,
    IndexHeader,
    Note,
    Rows,
    SearchIntent,
    Store,
    TuningResult,
    Values,
)

_HEADER, _SEARCH = "listwise.header", "listwise.search"  # properties of the collection
_RECORD = "listwise.generations"  # property of the collection of generation 0
_OWNER = "listwise.generation_of"  # property of the collection of another generation
_NAMED = 1000  # maximum keys or digests per request
_FEW = 1000  # entries that match a filter and are compared exactly
_ROW = 128 << 10  # bytes of texts that an entry rarely exceeds; servers accept 64 MiB
_SAMPLE = 64  # queries to measure recall with
_WINDOW = 4096  # expected keys per step when all keys are read
_SESSION = "Session"  # a read sees the writes of this process
_STRONG = "Strong"  # a read sees the writes of all processes

_FAST = 200.0  # milliseconds up to which exact search is used by default
_RECALL = 0.99
_SCORE = 1.5  # times the norm of the query: no search of unit descriptors scores more
_GAIN = 0.001  # minimum gain of recall from twice the effort
_SEGMENT = 512 << 20  # bytes of descriptors in a segment, for which a server builds one index
_HARDEST = 2048  # maximum number of HNSW candidates
_PAUSE = 60.0  # seconds after which a pause is one of a killed process
_POLL = 0.1  # seconds between two looks at the record during a pause


class Method(BaseModel):
    """A type of Milvus index with its build and search parameters."""

    model_config = ConfigDict(frozen=True)

    type: Literal["FLAT", "HNSW", "IVF_SQ8", "IVF_PQ"] = "FLAT"
    build: dict[str, int] = {}
    search: dict[str, int] = {}

    def __str__(self) -> str:
        values = {**self.build, **self.search}.items()
        words = [self.type, *(f"{name} {value}" for name, value in values)]
        return "exact" if self.type == "FLAT" else ", ".join(words)

    def memory(self, count: int, dim: int) -> int:
        """Memory of the index of `count` descriptors, in bytes."""
        row = {
            "FLAT": 4 * dim,
            "HNSW": 4 * dim + 8 * self.build.get("M", 0) + 16,
            "IVF_SQ8": dim + 8,
            "IVF_PQ": self.build.get("m", 0) + 8,
        }
        return count * row[self.type]

    def efforts(self) -> Iterator["Method"]:
        """The same index with increasing search effort."""
        most = self.build.get("nlist", _HARDEST)
        for name, effort in self.search.items():
            while effort < 2 * most:
                yield self.model_copy(update={"search": {name: min(effort, most)}})
                effort *= 2


EXACT = Method()


def fast(count: int, dim: int, memory: int | None, lossy: bool) -> Method | None:
    """The most exact approximate method that fits into `memory` bytes; None if none fits.

    With `lossy`, methods that store compressed descriptors are allowed.
    """
    # A server builds one index per segment.
    lists = max(1, round(4 * min(count, _SEGMENT // (4 * dim)) ** 0.5))
    probed = {"nprobe": min(8, lists)}
    methods = [Method(type="HNSW", build={"M": 16, "efConstruction": 200}, search={"ef": 32})]
    if lossy:
        methods.append(Method(type="IVF_SQ8", build={"nlist": lists}, search=probed))
        methods += [
            Method(
                type="IVF_PQ", build={"nlist": lists, "m": dim // part, "nbits": 8}, search=probed
            )
            for part in (2, 4, 8, 16, 32)
            if dim % part == 0
        ]
    fitting = (m for m in methods if memory is None or m.memory(count, dim) <= memory)
    return next(fitting, None)


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
        place: Place,
        generation: int,
        aside: bool = False,
        new: IndexHeader | None = None,
    ) -> None:
        self.uri = place.shown
        self.generation = generation
        self._pause = ""  # the mark of this process in the record
        self._aside = aside  # may be changed although it is not the current generation
        self._names: set[str] = set()  # attributes that entries are known to have
        self._base = Connection(place)
        self._connection = self._base.generation(generation)
        self._mark_rows = MarkRows(self._base)
        try:
            if new is not None:
                self._create(new)
            self.header, self._state = _remembered(self._connection)
            self._build()
            self._wait_for_writes()
        except BaseException:
            self._base.close()
            raise
        # Entries per message.
        self._together = max(1, MESSAGE // (4 * self.header.dim + _ROW))

    @staticmethod
    def exists(place: str) -> bool:
        """Whether an index exists; an unfinished one does not count."""
        where = parse_place(place)
        if where.file is not None and not where.file.is_dir():
            return False
        with closing(Connection(where)) as connection:
            return _HEADER in connection.properties()

    @classmethod
    def open(cls, place: str) -> "MilvusStore":
        """Open an index that exists."""
        where = parse_place(place)
        with closing(Connection(where)) as connection:
            current = _read_record(connection).current
        return cls(where, current)

    @classmethod
    def create(cls, place: str, header: IndexHeader) -> "MilvusStore":
        """Create an empty index; it replaces an unfinished one."""
        return cls(parse_place(place), 0, new=header)

    def _create(self, header: IndexHeader) -> None:
        """Create the collection of this generation."""
        _make_place(self._connection)
        self._connection.create(fields(header.dim))
        self._state = _State()
        self._build()
        owner = {_OWNER: self._base.collection} if self.generation else {}
        # Written last: a collection without a header is not an index.
        self._remember({_HEADER: header.model_dump_json(), **owner})

    def __len__(self) -> int:
        return self._count(_SESSION)

    def put(self, new: NewEntries) -> None:
        """Write entries; they replace entries with the same keys.

        Each message of entries is written in one step.
        """
        if not new.entries:
            return
        self.check_new(new)
        rows = {row["key"]: row for row in as_rows(new)}  # the last of those that share a key
        with self._change():
            for some in in_parts([*rows.values()], self._together):
                self._connection.call("upsert", data=some)

    def remove(self, keys: Sequence[int]) -> int:
        """Remove entries and return their number."""
        removed = 0
        with self._change() as record:
            for some in in_parts(sorted({int(key) for key in keys}), MOST):
                present = [row["key"] for row in self._all([], possible_keys(some))]
                if present and record is not None and record.previous is not None:
                    # First from the generation that a rollback would return to: after a kill in
                    # between, the entries are still there to be removed again.
                    self._base.generation(record.previous).call("delete", ids=present)
                if present:
                    self._connection.call("delete", ids=present)
                removed += len(present)
        if removed:
            self._wait_for_writes()
        self._names = set()
        return removed

    def set_attribute(self, keys: Sequence[int], name: str, value: str) -> int:
        """Set an attribute of entries; each message of entries is written in one step."""
        changed = 0
        for some in in_parts(possible_keys(keys), self._together):
            entries = [with_attribute(entry, name, value) for entry in self.get(some).values()]
            self.put(self._as_stored(entries))
            changed += len(entries)
        return changed

    def _as_stored(self, entries: Sequence[Entry]) -> NewEntries:
        """Entries with the descriptors, thumbnails and local features that they have already."""
        keys = [entry.key for entry in entries]
        return self.with_content(keys, entries, self.vectors(np.array(keys, np.int64)))

    @property
    def mark_log(self) -> MarkRows:
        """The log of the marks, which all generations share."""
        return self._mark_rows

    def keys(self, where: Filter | None = None, most: int | None = None) -> Keys:
        """Return the keys of the entries that match a filter, or of all, sorted."""
        expression = "" if where is None else self._expression(where)
        found = [np.zeros(0, np.int64)]
        left = math.inf if most is None else most
        width = KEYS // max(1, self._count(_SESSION, expression)) * _WINDOW
        for rows in self._connection.walk(["key"], expression, width):
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
        return self._count(_SESSION, "" if where is None else self._expression(where))

    def store_local(self) -> None:
        """Store local features of photos from now on; the header says so."""
        if self.header.local:
            return
        self.header = self.header.model_copy(update={"local": True})
        self._remember({_HEADER: self.header.model_dump_json()})

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
        vectors = self.check_queries(queries, k)
        if k > MOST:
            raise InputError(f"`k` must be {MOST} or less, the maximum of Milvus, not {k}")
        expression = "" if where is None else self._expression(where)
        count = None
        if where is not None:
            count = self._count(_SESSION, expression)
            if count <= _FEW and self._state.method != EXACT:
                return self._exact(vectors, k, self.keys(where))
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
        for rows in self._rows(["descriptor", "descriptor_sum"], keys.tolist()):
            if rows:
                found_keys, found, sound = _descriptors(rows)
                if not sound.all():
                    names = [f"key {key}" for key in found_keys[~sound]]
                    raise damaged_entries(self.uri, names)
                yield found_keys, found

    def examine(self) -> Iterator[list[EntryCheck]]:
        """Read every entry and compare it with its checksums, part by part."""
        for rows in self._rows([*ENTRY, "thumbnail", "local", "descriptor", *SUMS]):
            sound = _descriptors(rows)[2].tolist() if rows else []
            yield [
                examine_row(row["key"], row, good) for row, good in zip(rows, sound, strict=True)
            ]

    def discard(self, places: Sequence[int]) -> None:
        """Remove damaged entries by the `place` of their `EntryCheck`."""
        self.remove(places)

    def tune(self, intent: SearchIntent, on_note: Note = lambda note: None) -> TuningResult:
        """Choose a search method that meets the intent, measure it, and save the choice.

        The methods are exact search, HNSW, and compressed descriptors, in this order; the first
        that is fast enough and fits into memory is used. milvus-lite always searches exactly.
        """
        lite = self._base.place.file is not None
        self._connection.call("flush", timeout=None)
        keys = self.keys()
        on_note(f"reading {len(keys)} descriptors to measure recall with")
        some = keys[:_SAMPLE]
        sample = ExactNeighbors(some, self.vectors(some), partial(self._exact, among=keys))
        exact = None
        if lite or EXACT.memory(len(keys), self.header.dim) <= (intent.memory or math.inf):
            exact = self._try(EXACT, intent, sample)
            on_note(f"{exact.method}: {exact.milliseconds:.1f} ms per query")
            limit = intent.milliseconds or _FAST
            if lite or intent.recall == 1 or exact.milliseconds <= limit:
                return exact
        # Standalone servers before 2.5 delete descriptors that are read while an index exists
        # that does not hold them.
        lossy = tuple(map(int, re.findall(r"\d+", self._version())[:2])) >= (2, 5)
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
            "server": self._version(),
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
        self._names = set()

    def versions(self) -> tuple[Keys, Keys]:
        """Keys of all entries, and checksums of what does not depend on a model: [N], [N, 3]."""
        self._wait_for_writes()
        return super().versions()

    def record(self) -> GenerationRecord:
        """Read which generations the index has now."""
        return _read_record(self._base)

    def save_record(self, record: GenerationRecord) -> None:
        """Replace the record of the generations in one step."""
        properties = {_RECORD: record.model_dump_json()}
        self._base.call("alter_collection_properties", properties=properties)

    def open_generation(self, number: int, *, aside: bool = False) -> "MilvusStore":
        """Open another generation of the index."""
        return MilvusStore(self._base.place, number, aside)

    def create_generation(self, number: int, header: IndexHeader) -> "MilvusStore":
        """Create an empty generation; it replaces an unfinished one."""
        made = self._base.generation(number).properties().get(_OWNER)
        new = None if made == self._base.collection else header
        return MilvusStore(self._base.place, number, aside=True, new=new)

    def drop_generations(self) -> None:
        """Delete the data of the generations that the record does not name."""
        base, numbers = self._base, self.record().numbers
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
        self._base.close()

    def _check_scores(self, query: Float32, scores: Float32) -> None:
        """Refuse scores that unit descriptors cannot have: the server does not check its data."""
        most = _SCORE * float(np.linalg.norm(query))
        if not (np.abs(scores) <= most).all():
            raise damage(self.uri, f"a search returned the score {scores[np.abs(scores).argmax()]}")

    def _version(self) -> str:
        return str(self._connection.call("get_server_version"))

    def _wait_for_writes(self) -> None:
        """Wait until reads see the writes of every process.

        Reads of this process wait for its own upserts, but not for its own deletions.
        """
        self._count(_STRONG)

    def _count(self, level: str, expression: str = "") -> int:
        return int(self._query(["count(*)"], level, filter=expression)[0]["count(*)"])

    def _expression(self, where: Filter) -> str:
        """The expression of a filter; an attribute that no entry has is an error."""
        for name in set(where.names) - self._names:
            if not self._query(["key"], filter=exists(name), limit=1):
                raise unknown_attribute(name, attribute_names(self.attribute_texts()))
            self._names.add(name)
        return to_expression(where)

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

    def _rows(self, columns: Sequence[str], values: Values = None, by: str = "key") -> Rows:
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
            rows = self._query(["key", *columns], **which)
            for name in contents:
                for row in rows:
                    row[name] = _decoded(row[name])
            yield rows

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
        self._connection.load("descriptor", method.type, method.build)

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
        recall, milliseconds = sample.measure(self.search)
        self._state = _State(method=method, intent=intent, recall=recall, milliseconds=milliseconds)
        self._remember()
        memory = method.memory(len(self), self.header.dim)
        return TuningResult(str(method), recall, milliseconds, memory)


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


def _read_record(connection: Connection) -> GenerationRecord:
    """Read the record of the generations of an index."""
    found = connection.properties().get(_RECORD)
    return GenerationRecord() if found is None else GenerationRecord.model_validate_json(found)


def _make_place(connection: Connection) -> None:
    """Drop the collection of an unfinished index."""
    if not connection.call("has_collection"):
        return
    found = connection.call("describe_collection")
    if _HEADER in (found.get("properties") or {}):
        raise InputError(f"an index at {connection.place.shown} exists already")
    if {field["name"] for field in found["fields"]} != FIELDS:
        raise InputError(
            f"{connection.place.shown} is a collection of another program: give another name"
        )
    connection.call("drop_collection")


def _remembered(connection: Connection) -> tuple[IndexHeader, _State]:
    where, found = connection.place.shown, connection.properties()
    if _HEADER not in found or _SEARCH not in found:
        raise InputError(f"{where} is not an index, or a damaged one: build it again")
    header = IndexHeader.parse(found[_HEADER], where, "build the index again")
    try:
        return header, _State.model_validate_json(found[_SEARCH])
    except ValidationError as error:
        raise InputError(f"{where} is damaged: build the index again") from error
