"""Random plans of toy buildings and of their look-alikes."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Color = tuple[int, int, int]
Rng = np.random.Generator

LEFT = 0.9  # of a front on its canvas: what roofs and steps jut out beyond the walls
FAMILY = 3  # look-alikes that share one plan
CHANGED = 5  # details in which a look-alike differs from the first of its family

WALLS = ("brick", "ashlar", "plaster", "timber")
ROOFS = ("hip", "gable", "stepped", "mansard", "parapet", "pediment")
TOWERS = ("none", "none", "center", "side", "twin", "dome")

WALL_COLORS: dict[str, tuple[Color, ...]] = {
    "brick": ((168, 92, 72), (150, 78, 60), (186, 128, 92), (190, 160, 110)),
    "ashlar": ((206, 194, 168), (184, 178, 170), (214, 186, 140), (160, 156, 150)),
    "plaster": (
        (232, 214, 178),
        (222, 178, 150),
        (198, 208, 190),
        (236, 232, 222),
        (214, 190, 120),
    ),
    "timber": ((238, 228, 208), (230, 210, 170), (214, 214, 206)),
}
ROOF_COLORS: tuple[Color, ...] = ((128, 70, 56), (92, 96, 108), (156, 92, 64), (104, 84, 76))


@dataclass(frozen=True)
class Plan:
    """The plan of a building: its large parts, in metres, and the details in `CHOICES`.

    Look-alikes have the same large parts, and some details that differ.
    """

    bays: int
    floors: int
    bay_width: float
    floor_height: float
    depth: float
    wall: str
    wall_color: Color
    roof: str
    roof_color: Color
    tower: str
    pilasters: bool
    window: str
    glazing: str
    hood: str
    shutters: Color | None
    door: str
    door_color: Color
    ground: str
    ornament: str
    dormers: int
    cap: str
    trim: Color
    band: bool

    @property
    def width(self) -> float:
        """Width of the front."""
        return self.bays * self.bay_width + 1.2

    @property
    def right(self) -> float:
        """The right edge of the front on its canvas."""
        return LEFT + self.width

    def bay(self, number: float) -> float:
        """Where a bay of the front begins on its canvas, or half a bay further its middle."""
        return LEFT + 0.6 + number * self.bay_width

    @property
    def ground_height(self) -> float:
        """Height of the ground floor."""
        return self.floor_height * 1.25

    @property
    def eaves(self) -> float:
        """Height of the wall, up to the roof."""
        return self.ground_height + (self.floors - 1) * self.floor_height + 0.6


CHOICES: dict[str, tuple[Any, ...]] = {
    "window": ("square", "round", "pointed", "wide", "twin"),
    "glazing": ("cross", "grid", "plain"),
    "hood": ("none", "lintel", "peak", "frame"),
    "shutters": (None, (62, 98, 74), (120, 52, 44), (70, 92, 130)),
    "door": ("square", "round", "pointed", "porch"),
    "door_color": ((92, 54, 36), (40, 82, 62), (128, 36, 36), (42, 62, 104)),
    "ground": ("windows", "arcade", "shop"),
    "ornament": ("clock", "rose", "shield", "niche"),
    "dormers": (0, 1, 2, 3),
    "cap": ("spire", "pyramid", "onion", "battlements"),
    "trim": ((240, 234, 220), (196, 178, 146), (120, 104, 92), (206, 132, 96)),
    "band": (False, True),
}


def draw_family(rng: Rng, size: int = FAMILY) -> list[Plan]:
    """Return buildings that differ in a few details."""
    wall = _pick(rng, WALLS)
    first = Plan(
        bays=int(rng.integers(3, 6)),
        floors=int(rng.integers(2, 4)),
        bay_width=float(rng.uniform(2.5, 3.3)),
        floor_height=float(rng.uniform(3.2, 4.0)),
        depth=float(rng.uniform(7, 12)),
        wall=wall,
        wall_color=_vary(rng, _pick(rng, WALL_COLORS[wall])),
        roof=_pick(rng, ROOFS),
        roof_color=_vary(rng, _pick(rng, ROOF_COLORS)),
        tower=_pick(rng, TOWERS),
        pilasters=bool(rng.random() < 0.4),
        **{name: _pick(rng, choices) for name, choices in CHOICES.items()},
    )
    family = [first]
    while len(family) < size:
        names = rng.permutation(_visible(first))[:CHANGED]
        changes = {
            str(name): _pick(rng, [c for c in CHOICES[name] if c != getattr(first, name)])
            for name in names
        }
        plan = replace(first, **changes)
        if plan not in family:
            family.append(plan)
    return family


def draw_house(rng: Rng) -> Plan:
    """Return an ordinary house of the neighborhood: smaller, and without a tower."""
    (plan,) = draw_family(rng, size=1)
    bays, floors = int(rng.integers(2, 4)), int(rng.integers(2, 4))
    return replace(plan, bays=bays, floors=floors, tower="none", ornament="none")


def _visible(plan: Plan) -> list[str]:
    """Return the details that are visible on a building of this plan."""
    hidden = set()
    if plan.tower in ("none", "dome"):
        hidden.add("cap")
    if plan.roof not in ("hip", "mansard"):
        hidden.add("dormers")
    return [name for name in CHOICES if name not in hidden]


def _pick(rng: Rng, choices: Any) -> Any:
    return choices[int(rng.integers(len(choices)))]


def _vary(rng: Rng, color: Color) -> Color:
    """Return a color near another."""
    red, green, blue = (min(255, round(c * rng.uniform(0.86, 1.1))) for c in color)
    return red, green, blue
