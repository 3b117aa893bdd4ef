"""Plots as SVG: figures with their deviations over an axis of numbers, or by name.

They stand on a ground of their own and follow the reader's light or dark setting.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from listwise.studies.tables import Spread

_STYLE = """
svg { --ground: #ffffff; --ink: #1f2328; --faint: #59636e; --grid: #dfe4e9; --mark: #0b62c4 }
@media (prefers-color-scheme: dark) {
  svg { --ground: #0d1117; --ink: #e6edf3; --faint: #9aa4af; --grid: #2d333b; --mark: #58a6ff }
}
.ground { fill: var(--ground) }
text { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: var(--faint) }
.title { font-size: 16px; font-weight: 600; fill: var(--ink) }
.head { font-size: 13px; font-weight: 600; fill: var(--ink) }
.name { fill: var(--ink) }
.grid { stroke: var(--grid); fill: none }
.reference { stroke: var(--faint); stroke-dasharray: 4 4; fill: none }
.line { stroke: var(--mark); stroke-width: 1.5; opacity: .55; fill: none }
.error { stroke: var(--mark); stroke-width: 1.5; fill: none }
.mean { fill: var(--mark) }
.each { fill: none; stroke: var(--mark); opacity: .55 }
"""
_EDGE, _GAP = 20, 28
_WIDTH = 400  # of a panel with its labels
_HEAD = 34  # above the panels, and above each plot in its panel
_PLOT_HEIGHT = 190
_ROW = 24  # height of a named row
_LETTER = 6.6  # width of a letter, about


@dataclass(frozen=True)
class Point:
    """A figure from 0 to 1 of something that has a name, and a number if there is an axis."""

    name: str
    spread: Spread
    value: float | None = None


@dataclass(frozen=True)
class Panel:
    """One figure of everything compared; `reference` is that of a network before training."""

    title: str
    points: Sequence[Point]
    reference: float | None = None


@dataclass(frozen=True)
class _Frame:
    """A plot's edges in the drawing, and the range of figures in percent from edge to edge."""

    left: float
    right: float
    top: float
    bottom: float
    low: float
    high: float

    def across(self, percent: float) -> float:
        """A figure's place from left to right."""
        return self.left + (percent - self.low) / (self.high - self.low) * (self.right - self.left)

    def up(self, percent: float) -> float:
        """A figure's place from bottom to top."""
        return self.bottom - (percent - self.low) / (self.high - self.low) * (
            self.bottom - self.top
        )


def draw(title: str, panels: Sequence[Panel], axis: str | None = None) -> str:
    """A whole SVG file with a panel for each kind of figure.

    Args:
        title: above all of them.
        panels: what is in them.
        axis: what the points' numbers are, on a logarithmic axis; None puts names in rows.
    """
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    count = max((len(panel.points) for panel in panels), default=0)
    above = _HEAD if axis else _HEAD + 14  # there the reference is named above the rows
    height = above + (_PLOT_HEIGHT + 56 if axis else _ROW * count + 44)
    width = 2 * _EDGE + columns * _WIDTH + (columns - 1) * _GAP
    total = _EDGE + _HEAD + rows * height + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" width="{width}" '
        f'height="{total}" role="img" aria-label="{escape(title)}">',
        f"<style>{_STYLE}</style>",
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


def _draw_numbers(panel: Panel, left: float, top: float, axis: str) -> list[str]:
    """Points joined by a line; figures go upwards."""
    low, high, ticks = _scale(panel)
    frame = _Frame(left + 40, left + _WIDTH - 10, top, top + _PLOT_HEIGHT, low, high)
    parts = []
    for tick in ticks:
        y = frame.up(tick)
        parts.append(f'<path class="grid" d="M{frame.left} {y:.1f}H{frame.right}"/>')
        parts.append(
            f'<text x="{frame.left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    points = sorted(panel.points, key=lambda point: point.value or 0)
    places = _log_places([point.value or 1 for point in points], frame.left + 16, frame.right - 16)
    for point, x in zip(points, places, strict=True):
        parts.append(
            f'<text x="{x:.1f}" y="{frame.bottom + 18}" text-anchor="middle">{point.value:g}</text>'
        )
    parts.append(
        f'<text x="{(frame.left + frame.right) / 2:.1f}" y="{frame.bottom + 37}" '
        f'text-anchor="middle">{escape(axis)}</text>'
    )
    if panel.reference is not None:
        y = frame.up(100 * panel.reference)
        parts.append(f'<path class="reference" d="M{frame.left} {y:.1f}H{frame.right}"/>')
        parts.append(
            f'<text x="{frame.right}" y="{y - 5:.1f}" text-anchor="end">untrained '
            f"{100 * panel.reference:.1f}</text>"
        )
    path = " ".join(
        f"{x:.1f},{frame.up(100 * point.spread.mean):.1f}"
        for point, x in zip(points, places, strict=True)
    )
    parts.append(f'<polyline class="line" points="{path}"/>')
    for point, x in zip(points, places, strict=True):
        marks = [(x, frame.up(100 * value)) for value in point.spread.values]
        ends = [(x, frame.up(end)) for end in _ends(point.spread)]
        parts.append(_mark(point, (x, frame.up(100 * point.spread.mean)), marks, ends))
    return parts


def _draw_names(panel: Panel, left: float, top: float, axis: str) -> list[str]:
    """A row for each point; figures go to the right."""
    low, high, ticks = _scale(panel)
    names = max((len(point.name) for point in panel.points), default=0)
    bottom = top + _ROW * len(panel.points)
    frame = _Frame(left + 14 + _LETTER * names, left + _WIDTH - 10, top, bottom, low, high)
    parts = []
    for tick in ticks:
        x = frame.across(tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {top}V{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>')
    if panel.reference is not None:
        x = frame.across(100 * panel.reference)
        anchor = "start" if x < (frame.left + frame.right) / 2 else "end"
        parts.append(f'<path class="reference" d="M{x:.1f} {top - 4}V{bottom}"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{top - 7}" text-anchor="{anchor}">untrained '
            f"{100 * panel.reference:.1f}</text>"
        )
    for row, point in enumerate(panel.points):
        y = top + _ROW * (row + 0.5)
        parts.append(f'<text class="name" x="{left}" y="{y + 4:.1f}">{escape(point.name)}</text>')
        marks = [(frame.across(100 * value), y) for value in point.spread.values]
        ends = [(frame.across(end), y) for end in _ends(point.spread)]
        parts.append(_mark(point, (frame.across(100 * point.spread.mean), y), marks, ends))
    return parts


def _mark(
    point: Point,
    mean: tuple[float, float],
    each: Sequence[tuple[float, float]],
    ends: Sequence[tuple[float, float]],
) -> str:
    """A point with its error bar and the values behind it; pointing at it shows the figures."""
    count = len(point.spread.values)
    label = f"{point.name}: {point.spread.percent()}{f' ({count} seeds)' if count > 1 else ''}"
    parts = [f"<g><title>{escape(label)}</title>"]
    if ends:
        (x, y), (to_x, to_y) = ends
        # Short strokes across both ends.
        across = "v8m0 -4" if y == to_y else "h8m-4 0"
        before = "m0 -4" if y == to_y else "m-4 0"
        parts.append(
            f'<path class="error" d="M{x:.1f} {y:.1f}{before}{across}L{to_x:.1f} {to_y:.1f}'
            f'{before}{across}"/>'
        )
        parts += [f'<circle class="each" cx="{a:.1f}" cy="{b:.1f}" r="2.5"/>' for a, b in each]
    parts.append(f'<circle class="mean" cx="{mean[0]:.1f}" cy="{mean[1]:.1f}" r="4.5"/></g>')
    return "".join(parts)


def _ends(spread: Spread) -> list[float]:
    """The ends of an error bar, in percent; none where there is no deviation."""
    if spread.deviation is None:
        return []
    return [100 * (spread.mean - spread.deviation), 100 * (spread.mean + spread.deviation)]


def _scale(panel: Panel) -> tuple[float, float, list[float]]:
    """Lowest and highest figure of a plot, and round figures between them, in percent."""
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
