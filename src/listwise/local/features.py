"""Local features of a photo: Hessian-affine regions with RootSIFT descriptors."""

from dataclasses import dataclass, replace
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
SMALL = 640  # photos whose long side is shorter are doubled: they have too few regions otherwise
LARGE = 1024  # photos whose long side is longer are reduced


@dataclass(frozen=True, eq=False)
class Features:
    """n local features of a photo, the strongest first.

    Shapes: `points` [n, 2] (x, y in pixels of the photo, 0 in the middle of the first), `scales`
    [n], `shapes` [n, 2, 2] of determinant 1 (a region is point + scale · shape · unit circle),
    `descriptors` [n, D], unit rows; all float32.
    """

    points: Float32
    scales: Float32
    shapes: Float32
    descriptors: Float32

    def __len__(self) -> int:
        return len(self.points)

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        arrays = (self.points, self.scales, self.shapes, self.descriptors)
        return sum(array.nbytes for array in arrays)

    def scaled(self, factor: float) -> "Features":
        """The same features of the photo at `factor` times its size."""
        return replace(
            self,
            points=((self.points + 0.5) * factor - 0.5).astype(np.float32),
            scales=(self.scales * factor).astype(np.float32),
        )

    def moved(self, left: float, top: float) -> "Features":
        """The same features of a photo in which this one's corner lies at (left, top)."""
        return replace(self, points=self.points + np.array([left, top], np.float32))


def hessian_affine(photo: Image.Image, count: int = COUNT) -> Features:
    """The `count` strongest Hessian-affine regions of an upright photo with RootSIFT, [n, 128].

    Regions stand upright, so features of a photo and of the same photo turned do not match.
    """
    grey: Float32 = np.asarray(photo.convert("L"), dtype=np.float32) / np.float32(255)
    side = max(grey.shape)
    zoom = 2.0 if side < SMALL else min(1.0, LARGE / side)
    if zoom != 1:
        kind = cv2.INTER_LINEAR if zoom > 1 else cv2.INTER_AREA
        size = [max(1, round(length * zoom)) for length in photo.size]
        grey = cv2.resize(grey, size, interpolation=kind)
    regions = hessian_regions(grey, count, CAMERA_BLUR * max(zoom, 1.0))
    found = Features(regions.points, regions.scales, regions.shapes, root_sift(grey, regions))
    return found.scaled(1 / zoom)


def photo_features(path: str | Path, box: Box | None = None, count: int = COUNT) -> Features:
    """`hessian_affine` of a photo on disk or of its box, placed in the upright whole photo."""
    return file_features(PhotoFile(str(path), box), count)


def file_features(file: PhotoFile, count: int = COUNT) -> Features:
    """`photo_features` of a file, which is read if it has not been."""
    file = file.read()
    photo = file.image(min_side=LARGE)
    found = hessian_affine(photo, count)
    if file.box is not None:
        return found.moved(max(0, round(file.box[0])), max(0, round(file.box[1])))
    # Large JPEG files are decoded at a part of their size.
    return found.scaled(file.size()[0] / photo.width)
