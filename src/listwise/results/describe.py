"""Compute the descriptors of a benchmark with a model, and evaluate them."""

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
from listwise.evaluation import (
    Results,
    evaluate_descriptors,
    evaluate_ranks,
    judged_images,
    rank_judged,
)
from listwise.search import alpha_query_expansion, refined_search
from listwise.search.options import RefineMethod
from listwise.settings import Expansion, ExtractSettings

Descriptors = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class BenchmarkDescriptors:
    """The descriptors of a benchmark by one model; `describe_benchmark` returns one.

    Attributes:
        benchmark: queries, database and ground truth.
        queries: [Q, C], unit rows.
        database: [N, C], unit rows.
        unreadable: errors of the photos of a labelled set that were left out.
        settings: size and scales at which the photos were described.
    """

    benchmark: Benchmark
    queries: Descriptors
    database: Descriptors
    unreadable: tuple[str, ...] = ()
    settings: ExtractSettings | None = None

    def scores(self, queries: NDArray[np.int64] | None = None) -> Descriptors:
        """Compute the scores of the queries at these positions, by default of all: [q, N]."""
        vectors = self.queries if queries is None else self.queries[queries]
        return vectors @ self.database.T

    def whiten(self, whitening: Whitening) -> "BenchmarkDescriptors":
        """Return the same benchmark with whitened descriptors."""
        queries, database = whitening.apply(self.queries), whitening.apply(self.database)
        return replace(self, queries=queries, database=database)

    def evaluate(
        self,
        *,
        expand: bool | Expansion = False,
        refine: RefineMethod | None = None,
        distractors: DescriptorFile | None = None,
    ) -> Results:
        """Compute the metrics of each protocol of the benchmark.

        Args:
            expand: use α query expansion, with α = 2 and k = 10 unless others are given.
            refine: re-rank the first images by their global descriptors: "superglobal" or
                "diffusion".
            distractors: descriptors added to the database, all negatives; read in blocks.
        """
        refuse_labels(self.benchmark, bool(expand), refine, distractors)
        database: Database = self.database
        if distractors is not None:
            database = _WithDistractors(self.database, distractors)
        queries: NDArray[np.floating] = self.queries
        if expand:
            how = expand if isinstance(expand, Expansion) else Expansion()
            queries = alpha_query_expansion(queries, database, how.alpha, how.k)
        judged = self.benchmark.judged
        if refine is None:
            return evaluate_descriptors(queries, database, judged)
        images = judged_images(judged)
        _, short_lists = refined_search(queries, database, refine)
        ranks = rank_judged(queries, database, images)
        moved = [_moved(*each) for each in zip(ranks, images, short_lists, strict=True)]
        return evaluate_ranks(moved, judged)


def refuse_labels(benchmark: Benchmark, expand: bool, refine: object, distractors: object) -> None:
    """Raise an error for options that are not defined for labelled sets."""
    if benchmark.labelled and (expand or refine or distractors is not None):
        raise InputError(
            f"{benchmark.name} is a labelled set: `expand`, `refine` and `distractors` are for "
            "benchmarks whose queries are judged photo by photo"
        )


def _moved(
    ranks: NDArray[np.int64], images: NDArray[np.int64], short_list: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Ranks of images after the first ones were put in the order of the short list."""
    places = {int(image): rank for rank, image in enumerate(short_list)}
    # Rounding can put an image at the end of the short list on either side of it.
    found = [
        places.get(int(image), max(int(rank), len(short_list)))
        for image, rank in zip(images, ranks, strict=True)
    ]
    return np.array(found, np.int64)


def describe_benchmark(
    model: Model,
    benchmark: Benchmark,
    on_progress: Callable[[int], object] = lambda count: None,
    **settings: Any,
) -> BenchmarkDescriptors:
    """Compute the descriptors of the queries, cropped to their boxes, and of the database.

    Photos of a labelled set that cannot be read are left out. In a benchmark with judged queries
    they are an error, since the metrics would not be comparable.

    Args:
        model: the model.
        benchmark: what `open_benchmark` returned.
        on_progress: called with the number of photos just described.
        **settings: those of `Model.describe`: max_side, scales, power, precision, workers.

    Returns:
        Descriptors of queries [Q, C] and database [N, C].

    Examples:
        >>> described = describe_benchmark(model, open_benchmark("roxford5k"))  # doctest: +SKIP
        >>> described.evaluate()["Medium"].mAP                                  # doctest: +SKIP
        0.42
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
    kept_queries, queries = kept, database
    if benchmark.queries is not benchmark.database:
        kept_queries, queries = describe(benchmark.queries)
    readable = benchmark.subset(kept_queries, kept) if unreadable else benchmark
    used = model.settings(**{name: value for name, value in settings.items() if name != "workers"})
    return BenchmarkDescriptors(readable, queries, database, tuple(unreadable), used)


class _WithDistractors:
    """A database followed by distractors, which every iteration reads from disk again."""

    def __init__(self, database: Descriptors, distractors: DescriptorFile) -> None:
        if distractors.dim != database.shape[1]:
            raise InputError(
                f"{distractors.path} holds descriptors of {distractors.dim} dimensions, but "
                f"the model has {database.shape[1]}: extract them again with this model"
            )
        self.database = database
        self.distractors = distractors

    def __iter__(self) -> Iterator[Descriptors]:
        yield self.database
        yield from self.distractors.batches()
