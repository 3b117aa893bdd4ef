"""Local features of a photo: Hessian-affine regions with RootSIFT descriptors."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image

from listwise.data import Box, PhotoFile
from listwise.local.hessian import CAMERA_BLUR, Float32, hessian_regions
from listwise.local.sift import root_sift
from listwise.optional import requires

with requires("local", "local features"):
    import cv2

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
    found = Features(regions.points, regions.scales, regions.shapes, root_sift(gray, regions))
    return found.scaled(1 / zoom)


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
    """Extract the features of a `PhotoFile`, as `photo_features` does; read it if necessary."""
    file = file.read()
    photo = file.image(min_side=LARGE)
    found = hessian_affine(photo, count)
    if file.box is not None:
        return found.moved(max(0, round(file.box[0])), max(0, round(file.box[1])))
    # Large JPEG files are decoded at a fraction of their size.
    return found.scaled(file.size()[0] / photo.width)
