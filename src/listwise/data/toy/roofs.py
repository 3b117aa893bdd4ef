"""Draw roofs, gables, dormers, towers, domes and ornaments."""

import math

from listwise.data.toy.canvas import Canvas, Grain, Point, shade
from listwise.data.toy.openings import draw_window, outline
from listwise.data.toy.plans import Building, BuildingPlan, Color, Details

_DARK: Color = (52, 58, 68)
_COPPER: Color = (112, 158, 140)


def crown_height(plan: BuildingPlan) -> float:
    """Return the height of the roof above the eaves."""
    if plan.roof == "parapet":
        return 1.2
    steep = {"hip": 0.22, "gable": 0.42, "stepped": 0.46, "mansard": 0.26, "pediment": 0.2}
    return plan.width * steep[plan.roof]


def total_height(building: Building) -> float:
    """Return the height of the highest point above the ground."""
    plan, cap = building.plan, building.details.cap
    roof = plan.eaves + crown_height(plan) + 0.5
    if plan.tower == "none":
        return roof
    if plan.tower == "dome":
        return max(roof, plan.eaves + crown_height(plan) * 0.5 + _dome_radius(plan) * 2.3)
    return max(roof, _shaft_top(plan) + _cap_height(plan, cap) + 0.1)


def draw_roof(canvas: Canvas, building: Building, left: float, stone: Grain, tiles: Grain) -> None:
    """Draw the roof over the whole front, with its dormers and chimneys."""
    plan, details = building.plan, building.details
    right, eaves, rise = left + plan.width, plan.eaves, crown_height(plan)
    middle = left + plan.width / 2
    color = plan.roof_color
    if plan.roof in ("hip", "mansard"):
        for x in (left + plan.width * 0.2, right - plan.width * 0.2):
            top = eaves + rise + 0.4
            canvas.rectangle(x - 0.45, eaves, x + 0.45, top, shade(plan.wall_color, 0.8), stone)
            canvas.rectangle(x - 0.6, top - 0.3, x + 0.6, top, shade(details.trim, 0.8))
        inset = plan.width * (0.2 if plan.roof == "hip" else 0.07)
        slope = [(left - 0.5, eaves), (right + 0.5, eaves), (right - inset, eaves + rise)]
        canvas.polygon([*slope, (left + inset, eaves + rise)], color, tiles)
        if plan.roof == "mansard":
            top = eaves + rise
            canvas.rectangle(left + inset, top - 0.35, right - inset, top, shade(details.trim, 0.9))
        for index in range(details.dormers):
            x = left + plan.width * (index + 1) / (details.dormers + 1)
            _draw_dormer(canvas, plan, details, x, eaves + rise * 0.12, rise * 0.72)
    elif plan.roof == "gable":
        peak = [(left - 0.6, eaves), (right + 0.6, eaves), (middle, eaves + rise)]
        canvas.polygon(peak, shade(color, 0.9), tiles)
        inner = [(left + 0.5, eaves), (right - 0.5, eaves), (middle, eaves + rise - 0.75)]
        canvas.polygon(inner, plan.wall_color, stone)
        canvas.line([peak[0], peak[2], peak[1]], shade(details.trim, 0.95), 0.28)
    elif plan.roof == "stepped":
        canvas.polygon(_steps(left, right, eaves, rise, 0.0), details.trim)
        canvas.polygon(_steps(left, right, eaves, rise, 0.3), plan.wall_color, stone)
    elif plan.roof == "pediment":
        base = [(left - 0.5, eaves), (right + 0.5, eaves), (middle, eaves + rise)]
        canvas.polygon(base, shade(details.trim, 1.04))
        low = eaves + 0.3
        inner = [(left + 1.2, low), (right - 1.2, low), (middle, eaves + rise - 0.5)]
        canvas.polygon(inner, shade(plan.wall_color, 0.85), stone)
    else:
        canvas.rectangle(left, eaves, right, eaves + 0.25, details.trim)
        count = int(plan.width / 0.6)
        for index in range(count):
            x = left + plan.width * (index + 0.5) / count
            canvas.rectangle(x - 0.13, eaves, x + 0.13, eaves + 0.95, shade(details.trim, 0.9))
        canvas.rectangle(left - 0.1, eaves + 0.95, right + 0.1, eaves + 1.2, details.trim)


