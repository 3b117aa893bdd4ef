"""The Easy, Medium and Hard protocols of the revisited Oxford and Paris benchmarks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from listwise.data.ground_truth import GroundTruth
from listwise.errors import InputError

Ranks = NDArray[np.int64]


@dataclass(frozen=True)
class ProtocolResult:
    """The figures of one protocol, from 0 to 1 (NaN where no query has a positive).

    Shapes: `mp` maps each k to mP@k; `per_query_ap` is [Q], NaN where a query does not count.
    """

    mAP: float
    mp: dict[int, float]
    per_query_ap: NDArray[np.float64]


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
    if np.isnan(table).any():
        raise InputError("scores hold NaN, which has no rank; look for broken descriptors")
    easy, hard, junk = (
        [_ranks(row, judged) for row, judged in zip(table, part, strict=True)]
        for part in (ground_truth.easy, ground_truth.hard, ground_truth.junk)
    )
    return RevisitedResult(
        easy=_protocol(easy, _both(junk, hard), ks),
        medium=_protocol(_both(easy, hard), junk, ks),
        hard=_protocol(hard, _both(junk, easy), ks),
    )


def _both(first: list[Ranks], second: list[Ranks]) -> list[Ranks]:
    return [np.concatenate(pair) for pair in zip(first, second, strict=True)]


def _ranks(row: NDArray[np.floating], judged: NDArray[np.int64]) -> Ranks:
    """The ranks, from 0, that the judged images have in the whole list.

    They are counted, not sorted: a few hundred images are judged of up to a million.
    """
    return np.array(
        [np.count_nonzero(row > row[i]) + np.count_nonzero(row[:i] == row[i]) for i in judged],
        dtype=np.int64,
    )


def _protocol(positives: list[Ranks], junk: list[Ranks], ks: Sequence[int]) -> ProtocolResult:
    average = np.full(len(positives), np.nan)
    precisions = np.full((len(positives), len(ks)), np.nan)
    for query, (found, ignored) in enumerate(zip(positives, junk, strict=True)):
        if len(found) == 0:
            continue
        ranks = np.sort(found)
        ranks -= np.searchsorted(np.sort(ignored), ranks)
        average[query] = _trapezoid_ap(ranks)
        for column, k in enumerate(ks):
            depth = min(k, int(ranks[-1]) + 1)
            precisions[query, column] = np.count_nonzero(ranks < depth) / depth
    counted = ~np.isnan(average)
    if not counted.any():
        return ProtocolResult(float("nan"), dict.fromkeys(ks, float("nan")), average)
    means = precisions[counted].mean(axis=0)
    return ProtocolResult(
        mAP=float(average[counted].mean()),
        mp={k: float(mean) for k, mean in zip(ks, means, strict=True)},
        per_query_ap=average,
    )


def _trapezoid_ap(ranks: Ranks) -> float:
    """The area under straight lines from the precision just before each positive to that at it."""
    before = np.arange(len(ranks))
    left = np.where(ranks > 0, before / np.maximum(ranks, 1), 1.0)
    right = (before + 1) / (ranks + 1)
    return float(((left + right) / 2).mean())
