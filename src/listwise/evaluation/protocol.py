"""One protocol's figures from the ranks of its positives and its junk."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ranks = NDArray[np.int64]


@dataclass(frozen=True)
class ProtocolResult:
    """The figures of one protocol, from 0 to 1 (NaN where no query has a positive).

    Shapes: `mp` maps each k to mP@k; `per_query_ap` is [Q], NaN where a query does not count.
    """

    mAP: float
    mp: dict[int, float]
    per_query_ap: NDArray[np.float64]


def evaluate_protocol(
    positives: Sequence[Ranks], junk: Sequence[Ranks], ks: Sequence[int]
) -> ProtocolResult:
    """Mean AP by the trapezoid rule and mP@k, with junk removed before ranks are counted.

    Shapes: for each query the ranks, from 0, of its positives and of its junk in the whole list.
    """
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
