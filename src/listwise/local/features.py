"""Local features of a photo: Hessian-affine regions with RootSIFT descriptors."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from listwise.data import Box, PhotoFile
from listwise.local.hessian import (
    CAMERA_BLUR,
    Float32,
    Regions,
    hessian_regions,
    sample_patches,
    square_grid,
)
from listwise.optional import requires

with requires("local", "local features"):
    import cv2

PATCH = 33  # width of the patch of a region, in samples
EXTENT = 6.5  # half the width of the patch, in scales of the region
CELLS, DIRECTIONS = 4, 8
CLIP = 0.2
BLOCK = 128  # patches at a time: they stay in the cache of a core


def root_sift(gray: Float32, regions: Regions) -> Float32:
    """Compute RootSIFT of regions: gray image [H, W], n regions -> [n, 128], unit rows."""
    half = PATCH // 2
    grid = square_grid(PATCH)
    points, scales, shapes = regions
    spacing = scales * (EXTENT / half)
    # Each level has half the size. A patch is sampled where its samples are about a pixel apart.
    levels = np.maximum(np.floor(np.log2(np.maximum(spacing, 1e-6))), 0).astype(int)
    descriptors = np.zeros((len(points), CELLS * CELLS * DIRECTIONS), np.float32)
    pooling = _cell_weights()
    image, step = gray, 1.0
    for level in range(int(levels.max(initial=-1)) + 1):
        if level:
            image, step = cv2.pyrDown(image), step * 2
        chosen = np.flatnonzero(levels == level)
        for start in range(0, len(chosen), BLOCK):
            block = chosen[start : start + BLOCK]
            frames = shapes[block] * (spacing[block] / step)[:, None, None]
            patches = sample_patches(image, points[block] / step, frames, grid)
            descriptors[block] = describe_patches(patches.reshape(-1, PATCH, PATCH), pooling)
    return descriptors


def describe_patches(patches: Float32, pooling: Float32) -> Float32:
    """Compute RootSIFT of patches: [n, P, P] and the weights of `_cell_weights` -> [n, 128]."""
    n = len(patches)
    x = (patches[:, 1:-1, 2:] - patches[:, 1:-1, :-2]).reshape(n, -1)
    y = (patches[:, 2:, 1:-1] - patches[:, :-2, 1:-1]).reshape(n, -1)
    length, angle = cv2.cartToPolar(x, y)
    angle *= DIRECTIONS / (2 * np.pi)
    votes = np.empty((DIRECTIONS, *angle.shape), np.float32)
    for direction, vote in enumerate(votes):
        np.abs(np.subtract(angle, direction, out=vote), out=vote)
        if direction == 0:
            np.minimum(vote, DIRECTIONS - vote, out=vote)
        np.maximum(np.subtract(1, vote, out=vote), 0, out=vote)
        vote *= length
    pooled = votes.reshape(-1, votes.shape[2]) @ pooling.T
    histograms = pooled.reshape(DIRECTIONS, n, -1).transpose(1, 2, 0).reshape(n, -1)
    return root_normalize(histograms)


def root_normalize(histograms: Float32) -> Float32:
    """Clip as SIFT does, L1-normalize and take the square root: [n, 128] -> [n, 128]."""
    norm = np.linalg.norm(histograms, axis=1, keepdims=True)
    clipped = np.minimum(histograms, CLIP * norm)
    root: Float32 = np.sqrt(clipped / np.maximum(clipped.sum(axis=1, keepdims=True), 1e-12))
    return root


def _cell_weights() -> Float32:
    """Return the weight of each inner pixel of a patch in each cell: [16, (P-2)^2]."""
    inner = PATCH - 2
    place = (np.arange(inner) + 0.5) / inner * CELLS - 0.5  # in cells
    tent = np.maximum(0, 1 - np.abs(place[None] - np.arange(CELLS)[:, None]))
    centered = (np.arange(inner) + 0.5) / inner * 2 - 1
    bell = np.exp(-(centered**2) / 2)
    line = tent * bell
    weights: NDArray[np.float64] = np.einsum("ay,bx->abyx", line, line)
    return weights.reshape(CELLS * CELLS, inner * inner).astype(np.float32)


COUNT = 2000
SMALL = 640  # photos with a shorter long side are enlarged twice: they have too few regions
LARGE = 1024  # photos with a longer long side are reduced to it


@dataclass(frozen=True, eq=False)
class Features:
    """n local features of a photo, strongest first.

    A feature covers the ellipse point + scale · shape · unit circle. All arrays are float32.

    Attributes:
        points: [n, 2], x and y in pixels of the photo; the center of the first pixel is 0.
        scales: [n], in pixels.
        shapes: [n, 2, 2], determinant 1.
        descriptors: [n, D], unit rows.
    """

    points: Float32
    scales: Float32
    shapes: Float32
    descriptors: Float32

    def __len__(self) -> int:
        return len(self.points)

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        arrays = (self.points, self.scales, self.shapes, self.descriptors)
        return sum(array.nbytes for array in arrays)

    @cached_property
    def extent(self) -> float:
        """Diagonal of the bounding box of the points in pixels, at least 1."""
        return float(max(np.hypot(*np.ptp(self.points, axis=0)), 1.0))

    def scaled(self, factor: float) -> "Features":
        """Return the same features for the photo resized by `factor`."""
        return replace(
            self,
            points=((self.points + 0.5) * factor - 0.5).astype(np.float32),
            scales=(self.scales * factor).astype(np.float32),
        )

    def moved(self, left: float, top: float) -> "Features":
        """Return the same features for a larger photo that contains this one at (left, top)."""
        return replace(self, points=self.points + np.array([left, top], np.float32))


def hessian_affine(photo: Image.Image, count: int = COUNT) -> Features:
    """Extract the `count` strongest Hessian-affine regions of a photo, with RootSIFT descriptors.

    Regions have no orientation of their own, so a photo and a rotated copy of it do not match.

    Args:
        photo: an upright photo.
        count: maximum number of features.

    Returns:
        Features with descriptors [n, 128], n ≤ `count`.

    Examples:
        >>> one, two = hessian_affine(photo), hessian_affine(other)   # doctest: +SKIP
        >>> verify(one, two).inliers                                  # doctest: +SKIP
        57
    """
    gray: Float32 = np.asarray(photo.convert("L"), dtype=np.float32) / np.float32(255)
    side = max(gray.shape)
    zoom = 2.0 if side < SMALL else min(1.0, LARGE / side)
    if zoom != 1:
        kind = cv2.INTER_LINEAR if zoom > 1 else cv2.INTER_AREA
        size = [max(1, round(length * zoom)) for length in photo.size]
        gray = cv2.resize(gray, size, interpolation=kind)
    regions = hessian_regions(gray, count, CAMERA_BLUR * max(zoom, 1.0))
    return Features(*regions, root_sift(gray, regions)).scaled(1 / zoom)


def photo_features(path: str | Path, box: Box | None = None, count: int = COUNT) -> Features:
    """Extract the features of a photo on disk or of its box, as `hessian_affine` does.

    Points are in pixels of the upright whole photo. Descriptors are [n, 128], n ≤ `count`.

    Args:
        path: image file.
        box: left, top, right, bottom in pixels; the whole photo by default.
        count: maximum number of features.
    """
    return file_features(PhotoFile(str(path), box), count)


def file_features(file: PhotoFile, count: int = COUNT) -> Features:
    """Extract the features of a `PhotoFile`, as `photo_features` does."""
    photo = file.upright(LARGE)  # large JPEG files are decoded at a fraction of their size
    return hessian_affine(photo.image, count).scaled(photo.scale).moved(*photo.corner)
