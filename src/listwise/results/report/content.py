"""What a report shows: plain values, with nothing of pages or pictures."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from listwise.data.images import Box
from listwise.results.table import Figures

Mark = Literal["right", "wrong", "junk"]
Curve = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Recall and precision, both [P]."""
Match = tuple[float, float, float, float]
"""x and y in the query photo, x and y in the photo found: parts of the upright photos' sizes."""


@dataclass(frozen=True)
class ListEntry:
    """A photo that a query found; `rank` counts from 1 without junk, which has none.

    `inliers` is the number of points of the query that were found in the photo too, None if nobody
    looked; `matches` are some of these to draw, None if there is no photo to draw them on.
    """

    name: str
    path: str
    score: float
    mark: Mark
    rank: int | None
    inliers: int | None = None
    matches: tuple[Match, ...] | None = None


@dataclass(frozen=True)
class RankedList:
    """The head of a query's list under one protocol.

    `ap` is None where the protocol does not count the query, `found` is how many of the
    `positives` are among the `entries`, `hidden_junk` how many junk photos in between are left out.
    """

    ap: float | None
    entries: tuple[ListEntry, ...]
    found: int
    positives: int
    hidden_junk: int


@dataclass(frozen=True)
class QueryResult:
    """A query photo, the part of it that is searched (None: all of it), a list per protocol."""

    name: str
    path: str
    box: Box | None
    lists: Mapping[str, RankedList]


@dataclass(frozen=True)
class ModelResult:
    """All that a report shows of one model; `note` explains how the queries shown were chosen."""

    name: str
    figures: Figures
    curves: Mapping[str, Curve]
    queries: tuple[QueryResult, ...]
    note: str = ""


@dataclass(frozen=True)
class TableRow:
    """A line of the table of figures."""

    name: str
    figures: Figures
