"""SVG plots of metrics with their deviations, over an axis of numbers or by name.

They have their own background and follow the light or dark mode of the reader.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

import numpy as np

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
class _Frame:
    """The edges of a plot in the drawing, and the range of values in percent, `low` to `high`.

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

    def line(self, kind: str, percent: float, before: float = 0.0) -> str:
        """Draw a line across the plot at a value; it may start `before` the edge."""
        start, end = (self.left, self.right) if self.up else (self.top - before, self.bottom)
        (x, y), (to_x, to_y) = self.at(percent, start), self.at(percent, end)
        return f'<path class="{kind}" d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}"/>'

    def mark(self, point: Point, place: float) -> str:
        """Draw a point with its error bar and single values; hovering shows the numbers."""
        spread = point.spread
        count = len(spread.values)
        label = f"{point.name}: {spread.percent()}{f' ({count} seeds)' if count > 1 else ''}"
        parts = [f"<g><title>{escape(label)}</title>"]
        if ends := _ends(spread):
            (x, y), (to_x, to_y) = (self.at(end, place) for end in ends)
            cap = "m-4 0h8m-4 0" if self.up else "m0 -4v8m0 -4"  # a short stroke across
            path = f"M{x:.1f} {y:.1f}{cap}L{to_x:.1f} {to_y:.1f}{cap}"
            parts.append(f'<path class="error" d="{path}"/>')
            for value in spread.values:
                x, y = self.at(100 * value, place)
                parts.append(f'<circle class="each" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>')
        x, y = self.at(100 * spread.mean, place)
        return "".join([*parts, f'<circle class="mean" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/></g>'])


def draw(title: str, panels: Sequence[Panel], axis: str | None = None) -> str:
    """Draw an SVG file with one panel per metric.

    `axis` is the label of a logarithmic axis of the points' numbers; None shows names in rows.
    """
    style = files("listwise.studies").joinpath("plots.css").read_text("utf-8")
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    count = max((len(panel.points) for panel in panels), default=0)
    above = _HEAD if axis else _HEAD + 14  # with names, the reference has its label above the rows
    height = above + (_PLOT_HEIGHT + 56 if axis else _ROW * count + 44)
    width = 2 * _EDGE + columns * _WIDTH + (columns - 1) * _GAP
    total = _EDGE + _HEAD + rows * height + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" width="{width}" '
        f'height="{total}" role="img" aria-label="{escape(title)}">',
        f"<style>{style}</style>",
        f'<rect class="ground" width="{width}" height="{total}" rx="8"/>',
        f'<text class="title" x="{_EDGE}" y="{_EDGE + 16}">{escape(title)}</text>',
    ]
    for place, panel in enumerate(panels):
        left = _EDGE + place % columns * (_WIDTH + _GAP)
        top = _EDGE + _HEAD + place // columns * height
        parts.append(f'<text class="head" x="{left}" y="{top + 16}">{escape(panel.title)}</text>')
        inner = _draw_numbers if axis else _draw_names
        parts += inner(panel, left, top + above, axis or "")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, content: str, anchor: str = "start", kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def _draw_numbers(panel: Panel, left: float, top: float, axis: str) -> list[str]:
    """Draw points joined by a line; values increase upwards."""
    low, high, ticks = _scale(panel)
    frame = _Frame(left + 40, left + _WIDTH - 10, top, top + _PLOT_HEIGHT, low, high, up=True)
    parts = []
    for tick in ticks:
        parts.append(frame.line("grid", tick))
        parts.append(_text(frame.left - 8, frame.at(tick, 0)[1] + 4, f"{tick:g}", "end"))
    points = sorted(panel.points, key=lambda point: point.value or 0)
    places = _log_places([point.value or 1 for point in points], frame.left + 16, frame.right - 16)
    for point, x in zip(points, places, strict=True):
        parts.append(_text(x, frame.bottom + 18, f"{point.value:g}", "middle"))
    parts.append(_text((frame.left + frame.right) / 2, frame.bottom + 37, axis, "middle"))
    if panel.reference is not None:
        value = 100 * panel.reference
        parts.append(frame.line("reference", value))
        y = frame.at(value, 0)[1]
        parts.append(_text(frame.right, y - 5, f"untrained {value:.1f}", "end"))
    means = [frame.at(100 * point.spread.mean, x) for point, x in zip(points, places, strict=True)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in means)
    parts.append(f'<polyline class="line" points="{path}"/>')
    return parts + [frame.mark(point, x) for point, x in zip(points, places, strict=True)]


def _draw_names(panel: Panel, left: float, top: float, axis: str) -> list[str]:
    """Draw one row per point; values increase to the right."""
    low, high, ticks = _scale(panel)
    names = max((len(point.name) for point in panel.points), default=0)
    bottom = top + _ROW * len(panel.points)
    right = left + _WIDTH - 10
    frame = _Frame(left + 14 + _LETTER * names, right, top, bottom, low, high, up=False)
    parts = []
    for tick in ticks:
        parts.append(frame.line("grid", tick))
        parts.append(_text(frame.at(tick, 0)[0], bottom + 18, f"{tick:g}", "middle"))
    if panel.reference is not None:
        value = 100 * panel.reference
        parts.append(frame.line("reference", value, before=4))
        x = frame.at(value, 0)[0]
        anchor = "start" if x < (frame.left + frame.right) / 2 else "end"
        parts.append(_text(x, top - 7, f"untrained {value:.1f}", anchor))
    for row, point in enumerate(panel.points):
        y = top + _ROW * (row + 0.5)
        parts += [_text(left, y + 4, point.name, kind="name"), frame.mark(point, y)]
    return parts


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
