"""Random training crops of photos, repeatable from a seed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from listwise.data.images import ImageError
from listwise.data.labelled import LabelledImages
from listwise.errors import InputError
from listwise.optional import requires
from listwise.settings import CropSettings

GRAY = np.array([0.299, 0.587, 0.114])
"""Weights of red, green and blue in gray (ITU-R 601)."""
# Luma, and two axes of chroma.
_TO_YIQ = np.array([GRAY, [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
_FROM_YIQ = np.linalg.inv(_TO_YIQ)

_STRIP = 200  # rows of a crop that are sampled at a time

Pixels = npt.NDArray[np.uint8]
"""Colors [H, W, 3]."""


class Colors(NamedTuple):
    """A change of colors: three factors, and a rotation of hues in full turns."""

    brightness: float
    contrast: float
    saturation: float
    hue: float


@dataclass(frozen=True)
class CropPlan:
    """The place of a crop in a photo, in pixels, and the changes applied to it.

    The crop is a rotated rectangle with the edges `across` and `down`, in the middle of `bounds`
    (left, top, right and bottom).
    """

    bounds: tuple[float, float, float, float]
    across: tuple[float, float]
    down: tuple[float, float]
    flip: bool
    colors: Colors


def draw_crop(
    width: int, height: int, settings: CropSettings, generator: np.random.Generator
) -> CropPlan:
    """Draw a random crop of a photo of this size.

    The number of random draws is always the same, so changing one setting does not affect the
    others.
    """
    draws: list[float] = generator.random(10).tolist()
    spread = [2.0 * draw - 1.0 for draw in draws]
    angle = math.radians(spread[0] * settings.rotation)
    ratio = settings.max_ratio ** spread[1]
    area = settings.min_area + (settings.max_area - settings.min_area) * draws[2]

    # A rotated rectangle of width √ratio and height 1/√ratio has this extent. It is enlarged as far
    # as the photo allows, and then reduced to the drawn area.
    cos, sin = math.cos(angle), math.sin(angle)
    wide, tall = math.sqrt(ratio), 1.0 / math.sqrt(ratio)
    span_x = wide * abs(cos) + tall * abs(sin)
    span_y = wide * abs(sin) + tall * abs(cos)
    scale = min(width / span_x, height / span_y) * math.sqrt(area)
    span_x = min(span_x * scale, width)  # rounding must not move it outside
    span_y = min(span_y * scale, height)
    left, top = draws[3] * (width - span_x), draws[4] * (height - span_y)
    return CropPlan(
        bounds=(left, top, min(left + span_x, width), min(top + span_y, height)),
        across=(cos * wide * scale, sin * wide * scale),
        down=(-sin * tall * scale, cos * tall * scale),
        flip=draws[5] < settings.flip,
        colors=Colors(
            1.0 + spread[6] * settings.brightness,
            1.0 + spread[7] * settings.contrast,
            1.0 + spread[8] * settings.saturation,
            spread[9] * settings.hue,
        ),
    )


def random_crop(
    image: Image.Image, settings: CropSettings, generator: np.random.Generator
) -> Tensor:
    """Return a random crop of an RGB photo: uint8 [3, S, S]."""
    plan = draw_crop(image.width, image.height, settings, generator)
    across, down = np.array(plan.across), np.array(plan.down)
    crop = _resample(image, plan.bounds, across, down, settings.size)
    if plan.flip:
        crop = crop[:, ::-1].copy()
    return torch.from_numpy(np.ascontiguousarray(_jitter(crop, *plan.colors).transpose(2, 0, 1)))


class Crop(NamedTuple):
    """A crop uint8 [3, S, S], its label, and the errors of files that it replaces."""

    image: Tensor
    label: int
    errors: tuple[str, ...]


class CropBatch(NamedTuple):
    """Crops uint8 [B, 3, S, S], labels int64 [B], and the errors of files that were replaced."""

    images: Tensor
    labels: Tensor
    errors: tuple[str, ...]


class UnreadableClassError(InputError):
    """No image of a class can be decoded."""

    def __init__(self, message: str) -> None:
        # A data loader raises the error of a worker again with its traceback as the message, which
        # ends with the message of the error itself.
        name = f"{type(self).__name__}: "
        super().__init__(message.rpartition(name)[2].strip())


class CropDataset(Dataset[Crop]):
    """Random crops of labelled images; a key is a pair (iteration, index of the image).

    A crop depends only on the seed and its key, not on the order of calls or the process. Use it
    with a batch sampler of such pairs:
    `DataLoader(dataset, batch_sampler=..., collate_fn=collate)`.

    An image that cannot be decoded is replaced by the next of the same class, so that batches keep
    their size. `Crop.errors` has the error.
    """

    def __init__(self, images: LabelledImages, settings: CropSettings, seed: int) -> None:
        self.images = images
        self.settings = settings
        self.seed = seed
        self._by_class = np.argsort(images.labels, kind="stable")
        self._class_end = np.cumsum(images.class_sizes())

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: tuple[int, int]) -> Crop:
        _, index = key
        label = int(self.images.labels[index])
        generator = self.generator(key)
        errors: list[str] = []
        for candidate in self._same_class_from(index, label):
            try:
                photo = self.images.file(candidate).image(self.settings.min_side)
            except ImageError as error:
                errors.append(str(error))
                continue
            return Crop(random_crop(photo, self.settings, generator), label, tuple(errors))
        raise UnreadableClassError(
            f"no image of the class {self.images.class_names[label]!r} can be decoded; "
            f"the first: {errors[0]}"
        )

    def generator(self, key: tuple[int, int]) -> np.random.Generator:
        """Return the random generator for the crop of a key."""
        return np.random.default_rng([self.seed, *key])

    def _same_class_from(self, index: int, label: int) -> list[int]:
        """Return the images of a class in order, beginning with `index`."""
        start = self._class_end[label - 1] if label > 0 else 0
        members = self._by_class[start : self._class_end[label]]
        return [int(i) for i in np.roll(members, -int(np.searchsorted(members, index)))]


def collate(crops: Sequence[Crop]) -> CropBatch:
    """Combine crops into a batch: images uint8 [B, 3, S, S], labels int64 [B]."""
    return CropBatch(
        default_collate([crop.image for crop in crops]),  # in a worker directly into shared memory
        torch.tensor([crop.label for crop in crops], dtype=torch.int64),
        tuple(error for crop in crops for error in crop.errors),
    )


def _resample(
    image: Image.Image,
    bounds: tuple[float, float, float, float],
    across: npt.NDArray[np.float64],
    down: npt.NDArray[np.float64],
    size: int,
) -> Pixels:
    """Resample the rectangle in the middle of `bounds` to size × size pixels."""
    left, top, right, bottom = bounds
    if across[1] == 0.0 and across[0] > 0.0:
        made = image.resize((size, size), Image.Resampling.BICUBIC, bounds, reducing_gap=3.0)
        return np.asarray(made)
    # An affine transform does not average over skipped pixels, so reduce the photo first.
    reduction = math.sqrt(float(np.linalg.norm(across) * np.linalg.norm(down))) / size
    if reduction > 1.0:
        extent = np.array([right - left, bottom - top])
        width, height = (max(1, round(length / reduction)) for length in extent.tolist())
        image = image.resize((width, height), Image.Resampling.BICUBIC, bounds, reducing_gap=3.0)
        shrink = np.array([width, height]) / extent
        across, down = across * shrink, down * shrink
        left, top, right, bottom = 0.0, 0.0, float(width), float(height)
    # With the neighbors of the outermost samples; OpenCV accepts sides below 32768 pixels.
    x, y = max(0, math.floor(left) - 2), max(0, math.floor(top) - 2)
    ends = min(image.width, math.ceil(right) + 2), min(image.height, math.ceil(bottom) + 2)
    edges = np.column_stack([across, down])
    middle = np.array([(left + right) / 2 - x, (top + bottom) / 2 - y])
    # OpenCV's origin is the middle of the first pixel, ours is its corner.
    start = middle - edges.sum(axis=1) * (0.5 - 0.5 / size) - 0.5
    return _warp(np.asarray(image.crop((x, y, *ends))), edges / size, start, size)


def _warp(
    pixels: Pixels, steps: npt.NDArray[np.float64], start: npt.NDArray[np.float64], size: int
) -> Pixels:
    """Sample pixels bicubically at `start + steps @ (column, row)`: uint8 [size, size, 3].

    OpenCV is faster on floats than on integers if the arrays are small enough to reuse memory, so
    the crop is sampled in strips.
    """
    with requires("train", "a random crop"):
        import cv2

    turned = np.empty((size, size, 3), dtype=np.uint8)
    for row in range(0, size, _STRIP):
        height = min(_STRIP, size - row)
        first = start + steps[:, 1] * row
        reach = first[1] + np.array([0.0, steps[1, 0] * size])[:, None] + [0, steps[1, 1] * height]
        top = min(max(0, math.floor(reach.min()) - 2), len(pixels) - 1)
        bottom = max(top + 1, math.ceil(reach.max()) + 3)
        strip = cv2.warpAffine(
            pixels[top:bottom].astype(np.float32),
            np.column_stack([steps, first - (0, top)]),
            (size, height),
            flags=cv2.INTER_CUBIC | cv2.WARP_INVERSE_MAP,
            borderMode=cv2.BORDER_REPLICATE,
        )
        # Rounds, and clips to 0 to 255.
        cv2.add(strip, np.zeros(4), turned[row : row + height], dtype=cv2.CV_8U)
    return turned


def _jitter(
    crop: Pixels, brightness: float, contrast: float, saturation: float, hue: float
) -> Pixels:
    """Change the colors in one step: each change is affine, so their chain is one matrix."""
    colors = Colors(brightness, contrast, saturation, hue)
    if colors == (1.0, 1.0, 1.0, 0.0):
        return crop
    with requires("train", "a random crop"):
        import cv2

    matrix, share = color_change(colors)
    offset = np.full((3, 1), share * float(GRAY @ cv2.mean(crop)[:3]))
    return np.asarray(cv2.transform(crop, np.hstack([matrix, offset])))


def color_change(colors: Colors) -> tuple[npt.NDArray[np.float64], float]:
    """Return the color matrix [3, 3], and the share of the mean gray to add."""
    brightness, contrast, saturation, hue = colors
    turn = 2.0 * math.pi * hue
    cos, sin = math.cos(turn) * saturation, math.sin(turn) * saturation
    matrix = _FROM_YIQ @ np.array([[1, 0, 0], [0, cos, -sin], [0, sin, cos]]) @ _TO_YIQ
    # Contrast scales values around the mean gray, which hue and saturation do not change.
    return matrix * (contrast * brightness), (1.0 - contrast) * brightness
