"""Draw roofs, gables, dormers, towers, domes and ornaments."""

import math

from listwise.demo.canvas import Canvas, Grain, Point, shade
from listwise.demo.openings import draw_window, outline
from listwise.demo.plans import LEFT, Color, Plan

_DARK: Color = (52, 58, 68)
_COPPER: Color = (112, 158, 140)


def crown_height(plan: Plan) -> float:
    """Return the height of the roof above the eaves."""
    if plan.roof == "parapet":
        return 1.2
    steep = {"hip": 0.22, "gable": 0.42, "stepped": 0.46, "mansard": 0.26, "pediment": 0.2}
    return plan.width * steep[plan.roof]


def total_height(plan: Plan) -> float:
    """Return the height of the highest point above the ground."""
    roof = plan.eaves + crown_height(plan) + 0.5
    if plan.tower == "none":
        return roof
    if plan.tower == "dome":
        return max(roof, plan.eaves + crown_height(plan) * 0.5 + _dome_radius(plan) * 2.3)
    return max(roof, _shaft_top(plan) + _cap_height(plan) + 0.1)


def draw_roof(canvas: Canvas, plan: Plan, stone: Grain, tiles: Grain) -> None:
    """Draw the roof over the whole front, with its dormers and chimneys."""
    left, right, middle = LEFT, plan.right, LEFT + plan.width / 2
    eaves, rise = plan.eaves, crown_height(plan)
    if plan.roof in ("hip", "mansard"):
        for x in (left + plan.width * 0.2, right - plan.width * 0.2):
            top = eaves + rise + 0.4
            canvas.rectangle(x - 0.45, eaves, x + 0.45, top, shade(plan.wall_color, 0.8), stone)
            canvas.rectangle(x - 0.6, top - 0.3, x + 0.6, top, shade(plan.trim, 0.8))
        inset = plan.width * (0.2 if plan.roof == "hip" else 0.07)
        slope = [(left - 0.5, eaves), (right + 0.5, eaves), (right - inset, eaves + rise)]
        canvas.polygon([*slope, (left + inset, eaves + rise)], plan.roof_color, tiles)
        if plan.roof == "mansard":
            top = eaves + rise
            canvas.rectangle(left + inset, top - 0.35, right - inset, top, shade(plan.trim, 0.9))
        for index in range(plan.dormers):
            x = left + plan.width * (index + 1) / (plan.dormers + 1)
            _draw_dormer(canvas, plan, x, eaves + rise * 0.12, rise * 0.72)
    elif plan.roof == "gable":
        peak = [(left - 0.6, eaves), (right + 0.6, eaves), (middle, eaves + rise)]
        canvas.polygon(peak, shade(plan.roof_color, 0.9), tiles)
        inner = [(left + 0.5, eaves), (right - 0.5, eaves), (middle, eaves + rise - 0.75)]
        canvas.polygon(inner, plan.wall_color, stone)
        canvas.line([peak[0], peak[2], peak[1]], shade(plan.trim, 0.95), 0.28)
    elif plan.roof == "stepped":
        canvas.polygon(_steps(left, right, eaves, rise, 0.0), plan.trim)
        canvas.polygon(_steps(left, right, eaves, rise, 0.3), plan.wall_color, stone)
    elif plan.roof == "pediment":
        half = plan.width / 2
        canvas.taper(middle, (half + 0.5, eaves), (0, eaves + rise), shade(plan.trim, 1.04))
        field = (half - 1.2, eaves + 0.3), (0, eaves + rise - 0.5)
        canvas.taper(middle, *field, shade(plan.wall_color, 0.85), stone)
    else:
        canvas.rectangle(left, eaves, right, eaves + 0.25, plan.trim)
        count = int(plan.width / 0.6)
        for index in range(count):
            x = left + plan.width * (index + 0.5) / count
            canvas.rectangle(x - 0.13, eaves, x + 0.13, eaves + 0.95, shade(plan.trim, 0.9))
        canvas.rectangle(left - 0.1, eaves + 0.95, right + 0.1, eaves + 1.2, plan.trim)


def _steps(left: float, right: float, eaves: float, rise: float, inset: float) -> list[Point]:
    count = 5
    side: list[Point] = []
    half = (right - left) / 2
    for step in range(count):
        x = left + half * 0.92 * step / count + inset
        side += [(x, eaves + rise * part / count - inset) for part in (step, step + 1)]
    side[0] = (side[0][0], eaves)
    return side + [(left + right - x, y) for x, y in reversed(side)]


