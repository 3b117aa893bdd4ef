"""SVG plots of metrics with their deviations, over an axis of numbers or by name.

They have their own background and follow the light or dark mode of the reader.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from listwise.pages import render

_EDGE, _GAP = 20, 28
_WIDTH = 400  # width of a panel with its labels
_HEAD = 34  # height above the panels, and above each plot in its panel
_PLOT_HEIGHT = 190
_ROW = 24  # height of a named row
_LETTER = 6.6  # approximate width of a letter


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation of values; the deviation of a single value is None."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return float(np.mean(self.values))

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation of the values (n − 1)."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None

    def percent(self, sign: str = "") -> str:
        """Format in percent: 45.2 ± 0.3."""
        mean = f"{100 * self.mean:{sign}.1f}"
        return mean if self.deviation is None else f"{mean} ± {100 * self.deviation:.1f}"


@dataclass(frozen=True)
class Point:
    """A metric from 0 to 1 of a named variant, with its number `value` if there is an axis."""

    name: str
    spread: Spread
    value: float | None = None


@dataclass(frozen=True)
class Panel:
    """One metric of all variants; `reference` is its value before training."""

    title: str
    points: Sequence[Point]
    reference: float | None = None


@dataclass(frozen=True)
class _Plot:
    """A plot in the drawing: its edges, and its values in percent from `low` to `high`.

    Values increase upwards if `up`, else to the right.
    """

    left: float
    right: float
    top: float
    bottom: float
    low: float
    high: float
    up: bool

    def at(self, percent: float, place: float) -> tuple[float, float]:
        """Return the x and y of a value at a place on the other axis."""
        part = (percent - self.low) / (self.high - self.low)
        if self.up:
            return place, self.bottom - part * (self.bottom - self.top)
        return self.left + part * (self.right - self.left), place

    def line(self, percent: float, before: float = 0.0) -> str:
        """Return the path of a line across the plot at a value; it may start `before` the edge."""
        start, end = (self.left, self.right) if self.up else (self.top - before, self.bottom)
        return _path(self.at(percent, start), self.at(percent, end))

    def mark(self, point: Point, place: float) -> dict[str, Any]:
        """Return a point with its error bar and single values; hovering shows the numbers."""
        spread = point.spread
        count = len(spread.values)
        seeds = f" ({count} seeds)" if count > 1 else ""
        cap = "m-4 0h8m-4 0" if self.up else "m0 -4v8m0 -4"  # a short stroke across
        ends = [self.at(end, place) for end in _ends(spread)]
        return {
            "label": f"{point.name}: {spread.percent()}{seeds}",
            "error": _path(*ends, cap=cap) if ends else "",
            "each": [self.at(100 * value, place) for value in spread.values],
            "mean": self.at(100 * spread.mean, place),
        }


def draw(title: str, panels: Sequence[Panel], axis: str | None = None) -> str:
    """Draw an SVG file with one panel per metric.

    `axis` is the label of a logarithmic axis of the points' numbers; None shows names in rows.
    """
    columns = min(2, len(panels))
    count = max((len(panel.points) for panel in panels), default=0)
    above = _HEAD if axis else _HEAD + 14  # with names, the reference has its label above the rows
    height = above + (_PLOT_HEIGHT + 56 if axis else _ROW * count + 44)
    drawn = []
    for place, panel in enumerate(panels):
        left = _EDGE + place % columns * (_WIDTH + _GAP)
        top = _EDGE + _HEAD + place // columns * height
        inner = (
            _numbers(panel, left, top + above, axis) if axis else _names(panel, left, top + above)
        )
        drawn.append({"title": panel.title, "left": left, "top": top, **inner})
    return render(
        "plot.svg",
        ["plots.css"],
        title=title,
        width=2 * _EDGE + columns * _WIDTH + (columns - 1) * _GAP,
        height=_EDGE + _HEAD + -(-len(panels) // columns) * height + 4,
        panels=drawn,
    )


def _path(*points: tuple[float, float], cap: str = "") -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}{cap}" for x, y in points)


def _numbers(panel: Panel, left: float, top: float, axis: str) -> dict[str, Any]:
    """Return points joined by a line; values increase upwards."""
    low, high, ticks = _scale(panel)
    plot = _Plot(left + 40, left + _WIDTH - 10, top, top + _PLOT_HEIGHT, low, high, up=True)
    points = sorted(panel.points, key=lambda point: point.value or 0)
    places = _log_places([point.value or 1 for point in points], plot.left + 16, plot.right - 16)
    means = [plot.at(100 * point.spread.mean, x) for point, x in zip(points, places, strict=True)]
    paths = [("grid", plot.line(tick)) for tick in ticks]
    texts = [("", "end", plot.left - 8, plot.at(tick, 0)[1] + 4, f"{tick:g}") for tick in ticks]
    for point, x in zip(points, places, strict=True):
        texts.append(("", "middle", x, plot.bottom + 18, f"{point.value:g}"))
    texts.append(("", "middle", (plot.left + plot.right) / 2, plot.bottom + 37, axis))
    if panel.reference is not None:
        value = 100 * panel.reference
        paths.append(("reference", plot.line(value)))
        y = plot.at(value, 0)[1] - 5
        texts.append(("", "end", plot.right, y, f"untrained {value:.1f}"))
    if means:
        paths.append(("line", _path(*means)))
    marks = [plot.mark(point, x) for point, x in zip(points, places, strict=True)]
    return {"paths": paths, "texts": texts, "marks": marks}


def _names(panel: Panel, left: float, top: float) -> dict[str, Any]:
    """Return one row per point; values increase to the right."""
    low, high, ticks = _scale(panel)
    names = max((len(point.name) for point in panel.points), default=0)
    bottom = top + _ROW * len(panel.points)
    right = left + _WIDTH - 10
    plot = _Plot(left + 14 + _LETTER * names, right, top, bottom, low, high, up=False)
    paths = [("grid", plot.line(tick)) for tick in ticks]
    texts = [("", "middle", plot.at(tick, 0)[0], bottom + 18, f"{tick:g}") for tick in ticks]
    if panel.reference is not None:
        value = 100 * panel.reference
        paths.append(("reference", plot.line(value, before=4)))
        x = plot.at(value, 0)[0]
        anchor = "start" if x < (plot.left + plot.right) / 2 else "end"
        texts.append(("", anchor, x, top - 7, f"untrained {value:.1f}"))
    marks = []
    for row, point in enumerate(panel.points):
        y = top + _ROW * (row + 0.5)
        texts.append(("name", "start", left, y + 4, point.name))
        marks.append(plot.mark(point, y))
    return {"paths": paths, "texts": texts, "marks": marks}


def _ends(spread: Spread) -> list[float]:
    """Return the ends of an error bar in percent; empty without a deviation."""
    if spread.deviation is None:
        return []
    return [100 * (spread.mean - spread.deviation), 100 * (spread.mean + spread.deviation)]


def _scale(panel: Panel) -> tuple[float, float, list[float]]:
    """Return the lowest and highest value of a plot, and its ticks, in percent."""
    shown = [100 * value for point in panel.points for value in point.spread.values]
    shown += [end for point in panel.points for end in _ends(point.spread)]
    shown += [] if panel.reference is None else [100 * panel.reference]
    low, high = (min(shown), max(shown)) if shown else (0.0, 100.0)
    room = max(high - low, 1.0)
    low, high = low - 0.08 * room, high + 0.08 * room
    step = 10 ** math.floor(math.log10((high - low) / 3))
    step *= max(factor for factor in (1, 2, 5) if factor * step <= (high - low) / 3)
    first = math.ceil(low / step)
    ticks = [round(i * step, 6) for i in range(first, math.floor(high / step) + 1)]
    return low, high, ticks


def _log_places(values: Sequence[float], left: float, right: float) -> list[float]:
    logs = [math.log(value) for value in values]
    extent = logs[-1] - logs[0] if logs else 0.0
    if extent == 0:
        return [(left + right) / 2] * len(logs)
    return [left + (value - logs[0]) / extent * (right - left) for value in logs]
