"""A photo while it is drawn: its camera, and the mask of its visible building."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Box = tuple[float, float, float, float]
Points = NDArray[np.float64]

EYE = 1.7  # metres above the ground


class Scene:
    """A photo, and the mask of the pixels that show the building it is taken of."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.photo = Image.new("RGB", size)
        self.subject = Image.new("L", size)

    def paste(
        self,
        picture: Image.Image,
        at: tuple[int, int],
        light: float,
        *,
        subject: bool = False,
        keep: float = 0.0,
    ) -> None:
        """Paste an RGBA picture, unless it leaves less than `keep` pixels of the building."""
        alpha = picture.getchannel("A")
        mask = self.subject.copy() if keep > 0 else self.subject
        mask.paste(
            255 if subject else 0, (*at, at[0] + picture.width, at[1] + picture.height), alpha
        )
        if keep > 0 and _area(mask) < keep:
            return
        self.subject = mask
        self.photo.paste(brighten(picture.convert("RGB"), light), at, alpha)

    @property
    def visible(self) -> float:
        """Return the number of pixels that show the building."""
        return _area(self.subject)

    def box(self) -> Box:
        """Return the box of the visible part of the building (empty if none is visible)."""
        found = self.subject.point(lambda value: 255 * (value > 127)).getbbox()
        left, top, right, bottom = found or (0, 0, 0, 0)
        return float(left), float(top), float(right), float(bottom)


def brighten(picture: Image.Image, light: float) -> Image.Image:
    """Multiply the brightness of a picture."""
    return Image.blend(Image.new("RGB", picture.size), picture, light)


def _area(mask: Image.Image) -> float:
    return float(np.asarray(mask).mean()) / 255 * mask.width * mask.height


@dataclass(frozen=True)
class Camera:
    """The position and direction of a camera.

    The building's front is the plane z = 0, x to the right from its middle, y upwards; the camera
    stands `distance` metres away, `azimuth` radians to the right of the middle (the building turns
    by as much) and looks up by `pitch`. `zoom` and `shift` bring the picture plane to pixels.
    """

    azimuth: float
    pitch: float
    distance: float
    roll: float = 0.0
    zoom: float = 1.0
    shift: tuple[float, float] = (0.0, 0.0)

    def project(self, points: Points) -> Points:
        """Project points of the world [N, 3] to pixels [N, 2]."""
        x, y, z = points.T
        sin, cos = math.sin(self.azimuth), math.cos(self.azimuth)
        return self.project_seen(np.stack([x * cos + z * sin, y, z * cos - x * sin], axis=1))

    def project_seen(self, points: Points) -> Points:
        """Project points in camera directions (right, up, away) [N, 3] to pixels [N, 2]."""
        right, up, away = points[:, 0], points[:, 1] - EYE, points[:, 2] + self.distance
        sin, cos = math.sin(self.pitch), math.cos(self.pitch)
        depth = np.maximum(away * cos + up * sin, 0.5)
        u, v = right / depth, -(up * cos - away * sin) / depth
        sin, cos = math.sin(self.roll), math.cos(self.roll)
        plane = np.stack([u * cos - v * sin, u * sin + v * cos], axis=1)
        pixels: Points = plane * self.zoom + np.array(self.shift)
        return pixels

    @property
    def sees(self) -> float:
        """The camera's x in the building's directions; beyond a side, the camera sees that side."""
        return self.distance * math.sin(self.azimuth)

    @property
    def horizon(self) -> float:
        """The height of the horizon in pixels."""
        return math.tan(self.pitch) * self.zoom + self.shift[1]


def paste_quad(
    scene: Scene,
    pyramid: list[Image.Image],
    corners: Points,
    light: float,
    *,
    subject: bool = False,
) -> None:
    """Paste a picture so that its corners (from the top left, clockwise) fall on `corners` [4, 2].

    `pyramid` holds the picture at full, half, quarter … size; the one that fits is used.
    """
    left, top = (max(0, math.floor(low)) for low in corners.min(axis=0))
    right, bottom = (
        min(limit, math.ceil(high))
        for limit, high in zip(scene.photo.size, corners.max(axis=0), strict=True)
    )
    if right - left < 2 or bottom - top < 2:
        return
    width = max(math.dist(corners[0], corners[1]), math.dist(corners[3], corners[2]))
    height = max(math.dist(corners[0], corners[3]), math.dist(corners[1], corners[2]))
    source = pyramid[0]
    for smaller in pyramid[1:]:
        if smaller.width <= 0.8 * width or smaller.height <= 0.8 * height:
            break
        source = smaller
    coefficients = _homography(corners - (left, top), source.size)
    size, kind = (right - left, bottom - top), Image.Transform.PERSPECTIVE
    seen = source.transform(size, kind, coefficients, Image.Resampling.BILINEAR)
    scene.paste(seen, (left, top), light, subject=subject)


def _homography(corners: Points, size: tuple[int, int]) -> list[float]:
    """Return the eight coefficients that map a pixel of the photo to one of the picture."""
    width, height = size
    wanted = [(0, 0), (width, 0), (width, height), (0, height)]
    rows = []
    for (x, y), (u, v) in zip(corners, wanted, strict=True):
        rows.append([x, y, 1, 0, 0, 0, -u * x, -u * y])
        rows.append([0, 0, 0, x, y, 1, -v * x, -v * y])
    solution: list[float] = np.linalg.solve(np.array(rows), np.ravel(wanted)).tolist()
    return solution
