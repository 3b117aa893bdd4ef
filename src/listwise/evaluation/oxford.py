"""The protocol of the original Oxford5k and Paris6k benchmarks."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from listwise.data.oxford import OxfordGroundTruth
from listwise.errors import InputError
from listwise.evaluation.protocol import ProtocolResult, evaluate_protocol
from listwise.evaluation.ranks import rank_scores


def evaluate_oxford(
    scores: ArrayLike, ground_truth: OxfordGroundTruth, ks: Sequence[int] = (1, 5, 10)
) -> ProtocolResult:
    """Mean AP and mP@k with good and ok images positive and junk removed.

    The query's own photo is in the database and among its good images, as in the benchmark.
    Shapes: scores [Q, N], one row for each query and one column for each database image.
    """
    table = np.asarray(scores)
    expected = (len(ground_truth.queries), len(ground_truth.names))
    if table.shape != expected:
        raise InputError(f"scores should be [Q, N] = {expected}, found {table.shape}")
    ranks = rank_scores(table, judged_oxford_images(ground_truth))
    return evaluate_oxford_ranks(ranks, ground_truth, ks)


def judged_oxford_images(ground_truth: OxfordGroundTruth) -> list[NDArray[np.int64]]:
    """The positions of each query's good, ok and junk images, in that order."""
    parts = zip(ground_truth.good, ground_truth.ok, ground_truth.junk, strict=True)
    return [np.concatenate(part) for part in parts]


def evaluate_oxford_ranks(
    ranks: Sequence[NDArray[np.int64]],
    ground_truth: OxfordGroundTruth,
    ks: Sequence[int] = (1, 5, 10),
) -> ProtocolResult:
    """`evaluate_oxford` from the ranks of the judged images, distractors counted or not.

    Shapes: for each query the ranks, from 0, of its `judged_oxford_images` in the whole list.
    """
    judged = judged_oxford_images(ground_truth)
    if [len(found) for found in ranks] != [len(images) for images in judged]:
        raise InputError(
            "ranks should hold one rank for each of judged_oxford_images(ground_truth)"
        )
    ends = [
        len(good) + len(ok) for good, ok in zip(ground_truth.good, ground_truth.ok, strict=True)
    ]
    return evaluate_protocol(
        [found[:end] for found, end in zip(ranks, ends, strict=True)],
        [found[end:] for found, end in zip(ranks, ends, strict=True)],
        ks,
    )
