"""Figures of one protocol from the ranks of its positives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from listwise.errors import InputError

Ranks = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ProtocolResult:
    """The figures of one protocol by their names, from 0 to 1, over the queries that count.

    A query without a positive does not count; where no query counts, figures are NaN.
    Shapes: `per_query_ap` is [Q], NaN where a query does not count.
    """

    figures: dict[str, float]
    per_query_ap: NDArray[np.float64]

    @property
    def mAP(self) -> float:
        """Mean average precision."""
        return self.figures["mAP"]


Measure = Callable[[Sequence[Ranks], Sequence[int] | None], ProtocolResult]
"""From the ranks of each query's positives (from 0, junk removed) and depths k to figures."""


def trapezoid_figures(
    positives: Sequence[Ranks], ks: Sequence[int] | None = None
) -> ProtocolResult:
    """Mean AP by the trapezoid rule, and mP@k for k in 1, 5, 10 unless other depths are given.

    mP@k looks no further than the last positive. Shapes: for each query the ranks of its
    positives, from 0 and without junk.
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


def label_figures(positives: Sequence[Ranks], ks: Sequence[int] | None = None) -> ProtocolResult:
    """Mean AP, mAP@R and Recall@k for k in 1, 2, 4, 8 unless other depths are given.

    AP is the mean precision at the ranks of the positives. Shapes: as for `trapezoid_figures`.
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
        raise InputError("no query has another image of its label to find; give two of one label")
    rows[:, 2:] = np.where(np.isnan(rows[:, 2:]), np.nan, rows[:, 2:] <= np.array(depths))
    return _means(rows, ["mAP", "mAP@R", *(f"Recall@{k}" for k in depths)])


def _means(rows: NDArray[np.float64], names: list[str]) -> ProtocolResult:
    counted = rows[~np.isnan(rows[:, 0])]
    means = counted.mean(axis=0) if len(counted) else np.full(len(names), np.nan)
    return ProtocolResult(dict(zip(names, means.tolist(), strict=True)), rows[:, 0].copy())


def _trapezoid_ap(ranks: Ranks) -> float:
    """The area under straight lines from the precision just before each positive to that at it."""
    before = np.arange(len(ranks))
    left = np.where(ranks > 0, before / np.maximum(ranks, 1), 1.0)
    right = (before + 1) / (ranks + 1)
    return float(((left + right) / 2).mean())