def _draw_dormer(canvas: Canvas, plan: Plan, x: float, y: float, height: float) -> None:
    width = height * 0.8
    wall = shade(plan.wall_color, 0.95)
    canvas.rectangle(x - width / 2, y, x + width / 2, y + height * 0.66, wall)
    canvas.rectangle(x - width * 0.3, y + height * 0.1, x + width * 0.3, y + height * 0.6, _DARK)
    canvas.line([(x, y + height * 0.1), (x, y + height * 0.6)], plan.trim, 0.1)
    canvas.taper(x, (width * 0.68, y + height * 0.62), (0, y + height), plan.trim)


def _shaft_width(plan: Plan) -> float:
    return plan.bay_width * (1.15 if plan.tower == "center" else 1.0) + 0.5


def _shaft_top(plan: Plan) -> float:
    return plan.eaves + max(crown_height(plan) * 0.55, 2.0) + plan.floor_height * 0.9


def _cap_height(plan: Plan) -> float:
    if plan.cap == "battlements":
        return 0.8
    return _shaft_width(plan) * {"pyramid": 0.9, "spire": 1.8, "onion": 1.7}[plan.cap]


def _dome_radius(plan: Plan) -> float:
    return min(plan.width * 0.24, 4.0)


def draw_towers(canvas: Canvas, plan: Plan, stone: Grain, tiles: Grain) -> None:
    """Draw the towers or the dome of a building."""
    if plan.tower == "dome":
        _draw_dome(canvas, plan, stone)
        return
    half = _shaft_width(plan) / 2
    places = {
        "none": [],
        "center": [plan.bay(plan.bays // 2 + 0.5)],
        "side": [plan.right - half],
        "twin": [LEFT + half, plan.right - half],
    }[plan.tower]
    for x in places:
        _draw_tower(canvas, plan, x, stone, tiles)


def _draw_tower(canvas: Canvas, plan: Plan, x: float, stone: Grain, tiles: Grain) -> None:
    width, top = _shaft_width(plan), _shaft_top(plan)
    half, trim = width / 2, plan.trim
    # A tower in the middle rises behind the front and leaves the door free.
    base = plan.eaves if plan.tower == "center" else 0.0
    canvas.rectangle(x - half, base, x + half, top, shade(plan.wall_color, 1.04), stone)
    canvas.rectangle(x + half * 0.72, base, x + half, top, shade(plan.wall_color, 0.86), stone)
    sills = [plan.eaves + 0.9]
    if base == 0:
        sills += [plan.ground_height + f * plan.floor_height + 0.9 for f in range(plan.floors - 1)]
        sills += [1.3]
    for sill in sills:
        draw_window(canvas, plan, x, sill, width * 0.34, plan.floor_height * 0.5)
    canvas.rectangle(x - half - 0.12, plan.eaves - 0.2, x + half + 0.12, plan.eaves + 0.15, trim)
    canvas.rectangle(x - half - 0.2, top - 0.3, x + half + 0.2, top, shade(trim, 1.04))
    tip = top + _cap_height(plan)
    if plan.cap == "battlements":
        for step in range(4):
            corner = x - half - 0.2 + step * (width + 0.4) / 3.5
            notch = corner + (width + 0.4) / 7
            canvas.rectangle(corner, top, notch, tip, plan.wall_color, stone)
    elif plan.cap == "pyramid":
        canvas.taper(x, (half + 0.3, top), (0, tip), plan.roof_color, tiles)
    elif plan.cap == "spire":
        canvas.taper(x, (half + 0.1, top), (0, tip), _DARK, tiles)
        shadow = [(x, tip), (x + half + 0.1, top), (x + half * 0.3, top)]
        canvas.polygon(shadow, shade(_DARK, 0.8), tiles)
        canvas.disc(x, tip - 0.1, 0.16, (214, 176, 74))
    else:
        canvas.polygon(_onion(x, top, half, (tip - top) * 0.8), _COPPER)
        canvas.line([(x, top + (tip - top) * 0.75), (x, tip)], (214, 176, 74), 0.12)


def _onion(x: float, y: float, half: float, height: float) -> list[Point]:
    profile = [
        (0.75, 0.0),
        (1.0, 0.14),
        (1.05, 0.28),
        (0.9, 0.45),
        (0.5, 0.62),
        (0.2, 0.78),
        (0.0, 1.0),
    ]
    right = [(x + half * w, y + height * h) for w, h in profile]
    return right + [(2 * x - px, py) for px, py in reversed(right)]


def _draw_dome(canvas: Canvas, plan: Plan, stone: Grain) -> None:
    x, radius = LEFT + plan.width / 2, _dome_radius(plan)
    base = plan.eaves + crown_height(plan) * 0.5
    drum = base + radius * 0.6
    canvas.rectangle(x - radius, plan.eaves + 0.12, x + radius, drum, plan.wall_color, stone)
    for index in range(5):
        place = x + radius * (index - 2) * 0.4
        window = outline("round", place, base + radius * 0.05, radius * 0.2, radius * 0.42)
        canvas.polygon(window, _DARK)
    canvas.rectangle(x - radius * 1.08, drum - 0.2, x + radius * 1.08, drum + 0.15, plan.trim)

    def arc(reach: float, step: float, count: int) -> list[Point]:
        turns = [t * math.pi / step for t in range(count)]
        return [(x + reach * math.cos(t), drum + radius * 1.15 * math.sin(t)) for t in turns]

    canvas.polygon(arc(radius, 24, 25), _COPPER)
    for lean in (-0.7, -0.35, 0.0, 0.35, 0.7):
        canvas.line(arc(radius * lean, 16, 9), shade(_COPPER, 0.8), 0.12)
    lantern = drum + radius * 1.1
    canvas.rectangle(x - 0.4, lantern, x + 0.4, lantern + radius * 0.3, plan.trim)
    canvas.disc(x, lantern + radius * 0.38, 0.35, (214, 176, 74))


def draw_ornament(canvas: Canvas, plan: Plan) -> None:
    """Draw the clock, rose window, shield or niche over the middle of the front."""
    x = plan.bay(plan.bays // 2 + 0.5)
    y, radius = plan.eaves + 0.1, 0.95
    if plan.roof in ("gable", "stepped"):
        x, y, radius = LEFT + plan.width / 2, plan.eaves + crown_height(plan) * 0.36, 1.25
    if plan.roof == "pediment":
        x, y = LEFT + plan.width / 2, plan.eaves + crown_height(plan) * 0.42
    if plan.tower in ("center", "dome") or plan.roof in ("hip", "mansard", "parapet"):
        y, radius = plan.eaves + 0.2, 1.05
    trim = plan.trim
    if plan.ornament == "clock":
        canvas.disc(x, y, radius, shade(trim, 0.85))
        canvas.disc(x, y, radius * 0.82, (244, 240, 228))
        canvas.line([(x, y), (x, y + radius * 0.66)], (40, 36, 36), 0.14)
        canvas.line([(x, y), (x + radius * 0.45, y - radius * 0.2)], (40, 36, 36), 0.14)
    elif plan.ornament == "rose":
        canvas.disc(x, y, radius, trim)
        for petal in range(8):
            angle = petal * math.pi / 4
            color = ((150, 52, 60), (62, 84, 150))[petal % 2]
            reach = radius * 0.56
            left, up = x + reach * math.cos(angle), y + reach * math.sin(angle)
            canvas.disc(left, up, radius * 0.22, color)
        canvas.disc(x, y, radius * 0.26, (220, 180, 80))
    elif plan.ornament == "shield":
        shape = [(-0.8, 0.9), (0.8, 0.9), (0.8, -0.1), (0.0, -1.0), (-0.8, -0.1)]
        canvas.polygon([(x + a * radius, y + b * radius) for a, b in shape], trim)
        inner = [(x + a * radius * 0.78, y + b * radius * 0.78) for a, b in shape]
        canvas.polygon(inner, plan.door_color)
        level = y + radius * 0.1
        canvas.line([(x - radius * 0.5, level), (x + radius * 0.5, level)], (224, 190, 90), 0.25)
    elif plan.ornament == "niche":
        canvas.polygon(outline("round", x, y - radius, radius * 1.5, radius * 2.1), trim)
        hollow = outline("round", x, y - radius * 0.9, radius * 1.05, radius * 1.8)
        canvas.polygon(hollow, shade(trim, 0.45))
        low, high = (radius * 0.22, y - radius * 0.9), (radius * 0.22, y + radius * 0.25)
        canvas.taper(x, low, high, shade(trim, 1.0))
        canvas.disc(x, y + radius * 0.42, radius * 0.2, shade(trim, 1.0))
