"""Small pictures of photos: signatures that find pairs of copies, and the alignment of a pair."""

import io
from itertools import product
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

Float32 = npt.NDArray[np.float32]

SIDE: Final = 64  # of a picture, whatever the shape of the photo
_FREQUENCIES = 12  # of the cosine transform, per axis
_SAMPLES = 32  # points of a window to which the cosine transform is applied, per axis
_BORDER, _SHARE = 16, 0.03  # gray levels and share of pixels by which a line is not a border
_STEPS = 6  # of the alignment
_MAX_STEP = 0.05
_COVERED = 0.7  # minimum share of each side that two pictures have in common
_COLOR_NOISE = 6.0**2  # squared difference of colors that are considered to be equal
_COLORS = 0.5  # minimum similarity of colors
_SHAPES = 1.25  # maximum ratio of the shapes of two windows, width divided by height

# Left, top, width and height of the windows of a picture that a copy may show: all of it, or a part
# from which one side or two sides were cut off.
_NINE_TENTHS = [(left, top, 0.9, 0.9) for left, top in product((0, 0.05, 0.1), repeat=2)]
_ONE_SIDE = [(0.1, 0, 0.9, 1), (0, 0, 0.9, 1), (0, 0.1, 1, 0.9), (0, 0, 1, 0.9)]
WINDOWS: Final = np.array([(0, 0, 1, 1), *_NINE_TENTHS, *_ONE_SIDE], np.float32)

_IMPORTANCE = np.hypot(*np.ogrid[:_FREQUENCIES, :_FREQUENCIES]).astype(np.float32)
_CENTERS = ((np.arange(SIDE) + 0.5) / SIDE).astype(np.float32)
_PLACES = np.arange(SIDE, dtype=np.float32)


class Picture(NamedTuple):
    """A photo without its border: luma and colors [3, SIDE, SIDE], and its width per height."""

    pixels: Float32
    shape: float


def read_picture(photo: bytes) -> Picture:
    """Make a picture of an image file."""
    with Image.open(io.BytesIO(photo)) as file:
        file.draft("YCbCr", (2 * SIDE, 2 * SIDE))
        image = file.convert("YCbCr")
    frame = _inside(np.asarray(image.getchannel(0), np.int16))
    inner = image.crop(frame)
    small = inner.resize((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=3.0)
    return Picture(np.asarray(small, np.float32).transpose(2, 0, 1), inner.width / inner.height)


def _inside(gray: npt.NDArray[np.int16]) -> tuple[int, int, int, int]:
    """The part of a photo inside a border of one color; opposite sides are cut equally."""
    height, width = gray.shape
    other = np.abs(gray - gray[0, 0]) > _BORDER
    rows, columns = (np.flatnonzero(other.mean(axis) > _SHARE) for axis in (1, 0))
    if not len(rows) or not len(columns):
        return 0, 0, width, height
    left = int(min(columns[0], width - 1 - columns[-1]))
    top = int(min(rows[0], height - 1 - rows[-1]))
    return left, top, width - left, height - top


def signatures(pictures: Float32, window: Float32) -> Float32:
    """Unit vectors of the low frequencies in a window of pictures: [n, 3, SIDE, SIDE] -> [n, d].

    High frequencies weigh more, because the low ones of most photos are alike.
    """
    left, top, width, height = window
    found = _cosines(top, height) @ pictures[:, 0] @ _cosines(left, width).T * _IMPORTANCE
    rows = found.reshape(len(pictures), -1)
    unit: Float32 = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6)
    return unit


def mirror_signatures(rows: Float32) -> Float32:
    """The signatures of whole pictures after they are mirrored: [n, d]."""
    signs = (-1.0) ** np.arange(_FREQUENCIES, dtype=np.float32)
    mirrored: Float32 = rows.reshape(-1, _FREQUENCIES, _FREQUENCIES) * signs
    return mirrored.reshape(rows.shape)


def _cosines(start: float, length: float) -> Float32:
    """The cosine transform of a part of an axis: [_FREQUENCIES, SIDE]."""
    steps = (np.arange(_SAMPLES) + 0.5) / _SAMPLES
    at = (start + length * steps) * SIDE - 0.5
    near = np.maximum(0, 1 - np.abs(at[:, None] - _PLACES) * _SAMPLES / (length * SIDE))
    near /= near.sum(axis=1, keepdims=True)
    waves = np.cos(np.pi * np.arange(_FREQUENCIES)[:, None] * steps)
    return (waves @ near / _SAMPLES).astype(np.float32)


