"""A benchmark as one model describes it, and the figures of these descriptors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from listwise.blocks import Database
from listwise.data import Images
from listwise.data.catalog import Benchmark
from listwise.descriptors import DescriptorFile, Model, Whitening
from listwise.errors import InputError
from listwise.evaluation import Results, evaluate_descriptors
from listwise.search import alpha_query_expansion

Descriptors = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class BenchmarkDescriptors:
    """Descriptors of a benchmark by one model: `queries` [Q, C], `database` [N, C].

    `unreadable` has the errors of a labelled set's photos that were left out.
    """

    benchmark: Benchmark
    queries: Descriptors
    database: Descriptors
    unreadable: tuple[str, ...] = ()

    def scores(self, queries: NDArray[np.int64] | None = None) -> Descriptors:
        """Scores of the queries at these positions, or of all, with the database: [q, N]."""
        vectors = self.queries if queries is None else self.queries[queries]
        return vectors @ self.database.T

    def whiten(self, whitening: Whitening) -> "BenchmarkDescriptors":
        """The same with whitened descriptors."""
        queries, database = whitening.apply(self.queries), whitening.apply(self.database)
        return replace(self, queries=queries, database=database)

    def evaluate(
        self, *, expand: bool = False, distractors: DescriptorFile | None = None
    ) -> Results:
        """The figures of each protocol of the benchmark; `expand` is α query expansion.

        `distractors` are further descriptors to search in, all of them negatives, read in blocks.
        """
        refuse_labels(self.benchmark, expand, distractors)
        database: Database = self.database
        if distractors is not None:
            database = _WithDistractors(self.database, distractors)
        queries: NDArray[np.floating] = self.queries
        if expand:
            queries = alpha_query_expansion(queries, database)
        return evaluate_descriptors(queries, database, self.benchmark.judged)


def refuse_labels(benchmark: Benchmark, expand: bool, distractors: object) -> None:
    """Refuse what is not defined for labelled sets."""
    if benchmark.labelled and (expand or distractors is not None):
        raise InputError(
            f"{benchmark.name} is a labelled set: `expand` and `distractors` are for benchmarks "
            "whose queries are judged photo by photo"
        )


def describe_benchmark(
    model: Model,
    benchmark: Benchmark,
    on_progress: Callable[[int], object] = lambda count: None,
    **settings: Any,
) -> BenchmarkDescriptors:
    """Describe the queries, cropped to their boxes, and the database.

    Photos of a labelled set that cannot be read are left out; a judged benchmark with such a
    photo is an error, since its figures would mean something else. `settings` are those of
    `Model.describe` (max_side, scales, power, precision, workers).
    """
    unreadable: list[str] = []

    def describe(images: Images) -> tuple[list[int], Descriptors]:
        found = model.describe(images, on_progress=on_progress, **settings)
        if found.errors and not (benchmark.labelled and found.kept):
            raise InputError(
                f"{len(found.errors)} photos of {benchmark.name} cannot be read; "
                f"the first: {found.errors[0]}"
            )
        unreadable.extend(found.errors)
        return found.kept, found.descriptors

    kept, database = describe(benchmark.database)
    asking, queries = kept, database
    if benchmark.queries is not benchmark.database:
        asking, queries = describe(benchmark.queries)
    readable = benchmark.subset(asking, kept) if unreadable else benchmark
    return BenchmarkDescriptors(readable, queries, database, tuple(unreadable))


class _WithDistractors:
    """A database and then distractors, read from disk again at every iteration."""

    def __init__(self, database: Descriptors, distractors: DescriptorFile) -> None:
        if distractors.dim != database.shape[1]:
            raise InputError(
                f"{distractors.path} holds descriptors of {distractors.dim} dimensions, the model "
                f"makes {database.shape[1]}: extract them again with this model"
            )
        self.database = database
        self.distractors = distractors

    def __iter__(self) -> Iterator[Descriptors]:
        yield self.database
        yield from self.distractors.batches()