def _steps(left: float, right: float, eaves: float, rise: float, inset: float) -> list[Point]:
    count = 5
    side: list[Point] = []
    half = (right - left) / 2
    for step in range(count):
        x = left + half * 0.92 * step / count + inset
        side += [(x, eaves + rise * part / count - inset) for part in (step, step + 1)]
    side[0] = (side[0][0], eaves)
    return side + [(left + right - x, y) for x, y in reversed(side)]


def _draw_dormer(
    canvas: Canvas, plan: BuildingPlan, details: Details, x: float, y: float, height: float
) -> None:
    width = height * 0.8
    wall = shade(plan.wall_color, 0.95)
    canvas.rectangle(x - width / 2, y, x + width / 2, y + height * 0.66, wall)
    canvas.rectangle(x - width * 0.3, y + height * 0.1, x + width * 0.3, y + height * 0.6, _DARK)
    canvas.line([(x, y + height * 0.1), (x, y + height * 0.6)], details.trim, 0.1)
    low = y + height * 0.62
    gable = [(x - width * 0.68, low), (x + width * 0.68, low), (x, y + height)]
    canvas.polygon(gable, details.trim)


def _shaft_width(plan: BuildingPlan) -> float:
    return plan.bay_width * (1.15 if plan.tower == "center" else 1.0) + 0.5


def _shaft_top(plan: BuildingPlan) -> float:
    return plan.eaves + max(crown_height(plan) * 0.55, 2.0) + plan.floor_height * 0.9


def _cap_height(plan: BuildingPlan, cap: str) -> float:
    if cap == "battlements":
        return 0.8
    return _shaft_width(plan) * {"pyramid": 0.9, "spire": 1.8, "onion": 1.7}[cap]


def _dome_radius(plan: BuildingPlan) -> float:
    return min(plan.width * 0.24, 4.0)


