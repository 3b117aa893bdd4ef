"""Local features of a photo: Hessian-affine regions with RootSIFT descriptors."""

from dataclasses import dataclass

import cv2
import numpy as np
from PIL import Image

from listwise.local.hessian import CAMERA_BLUR, Float32, hessian_regions
from listwise.local.sift import root_sift

COUNT = 2000
SMALL = 640  # a long side below it is doubled: small photos have too few regions otherwise


@dataclass(frozen=True, eq=False)
class Features:
    """n local features of a photo, the strongest first.

    Shapes: `points` [n, 2] (x, y in pixels of the photo), `scales` [n], `shapes` [n, 2, 2] of
    determinant 1 (a region is point + scale · shape · unit circle), `descriptors` [n, D], unit
    rows; all float32.
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
        return sum(
            array.nbytes for array in (self.points, self.scales, self.shapes, self.descriptors)
        )


def hessian_affine(photo: Image.Image, count: int = COUNT) -> Features:
    """The `count` strongest Hessian-affine regions of a photo with RootSIFT, [n, 128]."""
    grey = np.asarray(photo.convert("L"), dtype=np.float32) / 255
    zoom = 2 if max(grey.shape) < SMALL else 1
    if zoom > 1:
        grey = cv2.resize(grey, None, fx=zoom, fy=zoom, interpolation=cv2.INTER_LINEAR)
    regions = hessian_regions(grey, count, CAMERA_BLUR * zoom)
    descriptors = root_sift(grey, regions)
    # A doubled photo's pixel i lies at (i + 0.5) / 2 - 0.5.
    points = (regions.points + 0.5) / zoom - 0.5
    return Features(
        points.astype(np.float32),
        (regions.scales / zoom).astype(np.float32),
        regions.shapes,
        descriptors,
    )
