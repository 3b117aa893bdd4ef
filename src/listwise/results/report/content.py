"""The content of a report as plain values, without HTML and pictures."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from listwise.data.images import Box
from listwise.results.table import Figures

Mark = Literal["right", "wrong", "junk"]
Curve = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Recall and precision, both [P]."""
Match = tuple[float, float, float, float]
"""x, y in the query photo and x, y in the result, as fractions of the upright photos' sizes."""


@dataclass(frozen=True)
class ListEntry:
    """A photo in the ranked list of a query.

    Attributes:
        name: name of the photo.
        path: file of the photo.
        score: similarity to the query.
        mark: relevant ("right"), irrelevant ("wrong") or "junk".
        rank: from 1, without junk; None for junk.
        inliers: number of points that match the query; None if the photo was not verified.
        matches: the points to draw; None if a photo cannot be read.
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
    """The first photos of a query's ranked list under one protocol.

    Attributes:
        ap: average precision; None if the protocol does not count the query.
        entries: the photos shown.
        found: number of positives among the entries.
        positives: number of positives in the database.
        hidden_junk: number of junk photos between the entries that are not shown.
    """

    ap: float | None
    entries: tuple[ListEntry, ...]
    found: int
    positives: int
    hidden_junk: int


@dataclass(frozen=True)
class QueryResult:
    """A query photo, its box (None for the whole photo), and a ranked list per protocol."""

    name: str
    path: str
    box: Box | None
    lists: Mapping[str, RankedList]


@dataclass(frozen=True)
class ClassResult:
    """The queries of one class: their number that counts, and protocol -> mean AP."""

    name: str
    queries: int
    ap: Mapping[str, float]


@dataclass(frozen=True)
class ModelResult:
    """Everything that a report shows of one model; `report_models` creates it.

    Attributes:
        name: name of the model.
        figures: protocol -> metric -> value from 0 to 1.
        curves: protocol -> recall [P] and precision [P].
        queries: the queries shown, with their ranked lists.
        note: explains how the queries were chosen, if not all are shown.
        names: names of the queries of the chart of AP, which may have more than are shown.
        ap: protocol -> the AP of each of them [n]; NaN where the protocol does not count it.
        places: position in `names` of each query shown.
        classes: the classes of a labelled benchmark.
    """

    name: str
    figures: Figures
    curves: Mapping[str, Curve]
    queries: tuple[QueryResult, ...]
    note: str = ""
    names: tuple[str, ...] = ()
    ap: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    places: tuple[int, ...] = ()
    classes: tuple[ClassResult, ...] = ()


@dataclass(frozen=True)
class TableRow:
    """A row of the table of metrics: a name, and protocol -> metric -> value from 0 to 1."""

    name: str
    figures: Figures
