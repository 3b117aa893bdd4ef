"""Draw the front and the side of a building as flat pictures with a transparent background."""

from dataclasses import dataclass
from itertools import pairwise

from PIL import Image

from listwise.demo.canvas import Canvas, Grain, shade
from listwise.demo.openings import draw_door, draw_window, outline
from listwise.demo.plans import LEFT, Color, Plan, Rng
from listwise.demo.roofs import draw_ornament, draw_roof, draw_towers, total_height

_BEAM: Color = (86, 58, 42)
_PIXELS = 340  # of the longer side of a finished front


@dataclass(frozen=True)
class DrawnBuilding:
    """The pictures of a building at several sizes; lengths are in metres."""

    front: list[Image.Image]
    side: list[Image.Image]
    width: float
    height: float
    depth: float
    eaves: float


def build(plan: Plan, rng: Rng, pixels: int = _PIXELS) -> DrawnBuilding:
    """Draw a building's front and side; the longer side of the front has so many pixels."""
    width, height = plan.width + 2 * LEFT, total_height(plan)
    scale = pixels / max(width, height)
    front = Canvas(width, height, scale)
    _draw_front(front, plan, rng)
    side_height = plan.eaves + 2.2
    side = Canvas(plan.depth, side_height, scale * 0.8)
    _draw_side(side, plan, rng)
    return DrawnBuilding(_sizes(front), _sizes(side), plan.width, height, plan.depth, side_height)


def _sizes(canvas: Canvas) -> list[Image.Image]:
    """Return the picture at full, half and quarter size, for buildings at a distance."""
    picture = canvas.finish()
    return [picture, picture.reduce(2), picture.reduce(4)]


def _draw_front(canvas: Canvas, plan: Plan, rng: Rng) -> None:
    stone, tiles = canvas.grain(plan.wall, rng), canvas.grain("tiles", rng)
    draw_roof(canvas, plan, stone, tiles)
    canvas.rectangle(LEFT, 0, plan.right, plan.eaves, plan.wall_color, stone)
    _draw_skeleton(canvas, plan, stone)
    _draw_floors(canvas, plan)
    _draw_ground_floor(canvas, plan)
    draw_towers(canvas, plan, stone, tiles)
    draw_ornament(canvas, plan)


def _draw_skeleton(canvas: Canvas, plan: Plan, stone: Grain) -> None:
    """Draw plinth, courses, corners and cornice."""
    left, right, eaves, trim = LEFT, plan.right, plan.eaves, plan.trim
    if plan.wall == "timber":
        _draw_beams(canvas, plan)
    canvas.rectangle(left - 0.1, 0, right + 0.1, 0.7, shade(plan.wall_color, 0.72), stone)
    if plan.band:
        for floor in range(1, plan.floors):
            level = plan.ground_height + (floor - 1) * plan.floor_height
            canvas.rectangle(left, level - 0.12, right, level + 0.32, trim)
            canvas.rectangle(left, level - 0.24, right, level - 0.12, shade(plan.wall_color, 0.62))
    if plan.pilasters:
        for bay in range(plan.bays + 1):
            x = plan.bay(bay)
            canvas.rectangle(x - 0.22, 0.7, x + 0.22, plan.eaves, shade(trim, 0.95))
            canvas.rectangle(x + 0.1, 0.7, x + 0.22, plan.eaves, shade(trim, 0.78))
    elif plan.wall in ("brick", "plaster"):
        for step in range(int(plan.eaves / 0.7)):
            reach = 0.75 if step % 2 else 0.45
            level = step * 0.7
            canvas.rectangle(left, level, left + reach, level + 0.62, shade(trim, 0.93))
            canvas.rectangle(right - reach, level, right, level + 0.62, shade(trim, 0.93))
    canvas.rectangle(left, eaves - 0.75, right, eaves - 0.5, shade(plan.wall_color, 0.6))
    canvas.rectangle(left - 0.3, eaves - 0.5, right + 0.3, eaves - 0.2, trim)
    canvas.rectangle(left - 0.5, eaves - 0.2, right + 0.5, eaves + 0.12, shade(trim, 1.06))


