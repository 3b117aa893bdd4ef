"""Random training crops of photos, repeatable from a seed."""

import math
from collections.abc import Sequence
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

DRAWS = 10
"""Random numbers per crop."""

Pixels = npt.NDArray[np.uint8]
"""Colors [H, W, 3]."""
Doubles = npt.NDArray[np.float64]

_WORD = 2**64 - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class CropPlans(NamedTuple):
    """Places of n crops in their photos, in pixels, and the changes applied to them.

    A crop is a rotated rectangle with the edges `across` and `down`, in the middle of its bounds.

    Attributes:
        bounds: left, top, right and bottom of each crop: [n, 4].
        across: the edges from left to right, as vectors (x, y): [n, 2].
        down: the edges from top to bottom: [n, 2].
        flip: whether a crop is mirrored: bool [n].
        colors: factors of brightness, contrast and saturation, and a rotation of hues in full
            turns: [n, 4].
    """

    bounds: Doubles
    across: Doubles
    down: Doubles
    flip: npt.NDArray[np.bool_]
    colors: Doubles


def plan_crops(
    widths: npt.ArrayLike, heights: npt.ArrayLike, settings: CropSettings, draws: Doubles
) -> CropPlans:
    """Turn random numbers into crops of n photos of these sizes: [n], [n], [n, DRAWS].

    Every crop uses the same number of draws, so changing one setting does not affect the others.
    """
    width, height = (np.asarray(each, dtype=np.float64) for each in (widths, heights))
    draw = draws.T
    spread = 2.0 * draw - 1.0
    angle = np.radians(spread[0] * settings.rotation)
    ratio = settings.max_ratio ** spread[1]
    area = settings.min_area + (settings.max_area - settings.min_area) * draw[2]

    # A rotated rectangle of width √ratio and height 1/√ratio has this extent. It is enlarged as far
    # as the photo allows, and then reduced to the drawn area.
    cos, sin = np.cos(angle), np.sin(angle)
    wide, tall = np.sqrt(ratio), 1.0 / np.sqrt(ratio)
    span_x = wide * abs(cos) + tall * abs(sin)
    span_y = wide * abs(sin) + tall * abs(cos)
    scale = np.minimum(width / span_x, height / span_y) * np.sqrt(area)
    span_x = np.minimum(span_x * scale, width)  # rounding must not move it outside
    span_y = np.minimum(span_y * scale, height)
    left, top = draw[3] * (width - span_x), draw[4] * (height - span_y)
    right, bottom = np.minimum(left + span_x, width), np.minimum(top + span_y, height)
    strengths = np.array([settings.brightness, settings.contrast, settings.saturation])
    factors = 1.0 + spread[6:9] * strengths[:, None]
    return CropPlans(
        bounds=np.stack([left, top, right, bottom], 1),
        across=np.stack([cos * wide * scale, sin * wide * scale], 1),
        down=np.stack([-sin * tall * scale, cos * tall * scale], 1),
        flip=draw[5] < settings.flip,
        colors=np.stack([*factors, spread[9] * settings.hue], 1),
    )


def uniform_draws(seed: int, update: int, indices: npt.NDArray[np.int64]) -> Doubles:
    """Return uniform numbers in [0, 1) for the crops of n images: [n] -> [n, DRAWS].

    They are hashes (SplitMix64) of the arguments: those of an image do not depend on the others,
    and a GPU plans thousands of crops at once.
    """
    state = np.zeros(len(indices), dtype=np.uint64)
    for word in (np.uint64(seed & _WORD), np.uint64(update), indices.astype(np.uint64)):
        state = _mixed((state + _GOLDEN) ^ word)
    counter = _GOLDEN * np.arange(1, DRAWS + 1, dtype=np.uint64)
    words = _mixed(state[:, None] + counter)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words


def random_crop(
    image: Image.Image, settings: CropSettings, generator: np.random.Generator
) -> Tensor:
    """Return a random crop of an RGB photo: uint8 [3, S, S]."""
    return _crop(image, settings, generator.random((1, DRAWS)))


def _crop(image: Image.Image, settings: CropSettings, draws: Doubles) -> Tensor:
    (bounds,), (across,), (down,), (flip,), (colors,) = plan_crops(
        [image.width], [image.height], settings, draws
    )
    left, top, right, bottom = bounds.tolist()
    crop = _resample(image, (left, top, right, bottom), across, down, settings.size)
    if flip:
        crop = crop[:, ::-1].copy()
    return torch.from_numpy(np.ascontiguousarray(_jitter(crop, *colors).transpose(2, 0, 1)))


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
        update, index = key
        label = int(self.images.labels[index])
        draws = self.draws(update, np.array([index]))
        errors: list[str] = []
        for candidate in self._same_class_from(index, label):
            try:
                photo = self.images.file(candidate).image(self.settings.min_side)
            except ImageError as error:
                errors.append(str(error))
                continue
            return Crop(_crop(photo, self.settings, draws), label, tuple(errors))
        raise InputError(
            f"no photo of the class {self.images.class_names[label]!r} can be decoded; "
            f"the first: {errors[0]}"
        )

    def draws(self, update: int, indices: npt.NDArray[np.int64]) -> Doubles:
        """Return the random numbers of the crops of n images in an update: [n] -> [n, DRAWS]."""
        return uniform_draws(self.seed, update, indices)

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
    """Sample pixels bicubically at `start + steps @ (column, row)`: uint8 [size, size, 3]."""
    with requires("train", "a random crop"):
        import cv2

    return np.asarray(
        cv2.warpAffine(
            pixels,
            np.column_stack([steps, start]),
            (size, size),
            flags=cv2.INTER_CUBIC | cv2.WARP_INVERSE_MAP,
            borderMode=cv2.BORDER_REPLICATE,
        )
    )


def _jitter(
    crop: Pixels, brightness: float, contrast: float, saturation: float, hue: float
) -> Pixels:
    """Change the colors in one step: each change is affine, so their chain is one matrix."""
    colors = np.array([[brightness, contrast, saturation, hue]])
    if (colors == (1.0, 1.0, 1.0, 0.0)).all():
        return crop
    with requires("train", "a random crop"):
        import cv2

    (matrix,), (share,) = color_changes(colors)
    offset = np.full((3, 1), share * float(GRAY @ cv2.mean(crop)[:3]))
    return np.asarray(cv2.transform(crop, np.hstack([matrix, offset])))


def color_changes(colors: Doubles) -> tuple[Doubles, Doubles]:
    """Return matrices [n, 3, 3], and shares of the mean gray to add [n], for colors [n, 4]."""
    brightness, contrast, saturation, hue = colors.T
    turn = 2.0 * math.pi * hue
    cos, sin = np.cos(turn) * saturation, np.sin(turn) * saturation
    turned = np.zeros((len(colors), 3, 3))
    turned[:, 0, 0] = 1.0
    turned[:, 1, 1] = turned[:, 2, 2] = cos
    turned[:, 1, 2], turned[:, 2, 1] = -sin, sin
    # Contrast scales values around the mean gray, which hue and saturation do not change.
    factors = contrast * brightness
    return _FROM_YIQ @ turned @ _TO_YIQ * factors[:, None, None], (1.0 - contrast) * brightness