def compare_aligned(
    one: Float32, other: Float32, windows: Float32, shapes: npt.NDArray[np.floating]
) -> Float32:
    """How equal pictures are in their details, at most 1: twice [n, 3, SIDE, SIDE] -> [n].

    Gauss-Newton steps move and scale the windows of `one` until they look like `other`, with
    another brightness and contrast. The result is the correlation of the details, which differ
    between two photos of one thing; 0 if the colors or the shapes differ, or if the pictures have
    only a part in common.

    Args:
        one: n pictures.
        other: n pictures.
        windows: the window of each picture in `one` from which the alignment starts, [n, 4].
        shapes: width per height of the photo in `one`, divided by that in `other`, [n].
    """
    best, chosen = np.full(len(one), -1, np.float32), windows
    for _ in range(_STEPS):
        shown = _cut(one[:, :1], windows)[:, 0]
        fit = _correlation(shown, other[:, 0])
        chosen = np.where((fit > best)[:, None], windows, chosen)
        best = np.maximum(fit, best)
        windows = (windows + _improvement(shown, other[:, 0], windows)).astype(np.float32)
    alike = np.abs(np.log(shapes * chosen[:, 2] / chosen[:, 3])) < np.log(_SHAPES)
    return np.where(alike, _equality(_cut(one, chosen), other, chosen), 0).astype(np.float32)


def _cut(pictures: Float32, windows: Float32) -> Float32:
    """Windows of pictures as pictures: [n, 3, SIDE, SIDE]."""
    rows, columns = (_weights(windows[:, i], windows[:, i + 2])[:, None] for i in (1, 0))
    return (rows @ pictures @ columns.swapaxes(2, 3)).astype(np.float32, copy=False)


def _weights(start: Float32, length: Float32) -> Float32:
    """Weights of a linear interpolation along an axis, from starts and lengths: [n, SIDE, SIDE]."""
    at = np.clip((start[:, None] + length[:, None] * _CENTERS) * SIDE - 0.5, 0, SIDE - 1)
    weights: Float32 = np.maximum(0, 1 - np.abs(at[:, :, None] - _PLACES))
    return weights


def _improvement(shown: Float32, other: Float32, windows: Float32) -> Float32:
    """A Gauss-Newton step of the windows, with gain and offset of the gray levels: [n, 4]."""
    down, across = np.gradient(shown, axis=(1, 2))
    across *= SIDE / windows[:, 2, None, None]
    down *= SIDE / windows[:, 3, None, None]
    parts = [across, down, across * _CENTERS, down * _CENTERS[:, None], shown, np.ones_like(shown)]
    slopes = np.stack(parts, axis=1).reshape(len(shown), len(parts), -1)
    products = (slopes @ slopes.swapaxes(1, 2)).astype(float) + 1e-3 * np.eye(len(parts))
    found = np.linalg.solve(products, (slopes @ other.reshape(len(other), -1, 1)).astype(float))
    gain = np.maximum(found[:, 4], 0.2)
    return np.clip(found[:, :4, 0] / gain, -_MAX_STEP, _MAX_STEP).astype(np.float32)


def _equality(shown: Float32, other: Float32, windows: Float32) -> Float32:
    """The correlation of details of aligned pictures, or 0."""
    common = np.minimum(windows[:, :2] + windows[:, 2:], 1) - np.maximum(windows[:, :2], 0)
    covered = (common >= _COVERED) & (common >= _COVERED * windows[:, 2:])
    a, b = (
        each[:, 1:].reshape(len(each), 2, 8, SIDE // 8, 8, -1).mean((3, 5)) - 128
        for each in (shown, other)
    )
    ab, aa, bb = ((x * y).mean((1, 2, 3)) + _COLOR_NOISE for x, y in ((a, b), (a, a), (b, b)))
    colors = ab / np.maximum(aa, bb) >= _COLORS
    score = _correlation(_details(shown[:, 0]), _details(other[:, 0]))
    return np.where(covered.all(axis=1) & colors, score, 0).astype(np.float32)


def _details(gray: Float32) -> Float32:
    """Differences from the mean of the neighborhood; large ones, as of a watermark, count less."""
    sums = np.pad(gray.astype(float), ((0, 0), (3, 2), (3, 2)), "edge").cumsum(1).cumsum(2)
    mean = (sums[:, 5:, 5:] - sums[:, :-5, 5:] - sums[:, 5:, :-5] + sums[:, :-5, :-5]) / 25
    found = gray - mean
    usual = np.sqrt((found**2).mean((1, 2), keepdims=True)) + 1
    details: Float32 = np.tanh(found / usual).astype(np.float32)
    return details


def _correlation(one: Float32, other: Float32) -> Float32:
    """The correlation of gray pictures: twice [n, SIDE, SIDE] -> [n]."""
    a, b = (each - each.mean((1, 2), keepdims=True) for each in (one, other))
    norms = np.sqrt((a * a).sum((1, 2)) * (b * b).sum((1, 2)))
    found: Float32 = (a * b).sum((1, 2)) / np.maximum(norms, 1e-6)
    return found
