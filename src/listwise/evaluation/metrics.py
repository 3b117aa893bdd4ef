"""Compute the metrics of one protocol from the ranks of its positives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from listwise.errors import InputError

Ranks = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ProtocolResult:
    """The metrics of one protocol, as means over the queries that have a positive.

    Attributes:
        figures: the metrics by name, such as "mAP" or "Recall@1", from 0 to 1; NaN if no query has
            a positive.
        per_query_ap: [Q] average precision of each query; NaN where it has no positive.
    """

    figures: dict[str, float]
    per_query_ap: NDArray[np.float64]

    @property
    def mAP(self) -> float:
        """The mean average precision."""
        return self.figures["mAP"]


Measure = Callable[[Sequence[Ranks], Sequence[int] | None], ProtocolResult]
"""Computes the metrics of a protocol from the ranks of each query's positives and the depths k.

Ranks are counted from 0, after junk is removed; None stands for the protocol's own depths.
"""


def trapezoid_metrics(
    positives: Sequence[Ranks], ks: Sequence[int] | None = None
) -> ProtocolResult:
    """Compute mAP by the trapezoid rule, and mP@k for the depths k (default 1, 5 and 10).

    mP@k is the mean precision at k, or at the rank of the last positive if that is smaller.
    `positives` has, for each query, the ranks of its positives, counted from 0 without junk.
    """
    depths = (1, 5, 10) if ks is None else tuple(ks)
    rows = np.full((len(positives), 1 + len(depths)), np.nan)
    for row, found in zip(rows, positives, strict=True):
        if len(found):
            ranks = np.sort(found)
            row[0] = _trapezoid_ap(ranks)
            last = int(ranks[-1]) + 1
            row[1:] = [np.count_nonzero(ranks < min(k, last)) / min(k, last) for k in depths]
    return _means(rows, ["mAP", *(f"mP@{k}" for k in depths)])


def label_metrics(positives: Sequence[Ranks], ks: Sequence[int] | None = None) -> ProtocolResult:
    """Compute mAP, mAP@R and Recall@k for the depths k (default 1, 2, 4 and 8).

    AP is the mean precision at the ranks of the positives. `positives` has, for each query, the
    ranks of its positives, counted from 0 without junk.
    """
    depths = (1, 2, 4, 8) if ks is None else tuple(ks)
    rows = np.full((len(positives), 2 + len(depths)), np.nan)
    for row, found in zip(rows, positives, strict=True):
        if len(found):
            places = np.sort(found) + 1
            precision = np.arange(1, len(places) + 1) / places
            row[0] = precision.mean()
            row[1] = precision[places <= len(places)].sum() / len(places)
            row[2:] = places[0]
    if np.isnan(rows[:, 0]).all():
        raise InputError("no query has a positive: give at least two images with the same label")
    rows[:, 2:] = np.where(np.isnan(rows[:, 2:]), np.nan, rows[:, 2:] <= np.array(depths))
    return _means(rows, ["mAP", "mAP@R", *(f"Recall@{k}" for k in depths)])


def _means(rows: NDArray[np.float64], names: list[str]) -> ProtocolResult:
    counted = rows[~np.isnan(rows[:, 0])]
    means = counted.mean(axis=0) if len(counted) else np.full(len(names), np.nan)
    return ProtocolResult(dict(zip(names, means.tolist(), strict=True)), rows[:, 0].copy())


def _trapezoid_ap(ranks: Ranks) -> float:
    """Return the area under the precision-recall curve by the trapezoid rule.

    Each positive adds the mean of the precision just before it and the precision at it.
    """
    before = np.arange(len(ranks))
    left = np.where(ranks > 0, before / np.maximum(ranks, 1), 1.0)
    right = (before + 1) / (ranks + 1)
    return float(((left + right) / 2).mean())
