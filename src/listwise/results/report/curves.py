"""Precision–recall curves: the numbers and the drawing."""

from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import ArrayLike

from listwise.errors import InputError
from listwise.results.report.content import Curve

_WIDTH, _HEIGHT = 360, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 346, 10, 226  # edges of the plot in the drawing


def precision_recall_curve(ranks: Sequence[ArrayLike], points: int = 101) -> Curve:
    """Compute the mean interpolated precision of queries at evenly spaced recalls.

    The interpolated precision of a query at recall r is its highest precision at recall r or more.

    Args:
        ranks: for each query the ranks of its positives, from 0, without junk, in any order.
        points: number P of recalls.

    Returns:
        Recall [P] and precision [P]; precision is NaN if no query has a positive.

    Examples:
        >>> recall, precision = precision_recall_curve([[0, 2], [1]], points=3)
        >>> precision.round(2).tolist()
        [0.75, 0.75, 0.58]
    """
    recall = np.linspace(0.0, 1.0, points)
    rows = []
    for found in ranks:
        order = np.sort(np.asarray(found, dtype=np.int64))
        if len(order) == 0:
            continue
        if order[0] < 0:
            raise InputError(f"`ranks` should be 0 or more, found {order[0]}")
        precision = np.arange(1, len(order) + 1) / (order + 1)
        best_from = np.maximum.accumulate(precision[::-1])[::-1]
        # The first positive at which the recall is reached; the small term absorbs rounding.
        reached = np.ceil(recall * len(order) - 1e-9).astype(np.int64)
        rows.append(best_from[np.maximum(reached, 1) - 1])
    if not rows:
        return recall, np.full(points, np.nan)
    return recall, np.mean(rows, axis=0)


def draw_curves(curves: Sequence[Curve], title: str) -> str:
    """Draw an SVG element with one line per model; the colors come from the style of the page."""
    parts = [
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(f"Precision against recall, {title}")}">'
    ]
    for percent in range(0, 101, 20):
        x, y = _x(percent / 100), _y(percent / 100)
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{_BOTTOM}M{_LEFT} {y:.1f}H{_RIGHT}"/>')
        parts.append(f'<text x="{x:.1f}" y="{_BOTTOM + 17}" text-anchor="middle">{percent}</text>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{percent}</text>')
    middle = (_TOP + _BOTTOM) / 2
    parts.append(
        f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">recall, %</text>'
        f'<text transform="translate(11 {middle}) rotate(-90)" text-anchor="middle">'
        "precision, %</text>"
    )
    for model, (recall, precision) in enumerate(curves):
        line = " ".join(
            f"{_x(r):.1f},{_y(p):.1f}"
            for r, p in zip(recall, precision, strict=True)
            if np.isfinite(p)
        )
        parts.append(f'<polyline class="curve model{model}" points="{line}"/>')
    return "".join([*parts, "</svg>"])


def _x(recall: float) -> float:
    return _LEFT + recall * (_RIGHT - _LEFT)


def _y(precision: float) -> float:
    return _BOTTOM - precision * (_BOTTOM - _TOP)
