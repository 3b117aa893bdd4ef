"""Draw trees, cars, people, lamps, sky and ground."""

import math
from functools import cache

import numpy as np
from PIL import Image, ImageDraw

from listwise.demo.canvas import Canvas, shade, soft_noise
from listwise.demo.plans import Color, Rng
from listwise.demo.scene import Camera, Scene

HEIGHTS = {"tree": 8.5, "bush": 1.6, "car": 1.6, "bus": 3.2, "person": 1.75, "lamp": 5.5}
_VARIANTS = 6


@cache
def sprite(kind: str, variant: int) -> Image.Image:
    """Return one of a few pictures of an object, whose height is in HEIGHTS."""
    rng = np.random.default_rng([len(kind), ord(kind[0]), variant])
    height = HEIGHTS[kind]
    draw, shape = {
        "tree": (_draw_tree, 0.8),
        "bush": (_draw_bush, 1.6),
        "car": (_draw_car, 2.5),
        "bus": (_draw_bus, 2.8),
        "person": (_draw_person, 0.42),
        "lamp": (_draw_lamp, 0.25),
    }[kind]
    canvas = Canvas(height * shape, height, 150 / (height * max(shape, 1)))
    draw(canvas, height * shape, height, rng)
    return canvas.finish()


def paste_thing(
    scene: Scene, camera: Camera, kind: str, place: float, away: float, keep: float, rng: Rng
) -> None:
    """Draw an object at `place` (0..1 across the photo), `away` metres behind the front.

    Negative `away` is nearer to the photographer than the building. It is left out if it would
    leave less than `keep` pixels of the building in sight.
    """
    foot, head = camera.project_seen(np.array([[0, 0, away], [0, HEIGHTS[kind], away]]))
    height = round(foot[1] - head[1])
    picture = sprite(kind, int(rng.integers(_VARIANTS)))
    width = round(height * picture.width / picture.height)
    if rng.random() < 0.5:
        picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if width < 2 or height < 3 or height > 4 * scene.photo.height:
        return
    picture = picture.resize((width, height), Image.Resampling.BILINEAR)
    at = (round(place * scene.photo.width - width / 2), round(foot[1]) - height)
    scene.paste(picture, at, rng.uniform(0.75, 1.1), keep=keep)


def paint_backdrop(photo: Image.Image, horizon: float, weather: str, rng: Rng) -> None:
    """Draw the sky, a skyline and the ground."""
    # Half the size is enough for what is soft.
    width, height = photo.width // 2, photo.height // 2
    high, low = (np.array(color, np.float32) for color in _SKIES[weather])
    rows = np.arange(height, dtype=np.float32)[:, None, None]
    ramp = (rows / max(horizon / 2, 1.0)).clip(0, 1)
    cloud = soft_noise(rng, height, width, 30) + 0.5 * soft_noise(rng, height, width, 11)
    cover = 0.8 * (cloud + np.float32(rng.uniform(-0.9, 0.3))).clip(0, 1)[:, :, None]
    white = 0.4 * low + np.float32(75 if weather == "dusk" else 150)
    sky = high + (low - high) * ramp
    sky = sky + (white - sky) * cover
    ground = np.array(_GROUNDS[int(rng.integers(len(_GROUNDS)))], np.float32)
    depth = 1.12 - 0.27 * ((rows - horizon / 2) / height).clip(0, 1)
    paving = ground * depth * (1 + 0.07 * soft_noise(rng, height, width, 3)[:, :, None])
    soft = np.where(rows < horizon / 2, sky, paving).clip(0, 255).astype(np.uint8)
    photo.paste(Image.fromarray(soft).resize(photo.size, Image.Resampling.BILINEAR))
    _draw_skyline(ImageDraw.Draw(photo), photo.width, horizon, _SKIES[weather][1], rng)


def _draw_skyline(
    draw: ImageDraw.ImageDraw, width: int, horizon: float, haze: Color, rng: Rng
) -> None:
    x = 0.0
    while x < width:
        breadth, rise = rng.uniform(0.06, 0.2) * width, rng.uniform(0.03, 0.2) * width
        tone = rng.uniform(0.65, 0.85)
        color = shade(haze, tone)
        if rng.random() < 0.4:
            green = (round(haze[0] * 0.55), round(haze[1] * 0.66), round(haze[2] * 0.5))
            box = [x - breadth * 0.2, horizon - rise, x + breadth * 1.2, horizon + rise]
            draw.chord(box, 180, 360, fill=green)
        else:
            draw.rectangle([x, horizon - rise, x + breadth, horizon + 4], fill=color)
            roof = [(x - 2, horizon - rise), (x + breadth + 2, horizon - rise)]
            draw.polygon([*roof, (x + breadth / 2, horizon - rise * 1.3)], fill=shade(color, 0.85))
        x += breadth * rng.uniform(0.7, 1.4)


_SKIES: dict[str, tuple[Color, Color]] = {
    "clear": ((92, 148, 214), (188, 214, 236)),
    "overcast": ((170, 176, 184), (206, 208, 210)),
    "sunset": ((112, 122, 176), (244, 176, 120)),
    "dusk": ((36, 44, 84), (124, 98, 122)),
}
_GROUNDS: tuple[Color, ...] = ((128, 126, 124), (168, 158, 142), (112, 138, 84), (146, 136, 132))


