"""A photo while it is drawn, with a mask of its visible building."""

import numpy as np
from PIL import Image

Box = tuple[float, float, float, float]


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
