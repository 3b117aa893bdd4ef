"""The Easy, Medium and Hard protocols of the revisited Oxford and Paris benchmarks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from listwise.data.ground_truth import GroundTruth
from listwise.errors import InputError
from listwise.evaluation.protocol import ProtocolResult, evaluate_protocol
from listwise.evaluation.ranks import rank_scores


@dataclass(frozen=True)
class RevisitedResult:
    """The figures of the three protocols."""

    easy: ProtocolResult
    medium: ProtocolResult
    hard: ProtocolResult


def evaluate_revisited(
    scores: ArrayLike, ground_truth: GroundTruth, ks: Sequence[int] = (1, 5, 10)
) -> RevisitedResult:
    """Mean AP and mP@k of the Easy, Medium and Hard protocols.

    Junk is removed before ranks are counted; equal scores rank in database order.
    Shapes: scores [Q, N], one row for each query and one column for each database image.
    """
    table = np.asarray(scores)
    expected = (len(ground_truth.queries), len(ground_truth.names))
    if table.shape != expected:
        raise InputError(f"scores should be [Q, N] = {expected}, found {table.shape}")
    return evaluate_ranks(rank_scores(table, judged_images(ground_truth)), ground_truth, ks)


def judged_images(ground_truth: GroundTruth) -> list[NDArray[np.int64]]:
    """The positions of each query's easy, hard and junk images, in that order."""
    parts = zip(ground_truth.easy, ground_truth.hard, ground_truth.junk, strict=True)
    return [np.concatenate(part) for part in parts]


def evaluate_ranks(
    ranks: Sequence[NDArray[np.int64]], ground_truth: GroundTruth, ks: Sequence[int] = (1, 5, 10)
) -> RevisitedResult:
    """`evaluate_revisited` from the ranks of the judged images, distractors counted or not.

    Shapes: for each query the ranks, from 0, of its `judged_images` in the whole list.
    """
    judged = judged_images(ground_truth)
    if [len(found) for found in ranks] != [len(images) for images in judged]:
        raise InputError("ranks should hold one rank for each of judged_images(ground_truth)")
    parts = [
        np.split(found, [len(easy), len(easy) + len(hard)])
        for found, easy, hard in zip(ranks, ground_truth.easy, ground_truth.hard, strict=True)
    ]
    easy, hard, junk = ([part[i] for part in parts] for i in range(3))
    return RevisitedResult(
        easy=evaluate_protocol(easy, _both(junk, hard), ks),
        medium=evaluate_protocol(_both(easy, hard), junk, ks),
        hard=evaluate_protocol(hard, _both(junk, easy), ks),
    )


def _both(
    first: list[NDArray[np.int64]], second: list[NDArray[np.int64]]
) -> list[NDArray[np.int64]]:
    return [np.concatenate(pair) for pair in zip(first, second, strict=True)]