def _draw_tree(canvas: Canvas, width: float, height: float, rng: Rng) -> None:
    middle = width / 2
    canvas.taper(middle, (0.28, 0), (0.12, height * 0.6), (84, 64, 48))
    leaves: tuple[Color, ...] = ((74, 112, 52), (96, 128, 60), (60, 94, 62), (168, 120, 52))
    leaf = leaves[int(rng.integers(4))]
    _blobs(canvas, (middle, height * 0.64), (width * 0.36, height * 0.27), leaf, 90, rng)


def _draw_bush(canvas: Canvas, width: float, height: float, rng: Rng) -> None:
    _blobs(canvas, (width / 2, height * 0.42), (width * 0.4, height * 0.36), (70, 104, 56), 60, rng)


def _blobs(
    canvas: Canvas,
    center: tuple[float, float],
    spread: tuple[float, float],
    color: Color,
    count: int,
    rng: Rng,
) -> None:
    for index in range(count):
        angle, reach = rng.uniform(0, 2 * math.pi), math.sqrt(rng.random())
        x = center[0] + spread[0] * reach * math.cos(angle)
        y = center[1] + spread[1] * reach * math.sin(angle)
        bright = 0.7 + 0.3 * index / count + 0.2 * math.sin(angle) * reach
        bright += rng.uniform(-0.08, 0.08)
        canvas.disc(x, y, spread[0] * rng.uniform(0.16, 0.34), shade(color, bright))


def _paint(rng: Rng) -> Color:
    red, green, blue = (int(value) for value in rng.integers(40, 220, 3))
    return red, green, blue


def _wheel(canvas: Canvas, x: float, radius: float) -> None:
    canvas.disc(x, radius, radius, (30, 30, 32))
    canvas.disc(x, radius, radius * 0.5, (150, 152, 156))


def _draw_car(canvas: Canvas, width: float, height: float, rng: Rng) -> None:
    paint = _paint(rng)
    roof = ((0.2, 0.55), (0.8, 0.55), (0.68, 0.98), (0.34, 0.98))
    glass = ((0.26, 0.58), (0.74, 0.58), (0.65, 0.9), (0.37, 0.9))
    for shape, color in ((roof, shade(paint, 0.9)), (glass, (70, 86, 100))):
        canvas.polygon([(width * f, height * g) for f, g in shape], color)
    canvas.line([(width / 2, height * 0.55), (width / 2, height * 0.95)], shade(paint, 0.8), 0.12)
    canvas.rectangle(width * 0.02, height * 0.2, width * 0.98, height * 0.6, paint)
    canvas.rectangle(width * 0.02, height * 0.2, width * 0.98, height * 0.3, shade(paint, 0.7))
    canvas.rectangle(width * 0.92, height * 0.42, width * 0.98, height * 0.54, (250, 226, 150))
    for place in (0.22, 0.78):
        _wheel(canvas, width * place, height * 0.22)


def _draw_bus(canvas: Canvas, width: float, height: float, rng: Rng) -> None:
    paint = _paint(rng)
    canvas.rectangle(0, height * 0.12, width, height, paint)
    canvas.rectangle(0, height * 0.94, width, height, shade(paint, 1.2))
    canvas.rectangle(0, height * 0.12, width, height * 0.24, shade(paint, 0.6))
    for pane in range(7):
        left = width * (0.03 + pane * 0.138)
        canvas.rectangle(left, height * 0.5, left + width * 0.12, height * 0.86, (64, 82, 98))
    for place in (0.2, 0.8):
        _wheel(canvas, width * place, height * 0.14)


def _draw_person(canvas: Canvas, width: float, height: float, rng: Rng) -> None:
    coat, legs, middle = _paint(rng), shade(_paint(rng), 0.5), width / 2
    for side in (-1, 1):
        canvas.line([(middle + side * 0.06, 0.75), (middle + side * 0.12, 0)], legs, 0.16)
        arm = [(middle + side * 0.2, 1.35), (middle + side * 0.26, 0.8)]
        canvas.line(arm, shade(coat, 0.85), 0.1)
    canvas.taper(middle, (0.24, 1.45), (0.2, 0.7), coat)
    canvas.disc(middle, 1.6, 0.13, (214, 168, 136))
    canvas.disc(middle, 1.65, 0.12, shade(_paint(rng), 0.4))


def _draw_lamp(canvas: Canvas, width: float, height: float, rng: Rng) -> None:
    middle, iron = width / 2, (48, 52, 54)
    canvas.rectangle(middle - 0.18, 0, middle + 0.18, 0.5, iron)
    canvas.rectangle(middle - 0.08, 0, middle + 0.08, height * 0.86, iron)
    canvas.taper(middle, (0.18, height * 0.84), (0.32, height * 0.96), (250, 236, 190))
    canvas.rectangle(middle - 0.36, height * 0.96, middle + 0.36, height, iron)
