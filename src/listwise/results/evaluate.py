"""A model on a benchmark: descriptors of its photos, and the figures they come to."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from listwise.blocks import Database
from listwise.data import Images, LabelledImages
from listwise.data.catalog import Benchmark
from listwise.data.ground_truth import GroundTruth
from listwise.data.oxford import OxfordGroundTruth
from listwise.descriptors import DescriptorFile, Model
from listwise.errors import InputError
from listwise.evaluation import (
    LabelledResult,
    ProtocolResult,
    evaluate_labelled,
    evaluate_oxford_ranks,
    evaluate_ranks,
    judged_images,
    judged_oxford_images,
    rank_judged,
)
from listwise.search import alpha_query_expansion

Descriptors = npt.NDArray[np.float32]
Results = dict[str, ProtocolResult] | dict[str, LabelledResult]


@dataclass(frozen=True, eq=False)
class Searched:
    """A benchmark's photos as one model sees them: `queries` [Q, C], `database` [N, C].

    `unreadable` has the errors of a labelled set's photos that were left out.
    """

    benchmark: Benchmark
    queries: Descriptors
    database: Descriptors
    unreadable: tuple[str, ...] = ()


def search_benchmark(
    model: Model,
    benchmark: Benchmark,
    on_progress: Callable[[int], object] = lambda count: None,
    **settings: Any,
) -> Searched:
    """Describe the queries, cropped to their boxes, and the database.

    Of a labelled set, photos that cannot be read are left out; a judged benchmark with such a
    photo is an error, since its figures would mean something else.

    Args:
        model: network and whitening.
        benchmark: from `listwise.data.catalog.find_dataset(...).benchmark()`.
        on_progress: called with the number of photos just done.
        settings: of `Model.describe` (max_side, scales, power, precision, workers).
    """
    alone = benchmark.queries is benchmark.database
    unreadable: list[str] = []

    def describe(images: Images) -> tuple[Images, Descriptors]:
        found = model.describe(images, on_progress=on_progress, **settings)
        if found.errors and (benchmark.kind != "labelled" or not found.kept):
            raise InputError(
                f"{len(found.errors)} photos of {benchmark.name} cannot be read; "
                f"the first: {found.errors[0]}"
            )
        unreadable.extend(found.errors)
        return images.subset(found.kept), found.descriptors

    kept, database = describe(benchmark.database)
    asking, queries = (kept, database) if alone else describe(benchmark.queries)
    seen = replace(benchmark, database=kept, queries=asking)
    return Searched(seen, queries, database, tuple(unreadable))


def evaluate_searched(
    searched: Searched, *, expand: bool = False, distractors: DescriptorFile | None = None
) -> Results:
    """The figures of each protocol of the benchmark.

    Args:
        searched: from `search_benchmark`.
        expand: search again with αQE.
        distractors: more descriptors to search in, none of them right; read from disk in blocks.
    """
    benchmark = searched.benchmark
    queries: npt.NDArray[np.floating] = searched.queries
    if benchmark.kind == "labelled":
        if expand or distractors is not None:
            raise InputError(
                f"{benchmark.name} is a labelled set: query expansion and distractors are for "
                "benchmarks whose queries are judged"
            )
        return {"Labels": evaluate_classes(searched)}
    database: Database = searched.database
    if distractors is not None:
        database = _Followed(searched.database, distractors)
    if expand:
        queries = alpha_query_expansion(queries, database)
    if isinstance(benchmark.truth, GroundTruth):
        found = evaluate_ranks(
            rank_judged(queries, database, judged_images(benchmark.truth)), benchmark.truth
        )
        return {"Easy": found.easy, "Medium": found.medium, "Hard": found.hard}
    assert isinstance(benchmark.truth, OxfordGroundTruth)
    ranks = rank_judged(queries, database, judged_oxford_images(benchmark.truth))
    return {"Original": evaluate_oxford_ranks(ranks, benchmark.truth)}


def scores(searched: Searched, expand: bool = False) -> Descriptors:
    """Scores of every query with every database photo: [Q, N]."""
    queries = searched.queries
    if expand:
        queries = alpha_query_expansion(queries, searched.database).astype(np.float32)
    return queries @ searched.database.T


def figures(results: Results) -> dict[str, dict[str, float]]:
    """Protocol -> name of a metric -> its value, 0 to 1."""
    table: dict[str, dict[str, float]] = {}
    for protocol, found in results.items():
        table[protocol] = {"mAP": found.mAP}
        if isinstance(found, ProtocolResult):
            table[protocol] |= {f"mP@{k}": value for k, value in found.mp.items()}
        else:
            table[protocol] |= {"mAP@R": found.map_at_r}
            table[protocol] |= {f"Recall@{k}": value for k, value in found.recall.items()}
    return table


def evaluate_classes(searched: Searched) -> LabelledResult:
    """The figures of a labelled set."""
    benchmark = searched.benchmark
    names = class_names(benchmark.queries)
    if benchmark.queries is benchmark.database:
        return evaluate_labelled(searched.queries, names)
    gallery_names = class_names(benchmark.database)
    return evaluate_labelled(searched.queries, names, searched.database, gallery_names)


def class_names(images: Images) -> npt.NDArray[np.str_]:
    """The name of each photo's class: numbers of two parts of a set need not agree."""
    assert isinstance(images, LabelledImages)
    return np.array(images.class_names)[images.labels]


class _Followed:
    """A database and then distractors, read from disk anew at every iteration."""

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
