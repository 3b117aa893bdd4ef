"""Draw a photo of a building: framing, neighbors, clutter and light, by difficulty."""

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageDraw, ImageFilter

from listwise.demo.facade import DrawnBuilding, build
from listwise.demo.plans import LEFT, Rng, draw_house
from listwise.demo.scene import Box, Camera, Scene, brighten, paste_quad
from listwise.demo.street import paint_backdrop, paste_thing

_SIZES = ((200, 152), (192, 160), (176, 176), (160, 192), (152, 200))
_OVERSAMPLE = 2
_HOUSES = 10


@dataclass(frozen=True)
class Viewpoint:
    """The conditions of a photo."""

    azimuth: float  # degrees
    pitch: float  # degrees
    fill: float  # of the photo by the building
    place: tuple[float, float]  # of the building's middle in the photo, 0..1
    sliver: float  # the part of the building's width left in the photo; 0 for all of it
    weather: str
    occluders: int
    keep: float  # the part of the building in the photo that nothing may cover
    blur: float
    contrast: float  # of shadows and of the light's color, 0..1


def draw_viewpoint(kind: str, rng: Rng) -> Viewpoint:
    """Draw the conditions of a kind of photo: "query", "easy", "hard" or "junk"."""
    sign = 1 if rng.random() < 0.5 else -1
    view = Viewpoint(
        azimuth=sign * rng.uniform(0, 16),
        pitch=rng.uniform(0, 12),
        fill=rng.uniform(0.72, 0.98),
        place=(rng.uniform(0.44, 0.56), rng.uniform(0.46, 0.56)),
        sliver=0.0,
        weather=str(rng.choice(["clear", "overcast", "sunset"], p=[0.6, 0.34, 0.06])),
        occluders=int(rng.integers(0, 3)),
        keep=0.75,
        blur=0.0,
        contrast=rng.uniform(0.05, 0.35),
    )
    if kind == "hard":
        return _harden(view, sign, rng)
    if kind == "junk":
        return replace(view, sliver=rng.uniform(0.14, 0.24), fill=rng.uniform(0.8, 1.1), keep=0.4)
    return view


def _harden(view: Viewpoint, sign: int, rng: Rng) -> Viewpoint:
    """Draw one or two difficulties for a photo."""
    troubles = set(rng.permutation(["oblique", "scale", "covered", "dark"])[: rng.integers(1, 3)])
    if "oblique" in troubles:
        view = replace(view, azimuth=sign * rng.uniform(28, 46), pitch=rng.uniform(6, 18))
    if "scale" in troubles:
        far = rng.random() < 0.5
        fill = rng.uniform(0.42, 0.56) if far else rng.uniform(1.2, 1.5)
        reach = 0.2 if far else 0.12
        place = (0.5 + rng.uniform(-reach, reach), 0.5 + rng.uniform(-reach, reach) * 0.6)
        view = replace(view, fill=fill, place=place)
    if "covered" in troubles:
        view = replace(view, occluders=int(rng.integers(3, 7)), keep=0.5)
    if "dark" in troubles:
        weather = str(rng.choice(["dusk", "sunset"]))
        view = replace(view, weather=weather, blur=rng.uniform(0.2, 0.6))
    return replace(view, contrast=rng.uniform(0.3, 0.8))


def take_photo(
    model: DrawnBuilding | None, view: Viewpoint, rng: Rng, size: tuple[int, int] | None = None
) -> tuple[Image.Image, Box]:
    """Draw a photo of a building, or of a street without one if it is None.

    `size` is the width and height of the photo; by default one of a few small sizes. Returns the
    photo and the box (left, top, right, bottom) of what is seen of the building.
    """
    width, height = size or _SIZES[int(rng.integers(len(_SIZES)))]
    scene = Scene((width * _OVERSAMPLE, height * _OVERSAMPLE))
    subject = model if model is not None else house(int(rng.integers(_HOUSES)))
    camera = _frame(subject, view, scene.photo.size, rng)
    paint_backdrop(scene.photo, camera.horizon, view.weather, rng)
    _paste_row(scene, camera, subject, rng)
    if rng.random() < 0.3 + 0.5 * view.contrast:
        _cast_shadow(scene, camera, subject, 0.75 - 0.35 * view.contrast, rng)
    _paste_clutter(scene, camera, view, rng)
    left, top, right, bottom = (edge / _OVERSAMPLE for edge in scene.box())
    return _expose(scene.photo.reduce(_OVERSAMPLE), view, rng), (left, top, right, bottom)


@cache
def house(number: int) -> DrawnBuilding:
    """Draw one of the ordinary houses beside a building."""
    rng = np.random.default_rng([7, number])
    return build(draw_house(rng), rng)


def _front(model: DrawnBuilding, x: float, z: float) -> NDArray[np.float64]:
    """Return the corners of a front with its middle at x, z: clockwise from the top left."""
    half, top = model.width / 2 + LEFT, model.height
    return np.array([[x - half, top, z], [x + half, top, z], [x + half, 0, z], [x - half, 0, z]])


def _side(model: DrawnBuilding, x: float, z: float, right: bool) -> NDArray[np.float64]:
    edge = x + (model.width / 2 if right else -model.width / 2)
    near, far = (z, z + model.depth) if right else (z + model.depth, z)
    top = model.eaves
    return np.array([[edge, top, near], [edge, top, far], [edge, 0, far], [edge, 0, near]])


