"""How Milvus may search: the methods to choose from, and measuring one of them."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from listwise.search.entries import Float32, Keys
from listwise.search.exact import exact_search
from listwise.search.store import Store

SAMPLE = 64  # queries that recall is measured with
_TIMED = 16  # and those that are timed
_NEIGHBOURS = 10
_BLOCK = 8192  # descriptors read at a time
_SEGMENT = 512 << 20  # bytes of descriptors that a server builds one index of
_HARDEST = 2048  # candidates that HNSW keeps at most


class Method(BaseModel):
    """A type of index, how it is built, and how hard it is searched."""

    model_config = ConfigDict(frozen=True)

    type: Literal["FLAT", "HNSW", "IVF_SQ8", "IVF_PQ"] = "FLAT"
    build: dict[str, int] = {}
    search: dict[str, int] = {}

    def __str__(self) -> str:
        values = {**self.build, **self.search}.items()
        words = [self.type, *(f"{name} {value}" for name, value in values)]
        return "exact" if self.type == "FLAT" else ", ".join(words)

    def memory(self, count: int, dim: int) -> int:
        """Bytes that the index of so many descriptors takes."""
        row = {
            "FLAT": 4 * dim,
            "HNSW": 4 * dim + 8 * self.build.get("M", 0) + 16,
            "IVF_SQ8": dim + 8,
            "IVF_PQ": self.build.get("m", 0) + 8,
        }
        return count * row[self.type]

    def efforts(self) -> Iterator["Method"]:
        """The same index, searched harder and harder."""
        most = self.build.get("nlist", _HARDEST)
        for name, effort in self.search.items():
            while effort < 2 * most:
                yield self.model_copy(update={"search": {name: min(effort, most)}})
                effort *= 2


EXACT = Method()


def fast(count: int, dim: int, memory: int | None, lossy: bool) -> Method | None:
    """The most exact of the fast methods that fit into so many bytes, if any does.

    Those that keep no whole descriptors are among them if `lossy`.
    """
    # A server builds one index for each segment.
    lists = max(1, round(4 * min(count, _SEGMENT // (4 * dim)) ** 0.5))
    probed = {"nprobe": min(8, lists)}
    methods = [Method(type="HNSW", build={"M": 16, "efConstruction": 200}, search={"ef": 32})]
    if lossy:
        methods.append(Method(type="IVF_SQ8", build={"nlist": lists}, search=probed))
        methods += [
            Method(
                type="IVF_PQ",
                build={"nlist": lists, "m": dim // part, "nbits": 8},
                search=probed,
            )
            for part in (2, 4, 8, 16, 32)
            if dim % part == 0
        ]
    fitting = (m for m in methods if memory is None or m.memory(count, dim) <= memory)
    return next(fitting, None)


@dataclass(frozen=True, eq=False)
class Sample:
    """Some entries as queries [Q, C], their keys [Q], and the nearest others of each."""

    queries: Float32
    keys: Keys
    neighbours: list[Keys]


def take_sample(index: Store, keys: Keys) -> Sample:
    """The first entries of these, and their neighbours among all of these by exact search.

    It reads the descriptors of all. Shape: keys [n].
    """
    own = keys[:SAMPLE]
    queries = index.vectors(own)
    if not len(own):
        return Sample(queries, own, [])
    _, places = exact_search(queries, _Descriptors(index, keys), _NEIGHBOURS + 1)
    return Sample(queries, own, _others(keys[places], own))


def measure(index: Store, sample: Sample) -> tuple[float, float]:
    """Recall@10 of an index, and the milliseconds that a query takes; 1 and 0 of an empty one."""
    if not len(sample.keys):
        return 1.0, 0.0
    _, keys = index.search(sample.queries, _NEIGHBOURS + 1)
    found = _others(keys, sample.keys)
    pairs = zip(sample.neighbours, found, strict=True)
    hits = sum(int(np.isin(wanted, got).sum()) for wanted, got in pairs)
    seconds = []
    for query in sample.queries[:_TIMED]:
        start = time.perf_counter()
        index.search(query[None], _NEIGHBOURS)
        seconds.append(time.perf_counter() - start)
    recall = hits / max(1, sum(len(wanted) for wanted in sample.neighbours))
    return recall, 1000 * float(np.median(seconds))


class _Descriptors:
    """The descriptors of entries, read anew each time it is iterated: blocks [n, C]."""

    def __init__(self, index: Store, keys: Keys) -> None:
        self.index, self.keys = index, keys

    def __iter__(self) -> Iterator[Float32]:
        for start in range(0, len(self.keys), _BLOCK):
            yield self.index.vectors(self.keys[start : start + _BLOCK])


def _others(keys: Keys, own: Keys) -> list[Keys]:
    """The neighbours of each query other than itself: [Q, k], [Q] -> Q times at most [10]."""
    return [
        row[(row != itself) & (row >= 0)][:_NEIGHBOURS]
        for row, itself in zip(keys, own, strict=True)
    ]
