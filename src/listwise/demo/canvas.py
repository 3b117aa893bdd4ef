"""Draw in metres, with textures of stone, brick, plaster and tiles."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from listwise.demo.plans import Color, Rng

Point = tuple[float, float]
Grain = NDArray[np.float32]

_OVERSAMPLE = 2


class Canvas:
    """A transparent picture drawn in metres: x from its left edge, y upwards from the ground."""

    def __init__(self, width: float, height: float, pixels_per_metre: float) -> None:
        self.scale = pixels_per_metre * _OVERSAMPLE
        self.size = (round(width * self.scale), round(height * self.scale))
        self.image = Image.new("RGBA", self.size)
        self._draw = ImageDraw.Draw(self.image)

    def polygon(self, points: Sequence[Point], color: Color, grain: Grain | None = None) -> None:
        """Fill a polygon, evenly or with a texture ([H, W] of the whole canvas)."""
        pixels = self._pixels(points)
        if grain is None:
            self._draw.polygon(pixels, fill=color)
            return
        left, top = (max(0, math.floor(min(p[axis] for p in pixels))) for axis in (0, 1))
        right, bottom = (
            min(self.size[axis], math.ceil(max(p[axis] for p in pixels)) + 1) for axis in (0, 1)
        )
        if right <= left or bottom <= top:
            return
        mask = Image.new("L", (right - left, bottom - top))
        ImageDraw.Draw(mask).polygon([(x - left, y - top) for x, y in pixels], fill=255)
        shade = grain[top:bottom, left:right, None] * np.array(color, np.float32)
        patch = Image.fromarray(np.clip(shade, 0, 255).astype(np.uint8))
        self.image.paste(patch, (left, top), mask)

    def rectangle(
        self, x0: float, y0: float, x1: float, y1: float, color: Color, grain: Grain | None = None
    ) -> None:
        """Fill an upright rectangle."""
        self.polygon([(x0, y0), (x1, y0), (x1, y1), (x0, y1)], color, grain)

    def taper(
        self, x: float, bottom: Point, top: Point, color: Color, grain: Grain | None = None
    ) -> None:
        """Fill a shape symmetric about x, given half-width and height at its bottom and top."""
        (low, y0), (high, y1) = bottom, top
        self.polygon([(x - low, y0), (x + low, y0), (x + high, y1), (x - high, y1)], color, grain)

    def disc(self, x: float, y: float, radius: float, color: Color) -> None:
        """Fill a circle."""
        (cx, cy), r = self._pixels([(x, y)])[0], radius * self.scale
        self._draw.ellipse([cx - r, cy - r, cx + r, cy + r], fill=color)

    def line(self, points: Sequence[Point], color: Color, width: float) -> None:
        """Draw a line of a width in metres."""
        self._draw.line(self._pixels(points), fill=color, width=max(1, round(width * self.scale)))

    def finish(self) -> Image.Image:
        """Return the picture, smoothed."""
        return self.image.reduce(_OVERSAMPLE)

    def grain(self, material: str, rng: Rng) -> Grain:
        """Return the relative brightness of a material over the whole canvas."""
        width, height = self.size
        noise = soft_noise(rng, height, width, 24)
        if material in ("plaster", "timber"):
            return 1 + 0.06 * noise
        sizes = {"brick": (0.75, 0.28), "ashlar": (1.5, 0.62), "tiles": (0.5, 0.4)}
        block, course = sizes[material]
        rows = np.arange(height, dtype=np.float32) / np.float32(course * self.scale)
        row = rows.astype(np.int64)
        columns = np.arange(width, dtype=np.float32)[None] / np.float32(block * self.scale)
        columns = columns + 0.5 * (row[:, None] % 2).astype(np.float32)
        column = columns.astype(np.int64)
        tone = rng.uniform(-1, 1, (int(row.max()) + 1, int(column.max()) + 1)).astype(np.float32)
        joint = (rows % 1 < 0.14)[:, None] | (columns % 1 < 0.14 * course / block)
        shade = 1 + 0.09 * tone[row[:, None], column] + 0.05 * noise
        if material == "tiles":
            shade += 0.16 * (rows % 1)[:, None] - 0.08
        return np.where(joint, shade * 0.82, shade).astype(np.float32)

    def _pixels(self, points: Sequence[Point]) -> list[Point]:
        return [(x * self.scale, self.size[1] - y * self.scale) for x, y in points]


def shade(color: Color, factor: float) -> Color:
    """Make a color darker or brighter."""
    red, green, blue = (min(255, max(0, round(channel * factor))) for channel in color)
    return red, green, blue


def soft_noise(rng: Rng, height: int, width: int, cell: int) -> Grain:
    """Return smooth noise between -1 and 1."""
    coarse = rng.uniform(-1, 1, (height // cell + 2, width // cell + 2)).astype(np.float32)
    picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(picture)