def _frame(model: DrawnBuilding, view: Viewpoint, size: tuple[int, int], rng: Rng) -> Camera:
    """Return a camera that shows the building at the size and place of the view."""
    camera = Camera(
        azimuth=math.radians(view.azimuth),
        pitch=math.radians(view.pitch),
        distance=max(model.width, model.height) * rng.uniform(1.3, 2.2),
        roll=math.radians(rng.normal(0, 1.5)),
    )
    corners = camera.project(_front(model, 0.0, 0.0))
    low, high = corners.min(axis=0), corners.max(axis=0)
    zoom = view.fill * min(size[0] / (high[0] - low[0]), size[1] / (high[1] - low[1]))
    left, top = view.place[0] * size[0], view.place[1] * size[1]
    if view.sliver > 0:
        beyond = (0.5 - view.sliver) * (high[0] - low[0]) * zoom
        left = -beyond if rng.random() < 0.5 else size[0] + beyond
    middle = (low + high) / 2 * zoom
    return replace(
        camera, zoom=float(zoom), shift=(left - float(middle[0]), top - float(middle[1]))
    )


def _paste_row(scene: Scene, camera: Camera, model: DrawnBuilding, rng: Rng) -> None:
    """Draw the building and its neighbors, the farther ones first."""
    sun_front, sun_side = rng.uniform(0.82, 1.1), rng.uniform(0.55, 1.05)
    row: list[tuple[DrawnBuilding, float, float]] = []
    for side in (-1, 1):
        x = side * (model.width / 2 + LEFT)
        while rng.random() < 0.4 and abs(x) < 2 * model.width:
            other = house(int(rng.integers(_HOUSES)))
            x += side * (rng.uniform(0, 3) + other.width / 2)
            row.append((other, x, rng.uniform(0, 2)))
            x += side * other.width / 2
    row.append((model, 0.0, 0.0))
    row.sort(key=lambda entry: entry[1] * (1 if camera.azimuth > 0 else -1))
    for shown, x, z in row:
        own = shown is model and x == 0
        seen = camera.sees - x
        if abs(seen) > shown.width / 2:
            corners = camera.project(_side(shown, x, z, right=seen > 0))
            paste_quad(scene, shown.side, corners, sun_side, subject=own)
        corners = camera.project(_front(shown, x, z))
        paste_quad(scene, shown.front, corners, sun_front, subject=own)


def _cast_shadow(
    scene: Scene, camera: Camera, model: DrawnBuilding, light: float, rng: Rng
) -> None:
    """Draw the shadow of the houses across the street on the building."""
    edges = np.sort(rng.uniform(-0.6, 0.6, 4)) * model.width
    heights = rng.uniform(0.1, 0.95, 3) * model.eaves
    outline = [(x, y) for i, y in enumerate(heights) for x in (edges[i], edges[i + 1])]
    outline += [(edges[3], 0.0), (edges[0], 0.0)]
    pixels = camera.project(np.array([[x, y, 0.0] for x, y in outline]))
    mask = Image.new("L", scene.photo.size)
    ImageDraw.Draw(mask).polygon([(x, y) for x, y in pixels.tolist()], fill=255)
    mask = ImageChops.multiply(mask.filter(ImageFilter.BoxBlur(2)), scene.subject)
    scene.photo.paste(brighten(scene.photo, light), mask=mask)


def _paste_clutter(scene: Scene, camera: Camera, view: Viewpoint, rng: Rng) -> None:
    """Draw small objects along the street, then occluding ones, the farther ones first."""
    small, large = ("person", "bush", "car", "lamp"), ("tree", "tree", "bus", "car")
    things = [(rng.uniform(0.1, 0.4), str(rng.choice(small))) for _ in range(rng.integers(1, 5))]
    things += [(rng.uniform(0.3, 0.62), str(rng.choice(large))) for _ in range(view.occluders)]
    keep = view.keep * scene.visible
    for near, kind in sorted(things):
        away, place = -near * camera.distance, rng.uniform(-0.02, 1.02)
        paste_thing(scene, camera, kind, place, away, keep, rng)


_TINTS = {
    "clear": (1.04, 1.0, 0.95),
    "overcast": (0.97, 1.0, 1.05),
    "sunset": (1.14, 0.97, 0.8),
    "dusk": (0.9, 0.92, 1.16),
}
_EXPOSURES = {"clear": 0.52, "overcast": 0.52, "sunset": 0.45, "dusk": 0.34}


def _expose(photo: Image.Image, view: Viewpoint, rng: Rng) -> Image.Image:
    """Apply light: a gradient, a color cast, exposure, blur and grain."""
    if view.blur > 0:
        photo = photo.filter(ImageFilter.GaussianBlur(view.blur))
    width, height = photo.size
    pixels = np.asarray(photo, np.float32) / 255
    angle = rng.uniform(0, 2 * math.pi)
    across = np.linspace(-1, 1, width, dtype=np.float32)[None] * math.cos(angle)
    along = np.linspace(-1, 1, height, dtype=np.float32)[:, None] * math.sin(angle)
    tint = np.array(_TINTS[view.weather]) * np.exp(rng.normal(0, 0.09 * view.contrast, 3))
    pixels *= (1 + 0.35 * view.contrast * (across + along))[:, :, None]
    pixels *= tint.astype(np.float32)
    target = _EXPOSURES[view.weather] * math.exp(rng.normal(0, 0.1 + 0.12 * view.contrast))
    pixels *= target / float(pixels.mean())
    gray = pixels.mean(axis=2, keepdims=True)
    pixels = gray + (pixels - gray) * rng.uniform(1 - 0.6 * view.contrast, 1.15)
    pixels += 0.012 * rng.standard_normal((height, width, 1), np.float32)
    return Image.fromarray((pixels.clip(0, 1) * 255).astype(np.uint8))