def _draw_beams(canvas: Canvas, plan: Plan) -> None:
    left, right = LEFT, plan.right
    levels = [plan.ground_height + f * plan.floor_height for f in range(plan.floors)]
    for low, high in pairwise(levels):
        canvas.line([(left, low), (right, low)], _BEAM, 0.3)
        for bay in range(plan.bays + 1):
            x = plan.bay(bay)
            canvas.line([(x, low), (x, high)], _BEAM, 0.24)
        canvas.line([(left, high), (left + 1.6, low)], _BEAM, 0.2)
        canvas.line([(right, high), (right - 1.6, low)], _BEAM, 0.2)


def _draw_floors(canvas: Canvas, plan: Plan) -> None:
    for floor in range(1, plan.floors):
        sill = plan.ground_height + (floor - 1) * plan.floor_height + 0.9
        height = plan.floor_height * (0.56 if floor < plan.floors - 1 else 0.5)
        for bay in range(plan.bays):
            x = plan.bay(bay + 0.5)
            draw_window(canvas, plan, x, sill, plan.bay_width * 0.42, height)


def _draw_ground_floor(canvas: Canvas, plan: Plan) -> None:
    middle = plan.bays // 2
    height = plan.ground_height * 0.72
    for bay in range(plan.bays):
        x = plan.bay(bay + 0.5)
        width = plan.bay_width
        if bay == middle:
            continue
        if plan.ground == "arcade":
            canvas.polygon(outline("round", x, 0, width * 0.82, height + 0.3), plan.trim)
            canvas.polygon(outline("round", x, 0, width * 0.66, height), (44, 40, 40))
            canvas.polygon(outline("round", x + 0.1, 0, width * 0.5, height * 0.8), (66, 60, 58))
        elif plan.ground == "shop":
            canvas.rectangle(x - width * 0.44, 0, x + width * 0.44, height, plan.door_color)
            canvas.rectangle(x - width * 0.38, 0.6, x + width * 0.38, height * 0.8, (120, 132, 138))
            canvas.rectangle(x - width * 0.38, 0.6, x + width * 0.1, height * 0.5, (92, 104, 114))
            awning = (width * 0.46, height * 0.95), (width * 0.5, height * 0.72)
            canvas.taper(x, *awning, shade(plan.door_color, 1.5))
        else:
            draw_window(canvas, plan, x, 1.3, width * 0.4, height * 0.66)
    draw_door(canvas, plan, plan.bay(middle + 0.5), plan.bay_width * 0.52, height)


def _draw_side(canvas: Canvas, plan: Plan, rng: Rng) -> None:
    stone, tiles = canvas.grain(plan.wall, rng), canvas.grain("tiles", rng)
    if plan.roof != "parapet":
        roof = [(0, plan.eaves), (plan.depth, plan.eaves)]
        top = [(plan.depth, plan.eaves + 2.1), (0.6, plan.eaves + 2.1)]
        canvas.polygon([*roof, *top], shade(plan.roof_color, 0.95), tiles)
    canvas.rectangle(0, 0, plan.depth, plan.eaves, plan.wall_color, stone)
    canvas.rectangle(0, 0, plan.depth, 0.7, shade(plan.wall_color, 0.72), stone)
    canvas.rectangle(0, plan.eaves - 0.4, plan.depth, plan.eaves + 0.1, plan.trim)
    count = int(plan.depth / plan.bay_width)
    for floor in range(1, plan.floors):
        sill = plan.ground_height + (floor - 1) * plan.floor_height + 0.9
        for bay in range(count):
            x = (bay + 0.5) * plan.depth / count
            draw_window(canvas, plan, x, sill, plan.bay_width * 0.4, plan.floor_height * 0.5)
