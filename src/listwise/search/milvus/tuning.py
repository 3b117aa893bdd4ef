"""The search methods of Milvus, and the sample to measure them with."""

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict

from listwise.search.entries import Keys, in_parts
from listwise.search.measuring import ExactNeighbors
from listwise.search.store import Store

SAMPLE = 64  # queries to measure recall with
_BLOCK = 8192  # descriptors per read
_SEGMENT = 512 << 20  # bytes of descriptors in a segment, for which a server builds one index
_HARDEST = 2048  # maximum number of HNSW candidates


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


def take_sample(store: Store, keys: Keys) -> ExactNeighbors:
    """Use the first entries as queries, and find their exact neighbors among all.

    It reads the descriptors of all keys [n].
    """
    sample = ExactNeighbors(keys[:SAMPLE], store.vectors(keys[:SAMPLE]))
    for some in in_parts(keys, _BLOCK):
        sample.add(some, store.vectors(some))
    return sample
