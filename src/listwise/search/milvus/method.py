"""The search method of an index in Milvus: exact, HNSW, or compressed descriptors."""

import math
import re
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from listwise.errors import InputError
from listwise.search.entries import Float32, Keys
from listwise.search.exact import ExactNeighbors, best_of
from listwise.search.methods import MethodState, Note, SearchIntent, SearchMethod, TuningResult
from listwise.search.milvus.connection import Connection
from listwise.search.store import Store

SEARCH = "listwise.search"  # property of the collection
_SAMPLE = 64  # queries to measure recall with
_FAST = 200.0  # milliseconds up to which exact search is used by default
_RECALL = 0.99
_GAIN = 0.001  # minimum gain of recall from twice the effort
_SEGMENT = 512 << 20  # bytes of descriptors in a segment, for which a server builds one index
_HARDEST = 2048  # maximum number of HNSW candidates


class MilvusIndex(BaseModel):
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

    def efforts(self) -> Iterator["MilvusIndex"]:
        """The same index with increasing search effort."""
        most = self.build.get("nlist", _HARDEST)
        for name, effort in self.search.items():
            while effort < 2 * most:
                yield self.model_copy(update={"search": {name: min(effort, most)}})
                effort *= 2


EXACT = MilvusIndex()


def fast(count: int, dim: int, memory: int | None, lossy: bool) -> MilvusIndex | None:
    """The most exact approximate index that fits into `memory` bytes; None if none fits.

    With `lossy`, types that store compressed descriptors are allowed.
    """
    # A server builds one index per segment.
    lists = max(1, round(4 * min(count, _SEGMENT // (4 * dim)) ** 0.5))
    probed = {"nprobe": min(8, lists)}
    types = [MilvusIndex(type="HNSW", build={"M": 16, "efConstruction": 200}, search={"ef": 32})]
    if lossy:
        types.append(MilvusIndex(type="IVF_SQ8", build={"nlist": lists}, search=probed))
        types += [
            MilvusIndex(
                type="IVF_PQ", build={"nlist": lists, "m": dim // part, "nbits": 8}, search=probed
            )
            for part in (2, 4, 8, 16, 32)
            if dim % part == 0
        ]
    fitting = (each for each in types if memory is None or each.memory(count, dim) <= memory)
    return next(fitting, None)


class MilvusState(MethodState):
    """The search method of a collection.

    Attributes:
        index: the type of its index with parameters.
    """

    index: MilvusIndex = EXACT

    @property
    def name(self) -> str:
        """The method in words."""
        return str(self.index)


class MilvusMethod(SearchMethod):
    """The search method of a store in Milvus, which a property of its collection remembers."""

    def __init__(self, store: Store, connection: Connection) -> None:
        self._store = store
        self._connection = connection
        self.refresh()
        self._build()

    @property
    def state(self) -> MilvusState:
        """What is remembered now."""
        return self._state

    def refresh(self) -> None:
        """Read what another process has chosen."""
        text = self._connection.properties().get(SEARCH, "")
        try:
            self._state = MilvusState.model_validate_json(text)
        except ValidationError as error:
            raise InputError(f"{self._store.uri} is damaged: build the index again") from error

    def tune(self, intent: SearchIntent, on_note: Note = lambda note: None) -> TuningResult:
        """Choose a search method that meets the intent, measure it, and save the choice.

        The methods are exact search, HNSW, and compressed descriptors, in this order; the first
        that is fast enough and fits into memory is used. milvus-lite always searches exactly.
        """
        store, dim = self._store, self._store.header.dim
        lite = self._connection.place.file is not None
        self._connection.call("flush", timeout=None)
        keys = store.keys()
        on_note(f"reading {len(keys)} descriptors to measure recall with")
        some = keys[:_SAMPLE]
        sample = ExactNeighbors(
            some, store.vectors(some), lambda queries, k: search_among(store, queries, k, keys)
        )
        exact = None
        if lite or EXACT.memory(len(keys), dim) <= (intent.memory or math.inf):
            exact = self._try(EXACT, intent, sample)
            on_note(f"{exact.method}: {exact.milliseconds:.1f} ms per query")
            limit = intent.milliseconds or _FAST
            if lite or intent.recall == 1 or exact.milliseconds <= limit:
                return exact
        # Standalone servers before 2.5 delete descriptors that are read while an index exists
        # that does not hold them.
        lossy = tuple(map(int, re.findall(r"\d+", self._server_version())[:2])) >= (2, 5)
        index = fast(len(keys), dim, intent.memory, lossy)
        if index is not None:
            return self._tune_fast(index, intent, sample, on_note)
        if exact is not None:
            return exact
        raise InputError(
            f"{len(keys)} descriptors of {dim} dimensions do not fit into "
            f"{intent.memory} bytes: allow more `memory`"
            + ("" if lossy else ", or use Milvus 2.5 or later")
        )

    def facts(self) -> dict[str, Any]:
        """Version of the server, search method and measurements."""
        return {"server": self._server_version(), **super().facts()}

    def _tune_fast(
        self, index: MilvusIndex, intent: SearchIntent, sample: ExactNeighbors, on_note: Note
    ) -> TuningResult:
        """Increase the search effort until recall is reached, stops growing, or is too slow."""
        on_note(f"building {index.type}")
        easier, best = index, None
        for harder in index.efforts():
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

    def _try(
        self, index: MilvusIndex, intent: SearchIntent, sample: ExactNeighbors
    ) -> TuningResult:
        """Use an index from now on, and measure it."""
        # Saved first, so that a process that opens the index meanwhile builds the same.
        self._save(MilvusState(index=index, intent=intent))
        self._build()
        self._connection.wait_for_writes()
        recall, milliseconds = sample.measure(self._store.search)
        memory = index.memory(len(self._store), self._store.header.dim)
        tuned = TuningResult(str(index), recall, milliseconds, memory)
        self._save(MilvusState(index=index, intent=intent, tuned=tuned))
        return tuned

    def _save(self, state: MilvusState) -> None:
        self._state = state
        self._connection.set_properties({SEARCH: state.model_dump_json()})

    def _build(self) -> None:
        """Build and load the Milvus index of the saved method, if it does not exist yet."""
        index = self._state.index
        self._connection.load("descriptor", index.type, index.build)

    def _server_version(self) -> str:
        return str(self._connection.call("get_server_version"))


def search_among(store: Store, queries: Float32, k: int, among: Keys) -> tuple[Float32, Keys]:
    """Compare queries with all descriptors of these keys: [Q, C] -> both [Q, min(k, n)]."""
    scores = np.zeros((len(queries), 0), np.float32)
    keys = np.zeros((len(queries), 0), np.int64)
    for some, rows in store.descriptors(among):
        new = queries @ rows.T
        all_keys = np.hstack([keys, np.broadcast_to(some, new.shape)])
        all_scores = np.hstack([scores, new])
        scores, keys = best_of(all_scores, all_keys, min(k, all_scores.shape[1]))
    return scores, keys
