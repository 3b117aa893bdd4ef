"""Training crops: random scale, shape, rotation, place and colour, repeatable from numbers."""

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

GREY = np.array([0.299, 0.587, 0.114])
"""Weights of red, green and blue in grey (ITU-R 601)."""
# Grey, and the two axes of colour around it.
_TO_YIQ = np.array([GREY, [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
_FROM_YIQ = np.linalg.inv(_TO_YIQ)

_STRIP = 200  # rows of a crop that are sampled at a time

Pixels = npt.NDArray[np.uint8]
"""Colours [H, W, 3]."""


class Colours(NamedTuple):
    """How colours change: three factors, and a turn of the hues in full turns."""

    brightness: float
    contrast: float
    saturation: float
    hue: float


@dataclass(frozen=True)
class CropPlan:
    """Where in a photo a crop lies, in its pixels, and what else is done to it.

    The crop is the rectangle in the middle of `bounds` (left, top, right and bottom) with the
    edges `across` and `down`.
    """

    bounds: tuple[float, float, float, float]
    across: tuple[float, float]
    down: tuple[float, float]
    flip: bool
    colours: Colours


def draw_crop(
    width: int, height: int, settings: CropSettings, generator: np.random.Generator
) -> CropPlan:
    """Draw a crop of a photo of that size.

    The generator always gives the same number of draws, so that one setting can change without
    changing what the others do.
    """
    draws: list[float] = generator.random(10).tolist()
    spread = [2.0 * draw - 1.0 for draw in draws]
    angle = math.radians(spread[0] * settings.rotation)
    ratio = settings.max_ratio ** spread[1]
    area = settings.min_area + (settings.max_area - settings.min_area) * draws[2]

    # A rectangle of width √ratio and height 1/√ratio, turned, spans this much; then as large as
    # the photo allows, then reduced to the drawn area.
    cos, sin = math.cos(angle), math.sin(angle)
    wide, tall = math.sqrt(ratio), 1.0 / math.sqrt(ratio)
    span_x = wide * abs(cos) + tall * abs(sin)
    span_y = wide * abs(sin) + tall * abs(cos)
    scale = min(width / span_x, height / span_y) * math.sqrt(area)
    span_x = min(span_x * scale, width)  # rounding must not put it outside
    span_y = min(span_y * scale, height)
    left, top = draws[3] * (width - span_x), draws[4] * (height - span_y)
    return CropPlan(
        bounds=(left, top, min(left + span_x, width), min(top + span_y, height)),
        across=(cos * wide * scale, sin * wide * scale),
        down=(-sin * tall * scale, cos * tall * scale),
        flip=draws[5] < settings.flip,
        colours=Colours(
            1.0 + spread[6] * settings.brightness,
            1.0 + spread[7] * settings.contrast,
            1.0 + spread[8] * settings.saturation,
            spread[9] * settings.hue,
        ),
    )


def random_crop(
    image: Image.Image, settings: CropSettings, generator: np.random.Generator
) -> Tensor:
    """Draw a crop of an RGB photo, and make it: uint8 [3, S, S]."""
    plan = draw_crop(image.width, image.height, settings, generator)
    across, down = np.array(plan.across), np.array(plan.down)
    crop = _resample(image, plan.bounds, across, down, settings.size)
    if plan.flip:
        crop = crop[:, ::-1].copy()
    return torch.from_numpy(np.ascontiguousarray(_jitter(crop, *plan.colours).transpose(2, 0, 1)))


class Crop(NamedTuple):
    """One crop uint8 [3, S, S], its label, and the errors of files that it stands in for."""

    image: Tensor
    label: int
    errors: tuple[str, ...]


class CropBatch(NamedTuple):
    """Crops uint8 [B, 3, S, S], labels int64 [B], and the errors met on the way."""

    images: Tensor
    labels: Tensor
    errors: tuple[str, ...]


class UnreadableClassError(InputError):
    """No image of a class can be decoded."""

    def __init__(self, message: str) -> None:
        # A data loader raises a worker's error again with its traceback for a message; the
        # sentence of the error itself stands at its end.
        name = f"{type(self).__name__}: "
        super().__init__(message.rpartition(name)[2].strip())


class CropDataset(Dataset[Crop]):
    """Random crops of labelled images; a key is a pair (iteration, index of the image).

    A crop depends on the seed and its key alone, not on the order of calls or the process.
    Use it with a batch sampler of such pairs:
    `DataLoader(dataset, batch_sampler=..., collate_fn=collate)`.

    In place of an image that cannot be decoded comes the next of the same class, with the error
    in `Crop.errors`, so that batches keep their size.
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
        """What the crop of a key is drawn with."""
        return np.random.default_rng([self.seed, *key])

    def _same_class_from(self, index: int, label: int) -> list[int]:
        """The images of a class in their order, from `index` on and round to before it."""
        start = self._class_end[label - 1] if label > 0 else 0
        members = self._by_class[start : self._class_end[label]]
        return [int(i) for i in np.roll(members, -int(np.searchsorted(members, index)))]


def collate(crops: Sequence[Crop]) -> CropBatch:
    """Put crops together into a batch."""
    return CropBatch(
        default_collate([crop.image for crop in crops]),  # in a worker into shared memory at once
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
    """The rectangle in the middle of `bounds` with edges `across` and `down`, size × size."""
    left, top, right, bottom = bounds
    if across[1] == 0.0 and across[0] > 0.0:
        made = image.resize((size, size), Image.Resampling.BICUBIC, bounds, reducing_gap=3.0)
        return np.asarray(made)
    # An affine transform does not average over the pixels it skips: reduce before, not after.
    reduction = math.sqrt(float(np.linalg.norm(across) * np.linalg.norm(down))) / size
    if reduction > 1.0:
        extent = np.array([right - left, bottom - top])
        width, height = (max(1, round(length / reduction)) for length in extent.tolist())
        image = image.resize((width, height), Image.Resampling.BICUBIC, bounds, reducing_gap=3.0)
        shrink = np.array([width, height]) / extent
        across, down = across * shrink, down * shrink
        left, top, right, bottom = 0.0, 0.0, float(width), float(height)
    # With the neighbours of the outermost samples; OpenCV takes no photo of 32768 pixels or more.
    x, y = max(0, math.floor(left) - 2), max(0, math.floor(top) - 2)
    ends = min(image.width, math.ceil(right) + 2), min(image.height, math.ceil(bottom) + 2)
    edges = np.column_stack([across, down])
    middle = np.array([(left + right) / 2 - x, (top + bottom) / 2 - y])
    # OpenCV counts from the middle of the first pixel, the rectangle from its corner.
    start = middle - edges.sum(axis=1) * (0.5 - 0.5 / size) - 0.5
    return _warp(np.asarray(image.crop((x, y, *ends))), edges / size, start, size)


def _warp(
    pixels: Pixels, steps: npt.NDArray[np.float64], start: npt.NDArray[np.float64], size: int
) -> Pixels:
    """Cubic samples at `start + steps @ (column, row)`: size × size.

    OpenCV is quicker on floats than on whole numbers, if they are few enough for memory to be
    used again instead of being asked for: hence the strips.
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
        # Rounds, and cuts off at 0 and 255.
        cv2.add(strip, np.zeros(4), turned[row : row + height], dtype=cv2.CV_8U)
    return turned


def _jitter(
    crop: Pixels, brightness: float, contrast: float, saturation: float, hue: float
) -> Pixels:
    """Change the colours, all at once: each change is affine, so their chain is one matrix."""
    colours = Colours(brightness, contrast, saturation, hue)
    if colours == (1.0, 1.0, 1.0, 0.0):
        return crop
    with requires("train", "a random crop"):
        import cv2

    matrix, share = colour_change(colours)
    offset = np.full((3, 1), share * float(GREY @ cv2.mean(crop)[:3]))
    return np.asarray(cv2.transform(crop, np.hstack([matrix, offset])))


def colour_change(colours: Colours) -> tuple[npt.NDArray[np.float64], float]:
    """The matrix [3, 3] that colours are multiplied with, and the share of the mean grey added."""
    brightness, contrast, saturation, hue = colours
    turn = 2.0 * math.pi * hue
    cos, sin = math.cos(turn) * saturation, math.sin(turn) * saturation
    matrix = _FROM_YIQ @ np.array([[1, 0, 0], [0, cos, -sin], [0, sin, cos]]) @ _TO_YIQ
    # Contrast spreads values around the mean grey, which turning and fading colours keep.
    return matrix * (contrast * brightness), (1.0 - contrast) * brightness
