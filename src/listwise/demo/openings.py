"""Draw windows and doors."""

import math

from listwise.demo.canvas import Canvas, Point, shade
from listwise.demo.plans import Color, Plan

_GLASS: Color = (58, 72, 88)


def outline(kind: str, x: float, y: float, width: float, height: float) -> list[Point]:
    """Return the outline of an opening centered on x with its bottom at y."""
    half = width / 2
    if kind == "round":
        spring = y + height - half
        arch = [
            (x + half * math.cos(t * math.pi / 10), spring + half * math.sin(t * math.pi / 10))
            for t in range(11)
        ]
    elif kind == "pointed":
        rise = width * 0.95
        spring = y + height - rise
        right = [
            (x + half * (1 - t / 5) ** 0.6 if t < 5 else x, spring + rise * t / 5) for t in range(6)
        ]
        arch = right + [(2 * x - px, py) for px, py in reversed(right[:-1])]
    else:
        arch = [(x + half, y + height), (x - half, y + height)]
    return [(x - half, y), (x + half, y), *arch]


def draw_window(
    canvas: Canvas, plan: Plan, x: float, y: float, width: float, height: float
) -> None:
    """Draw a window centered on x with its sill at y."""
    if plan.window == "twin":
        for side in (-1, 1):
            _light(canvas, plan, "round", x + side * width * 0.28, y, width * 0.48, height)
        return
    if plan.window == "wide":
        width, height = width * 1.3, height * 0.72
    kind = plan.window if plan.window in ("round", "pointed") else "square"
    if plan.shutters is not None and plan.window != "wide":
        for side in (-1, 1):
            near, far = x + side * width * 0.54, x + side * width * 0.92
            canvas.rectangle(min(near, far), y, max(near, far), y + height * 0.9, plan.shutters)
            for step in range(1, 6):
                level = y + height * 0.15 * step
                canvas.line([(near, level), (far, level)], shade(plan.shutters, 0.75), 0.05)
    _light(canvas, plan, kind, x, y, width, height)


def _light(
    canvas: Canvas, plan: Plan, kind: str, x: float, y: float, width: float, height: float
) -> None:
    trim, border = plan.trim, 0.3 if plan.hood == "frame" else 0.16
    frame = outline(kind, x, y - border, width + 2 * border, height + 2 * border)
    canvas.polygon(frame, shade(trim, 0.97))
    canvas.polygon(outline(kind, x, y, width, height), shade(_GLASS, 0.75))
    canvas.polygon(outline(kind, x, y, width, height * 0.86), _GLASS)
    low, high = y + height * 0.1, y + height * 0.55
    sky = [(x - width * 0.4, low), (x - width * 0.1, low), (x + width * 0.3, high), (x, high)]
    canvas.polygon(sky, shade(_GLASS, 1.35))
    if plan.glazing != "plain":
        canvas.line([(x, y), (x, y + height)], trim, 0.1)
        levels = (0.55,) if plan.glazing == "cross" else (0.25, 0.5)
        for level in levels:
            ends = [(x - width / 2, y + height * level), (x + width / 2, y + height * level)]
            canvas.line(ends, trim, 0.1)
    canvas.rectangle(x - width * 0.62, y - 0.3, x + width * 0.62, y - 0.08, shade(trim, 1.04))
    canvas.rectangle(x - width * 0.58, y - 0.38, x + width * 0.58, y - 0.3, shade(trim, 0.6))
    top = y + height + border
    if plan.hood == "lintel":
        canvas.rectangle(x - width * 0.7, top, x + width * 0.7, top + 0.28, shade(trim, 1.05))
        canvas.rectangle(x - width * 0.66, top - 0.08, x + width * 0.66, top, shade(trim, 0.6))
    elif plan.hood == "peak":
        peak = [(x - width * 0.75, top), (x + width * 0.75, top), (x, top + 0.55)]
        canvas.polygon(peak, shade(trim, 1.05))
        canvas.line(peak[:2], shade(trim, 0.6), 0.09)


def draw_door(canvas: Canvas, plan: Plan, x: float, width: float, height: float) -> None:
    """Draw the main door, centered on x."""
    trim, color = plan.trim, plan.door_color
    kind = "square" if plan.door == "porch" else plan.door
    if plan.door == "porch":
        for side in (-1, 1):
            post = x + side * width * 0.8
            canvas.rectangle(post - 0.2, 0, post + 0.2, height * 0.98, shade(trim, 0.98))
            canvas.rectangle(post + 0.08, 0.3, post + 0.2, height * 0.95, shade(trim, 0.8))
            canvas.rectangle(post - 0.3, 0, post + 0.3, 0.3, trim)
        canvas.rectangle(x - width * 1.05, height, x + width * 1.05, height + 0.35, trim)
        base = height + 0.35
        gable = [(x - width * 1.1, base), (x + width * 1.1, base), (x, height + 1.1)]
        canvas.polygon(gable, shade(trim, 1.05))
        inner = [(px * 0.6 + x * 0.4, py * 0.6 + (height + 0.55) * 0.4) for px, py in gable]
        canvas.polygon(inner, shade(trim, 0.8))
    else:
        canvas.polygon(outline(kind, x, 0, width + 0.7, height + 0.4), trim)
        canvas.polygon(outline(kind, x, 0, width + 0.25, height + 0.15), shade(trim, 0.7))
    canvas.polygon(outline(kind, x, 0, width, height - 0.1), shade(color, 0.9))
    canvas.line([(x, 0), (x, height - 0.2)], shade(color, 0.5), 0.08)
    panel = shade(color, 1.25)
    for left, right in ((x - width * 0.4, x - width * 0.1), (x + width * 0.1, x + width * 0.4)):
        for low, high in ((0.08, 0.36), (0.42, 0.66)):
            canvas.rectangle(left, height * low, right, height * high, panel)
    canvas.rectangle(x - width * 0.9, 0, x + width * 0.9, 0.16, shade(trim, 0.85))