def draw_towers(
    canvas: Canvas, building: Building, left: float, stone: Grain, tiles: Grain
) -> None:
    """Draw the towers or the dome of a building."""
    plan, details = building.plan, building.details
    if plan.tower == "dome":
        _draw_dome(canvas, plan, details, left + plan.width / 2, stone)
        return
    half = _shaft_width(plan) / 2
    places = {
        "none": [],
        "center": [left + 0.6 + (plan.bays // 2 + 0.5) * plan.bay_width],
        "side": [left + plan.width - half],
        "twin": [left + half, left + plan.width - half],
    }[plan.tower]
    for x in places:
        _draw_tower(canvas, plan, details, x, stone, tiles)


def _draw_tower(
    canvas: Canvas, plan: BuildingPlan, details: Details, x: float, stone: Grain, tiles: Grain
) -> None:
    width, top = _shaft_width(plan), _shaft_top(plan)
    half, trim = width / 2, details.trim
    # A tower in the middle rises behind the front and leaves the door free.
    base = plan.eaves if plan.tower == "center" else 0.0
    canvas.rectangle(x - half, base, x + half, top, shade(plan.wall_color, 1.04), stone)
    canvas.rectangle(x + half * 0.72, base, x + half, top, shade(plan.wall_color, 0.86), stone)
    sills = [plan.eaves + 0.9]
    if base == 0:
        sills += [plan.ground_height + f * plan.floor_height + 0.9 for f in range(plan.floors - 1)]
        sills += [1.3]
    for sill in sills:
        draw_window(canvas, details, x, sill, width * 0.34, plan.floor_height * 0.5)
    canvas.rectangle(x - half - 0.12, plan.eaves - 0.2, x + half + 0.12, plan.eaves + 0.15, trim)
    canvas.rectangle(x - half - 0.2, top - 0.3, x + half + 0.2, top, shade(trim, 1.04))
    tip = top + _cap_height(plan, details.cap)
    if details.cap == "battlements":
        for step in range(4):
            corner = x - half - 0.2 + step * (width + 0.4) / 3.5
            notch = corner + (width + 0.4) / 7
            canvas.rectangle(corner, top, notch, tip, plan.wall_color, stone)
    elif details.cap == "pyramid":
        roof = [(x - half - 0.3, top), (x + half + 0.3, top), (x, tip)]
        canvas.polygon(roof, plan.roof_color, tiles)
    elif details.cap == "spire":
        spire = [(x - half - 0.1, top), (x + half + 0.1, top), (x, tip)]
        canvas.polygon(spire, _DARK, tiles)
        canvas.polygon([spire[2], spire[1], (x + half * 0.3, top)], shade(_DARK, 0.8), tiles)
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


def _draw_dome(
    canvas: Canvas, plan: BuildingPlan, details: Details, x: float, stone: Grain
) -> None:
    radius = _dome_radius(plan)
    base = plan.eaves + crown_height(plan) * 0.5
    drum = base + radius * 0.6
    canvas.rectangle(x - radius, plan.eaves + 0.12, x + radius, drum, plan.wall_color, stone)
    for index in range(5):
        place = x + radius * (index - 2) * 0.4
        window = outline("round", place, base + radius * 0.05, radius * 0.2, radius * 0.42)
        canvas.polygon(window, _DARK)
    canvas.rectangle(x - radius * 1.08, drum - 0.2, x + radius * 1.08, drum + 0.15, details.trim)

    def arc(reach: float, step: float, count: int) -> list[Point]:
        turns = [t * math.pi / step for t in range(count)]
        return [(x + reach * math.cos(t), drum + radius * 1.15 * math.sin(t)) for t in turns]

    canvas.polygon(arc(radius, 24, 25), _COPPER)
    for lean in (-0.7, -0.35, 0.0, 0.35, 0.7):
        canvas.line(arc(radius * lean, 16, 9), shade(_COPPER, 0.8), 0.12)
    lantern = drum + radius * 1.1
    canvas.rectangle(x - 0.4, lantern, x + 0.4, lantern + radius * 0.3, details.trim)
    canvas.disc(x, lantern + radius * 0.38, 0.35, (214, 176, 74))


def draw_ornament(canvas: Canvas, building: Building, left: float) -> None:
    """Draw the clock, rose window, shield or niche over the middle of the front."""
    plan, details = building.plan, building.details
    x = left + 0.6 + (plan.bays // 2 + 0.5) * plan.bay_width
    y, radius = plan.eaves + 0.1, 0.95
    if plan.roof in ("gable", "stepped"):
        x, y, radius = left + plan.width / 2, plan.eaves + crown_height(plan) * 0.36, 1.25
    if plan.roof == "pediment":
        x, y = left + plan.width / 2, plan.eaves + crown_height(plan) * 0.42
    if plan.tower in ("center", "dome") or plan.roof in ("hip", "mansard", "parapet"):
        y, radius = plan.eaves + 0.2, 1.05
    trim = details.trim
    if details.ornament == "clock":
        canvas.disc(x, y, radius, shade(trim, 0.85))
        canvas.disc(x, y, radius * 0.82, (244, 240, 228))
        canvas.line([(x, y), (x, y + radius * 0.66)], (40, 36, 36), 0.14)
        canvas.line([(x, y), (x + radius * 0.45, y - radius * 0.2)], (40, 36, 36), 0.14)
    elif details.ornament == "rose":
        canvas.disc(x, y, radius, trim)
        for petal in range(8):
            angle = petal * math.pi / 4
            color = ((150, 52, 60), (62, 84, 150))[petal % 2]
            reach = radius * 0.56
            left, up = x + reach * math.cos(angle), y + reach * math.sin(angle)
            canvas.disc(left, up, radius * 0.22, color)
        canvas.disc(x, y, radius * 0.26, (220, 180, 80))
    elif details.ornament == "shield":
        shape = [(-0.8, 0.9), (0.8, 0.9), (0.8, -0.1), (0.0, -1.0), (-0.8, -0.1)]
        canvas.polygon([(x + a * radius, y + b * radius) for a, b in shape], trim)
        inner = [(x + a * radius * 0.78, y + b * radius * 0.78) for a, b in shape]
        canvas.polygon(inner, details.door_color)
        level = y + radius * 0.1
        canvas.line([(x - radius * 0.5, level), (x + radius * 0.5, level)], (224, 190, 90), 0.25)
    elif details.ornament == "niche":
        canvas.polygon(outline("round", x, y - radius, radius * 1.5, radius * 2.1), trim)
        hollow = outline("round", x, y - radius * 0.9, radius * 1.05, radius * 1.8)
        canvas.polygon(hollow, shade(trim, 0.45))
        low, high = (radius * 0.22, y - radius * 0.9), (radius * 0.22, y + radius * 0.25)
        canvas.taper(x, low, high, shade(trim, 1.0))
        canvas.disc(x, y + radius * 0.42, radius * 0.2, shade(trim, 1.0))
