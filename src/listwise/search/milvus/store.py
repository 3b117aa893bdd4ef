"""An index in Milvus: a server, a cluster, or a file of milvus-lite."""

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
    with_attribute,
)
from listwise.search.exact import best_of
from listwise.search.filters import Filter, unknown_attribute
from listwise.search.milvus.connection import KEYS, MOST
from listwise.search.milvus.marks import MarkRows
from listwise.search.milvus.rows import MESSAGE, as_rows, exists, to_expression
from listwise.search.milvus.tuning import EXACT, MilvusMethod
from listwise.search.store import (
    IndexHeader,
    Rows,
    Store,
    Values,
    check_new,
    check_queries,
    with_contents,
)

if TYPE_CHECKING:
    from listwise.search.milvus.generations import MilvusGenerations

HEADER = "listwise.header"  # property of the collection
_NAMED = 1000  # maximum keys or digests per request
_FEW = 1000  # entries that match a filter and are compared exactly
_ROW = 128 << 10  # bytes of texts that an entry rarely exceeds; servers accept 64 MiB
_WINDOW = 4096  # expected keys per step when all keys are read
_SESSION = "Session"  # a read sees the writes of this process
_STRONG = "Strong"  # a read sees the writes of all processes
_SCORE = 1.5  # times the norm of the query: no search of unit descriptors scores more


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
        self.mark_log = MarkRows(generations.base)
        self._names: set[str] = set()  # attributes that entries are known to have
        self.header = self._read_header()
        self.method = MilvusMethod(self)
        self.wait_for_writes()
        # Entries per message.
        self._together = max(1, MESSAGE // (4 * self.header.dim + _ROW))

    def __len__(self) -> int:
        return self._count(_SESSION)

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
            self.wait_for_writes()
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
        return with_contents(self, keys, entries, self.vectors(keys))

    def keys(self, where: Filter | None = None, most: int | None = None) -> Keys:
        """Return the keys of the entries that match a filter, or of all, sorted."""
        expression = "" if where is None else self._expression(where)
        found = [np.zeros(0, np.int64)]
        left = math.inf if most is None else most
        width = KEYS // max(1, self._count(_SESSION, expression)) * _WINDOW
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
        return self._count(_SESSION, "" if where is None else self._expression(where))

    def store_local(self) -> None:
        """Store local features of photos from now on; the header says so."""
        if self.header.local:
            return
        self.header = self.header.model_copy(update={"local": True})
        self.connection.set_properties({HEADER: self.header.model_dump_json()})

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
            count = self._count(_SESSION, expression)
            if count <= _FEW and self.method.state.index != EXACT:
                return self.search_among(vectors, k, self.keys(where))
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
        self.wait_for_writes()
        self._names = set()

    def versions(self) -> tuple[Keys, Keys]:
        """Keys of all entries, and checksums of what does not depend on a model: [N], [N, 3]."""
        self.wait_for_writes()
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

    def wait_for_writes(self) -> None:
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
                raise unknown_attribute(
                    name, {own for each, _ in self.attributes() for own in each}
                )
            self._names.add(name)
        return to_expression(where)

    def search_among(self, queries: Float32, k: int, among: Keys) -> tuple[Float32, Keys]:
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
        return list(self.connection.call("query", **which))

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
            rows = self._query(["key", *columns], **which)
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
            consistency_level=_SESSION,
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
