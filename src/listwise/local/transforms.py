"""Affine transforms and homographies between points of two photos, many at a time.

Spatial verification of a hundred photos fits thousands of transforms to a few points each. One call
for all transforms of a photo takes a fraction of the time of one call per transform, and threads
that verify other photos wait less for the interpreter.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]

MAX_SCALE_CHANGE = 1.5  # maximum ratio between the scale change of a pair and that of the transform
MIN_HOMOGRAPHY_INLIERS = 10  # to fit a homography
MAX_SCALE, MAX_STRETCH = 8.0, 6.0
_PART = 1 << 15  # errors that are computed together, so that they stay in the cache of a core


@dataclass(frozen=True, eq=False)
class PointPairs:
    """m pairs of points of two photos.

    Shapes: points `start` [m, 2] and `end` [m, 2]; `one` and `two` are the distances allowed in
    each photo; `growth` [m] is the logarithm of the scale change of each pair.
    """

    start: Float64
    end: Float64
    one: float
    two: float
    growth: Float64

    def count_affine_inliers(self, transforms: Float64) -> NDArray[np.int64]:
        """Count errors of affine transforms that are at most 1, and at most 4: [t, 3, 3] -> [2, t].

        Errors are those of `affine_errors`.
        """
        rows = max(1, _PART // len(self.start))
        counts = []
        for start in range(0, len(transforms), rows):
            errors = self.affine_errors(transforms[start : start + rows])
            counts.append([np.count_nonzero(errors <= limit, axis=1) for limit in (1, 4)])
        return np.concatenate(counts, axis=1)

    def affine_errors(self, transforms: Float64) -> Float64:
        """Return the `errors` of affine transforms, which take fewer steps: [t, 3, 3] -> [t, m]."""
        # The rows of both differences, divided by the distance allowed: x and y of `transform ·
        # start - end`, and of `inverse · end - start`.
        rows = np.zeros((4, len(transforms), 5))
        inverse = np.linalg.inv(transforms)
        rows[:2, :, :3] = transforms[:, :2].transpose(1, 0, 2) / self.two
        rows[0, :, 3] = rows[1, :, 4] = -1 / self.two
        rows[2:, :, 2:] = inverse[:, :2, [2, 0, 1]].transpose(1, 0, 2) / self.one
        rows[2, :, 0] = rows[3, :, 1] = -1 / self.one
        columns = np.stack([*self.start.T, np.ones(len(self.start)), *self.end.T])
        distances = (rows.reshape(-1, 5) @ columns).reshape(4, len(transforms), len(self.start))
        distances *= distances
        distances[0] += distances[1]
        distances[2] += distances[3]
        errors: Float64 = np.maximum(distances[0], distances[2], out=distances[0])
        growth = np.log(_determinants(transforms[:, :2, :2]))[:, None] / 2
        errors[np.abs(growth - self.growth) > np.log(MAX_SCALE_CHANGE)] = np.inf
        return errors

    def errors(self, transforms: Float64) -> Float64:
        """Return the larger squared error of both directions: [t, 3, 3] -> [t, m].

        An error of 1 is just allowed. It is infinite where the scale change of the transform
        differs too much from that of the pair.
        """
        depths, there = _squared_distances(transforms, self.start, self.end)
        inverse = np.asarray(np.linalg.inv(transforms), np.float64)
        _, back = _squared_distances(inverse, self.end, self.start)
        errors: Float64 = np.maximum(there / self.two**2, back / self.one**2)
        # A small area grows by det / w^3.
        growth = np.log(np.linalg.det(transforms))[:, None] / 2
        growth = growth - 1.5 * np.log(np.maximum(depths, 1e-12))
        errors[np.abs(growth - self.growth) > np.log(MAX_SCALE_CHANGE)] = np.inf
        return errors


def fit_affine(start: Float64, end: Float64, chosen: Bool) -> tuple[Float64, Bool]:
    """Fit affine transforms to pairs of points by least squares.

    Args:
        start: points [m, 2].
        end: their targets [m, 2].
        chosen: the pairs that each transform is fitted to, bool [t, m].

    Returns:
        Transforms [t, 3, 3], and which of them the pairs determine and are plausible: bool [t].
    """
    weights = chosen.astype(np.float64)
    numbers = weights.sum(axis=1)
    share = weights / np.maximum(numbers, 1)[:, None]
    middle, target = share @ start, share @ end
    centered = (start - middle[:, None]) * weights[:, :, None]
    both = np.concatenate([centered, end - target[:, None]], axis=2)
    products = centered.transpose(0, 2, 1) @ both  # of the normal equations, [t, 2, 4]
    a, b, c = products[:, 0, 0], products[:, 0, 1], products[:, 1, 1]
    det = a * c - b * b
    large = (a + c) / 2 + np.hypot((a - c) / 2, b)
    # Points on a line have a second singular value of almost 0.
    determined = (numbers >= 3) & (det > 1e-12 * large * large)
    adjugate = np.stack([c, -b, -b, a], axis=1).reshape(-1, 2, 2)
    solution = adjugate @ products[:, :, 2:] / np.where(determined, det, 1)[:, None, None]
    transforms = np.zeros((len(chosen), 3, 3))
    linear = transforms[:, :2, :2] = solution.transpose(0, 2, 1)
    transforms[:, :2, 2] = target - (linear @ middle[:, :, None])[:, :, 0]
    transforms[:, 2, 2] = 1
    return transforms, determined & plausible(linear)


def fit_homographies(start: Float64, end: Float64, chosen: Bool) -> tuple[Float64, Bool]:
    """Fit homographies to pairs of points; arguments and result are those of `fit_affine`."""
    weights = chosen.astype(np.float64)
    numbers = weights.sum(axis=1)
    share = weights / np.maximum(numbers, 1)[:, None]
    middle, size = _centers(start, share)
    target, target_size = _centers(end, share)
    x, y = ((start - middle[:, None]) / size[:, None]).transpose(2, 0, 1)
    u, v = ((end - target[:, None]) / target_size[:, None]).transpose(2, 0, 1)
    # The equations are those of the direct linear transform: p · h1 - u p · h3 = 0 and
    # p · h2 - v p · h3 = 0, with p = (x, y, 1) and the rows h1, h2, h3 of the homography.
    points = np.stack([x, y, np.ones_like(x)], axis=2)
    factors = np.stack([weights, -weights * u, -weights * v, weights * (u * u + v * v)], axis=2)
    spread = (factors[:, :, :, None] * points[:, :, None, :]).reshape(*x.shape, 12)
    blocks = (points.transpose(0, 2, 1) @ spread).reshape(-1, 3, 4, 3).transpose(0, 2, 1, 3)
    normal = np.zeros((len(chosen), 9, 9))
    normal[:, :3, :3] = normal[:, 3:6, 3:6] = blocks[:, 0]
    normal[:, :3, 6:] = normal[:, 6:, :3] = blocks[:, 1]
    normal[:, 3:6, 6:] = normal[:, 6:, 3:6] = blocks[:, 2]
    normal[:, 6:, 6:] = blocks[:, 3]
    values, vectors = np.linalg.eigh(normal)
    determined = (numbers >= MIN_HOMOGRAPHY_INLIERS) & (values[:, 1] >= 1e-9 * values[:, -1])
    inner = vectors[:, :, 0].reshape(-1, 3, 3)
    transforms = (
        _similarities(target_size, target) @ inner @ _similarities(1 / size, -middle / size)
    )
    depth = (transforms[:, 2, :2] * middle).sum(axis=1) + transforms[:, 2, 2]
    determined &= np.abs(depth) >= 1e-12
    transforms /= np.where(determined, depth, 1)[:, None, None]
    return transforms, determined & _plausible_at(transforms, start, chosen)


def plausible(linear: Float64) -> Bool:
    """Whether linear maps [t, 2, 2] do not mirror, and scale and stretch only moderately."""
    return _moderate(_determinants(linear), (linear * linear).sum(axis=(1, 2)))


def _moderate(det: Float64, squares: Float64) -> Bool:
    """`plausible`, from the determinants and the sums of squares of linear maps."""
    area = np.maximum(det, 1e-12)  # the square of the scale; squares / area is r + 1/r
    moderate: Bool = (
        (det > 0)
        & (area < MAX_SCALE**2)
        & (area > MAX_SCALE**-2)
        & (squares < (MAX_STRETCH + 1 / MAX_STRETCH) * area)
    )
    return moderate


def _plausible_at(transforms: Float64, points: Float64, chosen: Bool) -> Bool:
    """Whether homographies are plausible at all their chosen points: [t, 3, 3] -> bool [t]."""
    x, y, w = _mapped(transforms, points)
    sound = w > 0.1
    w = np.where(sound, w, 1)
    x, y = x / w, y / w
    t = transforms[:, :, :, None]
    squares = (t[:, 0, 0] - x * t[:, 2, 0]) ** 2 + (t[:, 0, 1] - x * t[:, 2, 1]) ** 2
    squares += (t[:, 1, 0] - y * t[:, 2, 0]) ** 2 + (t[:, 1, 1] - y * t[:, 2, 1]) ** 2
    det = np.linalg.det(transforms)[:, None] / w**3
    good: Bool = ((sound & _moderate(det, squares / w**2)) | ~chosen).all(axis=1)
    return good


def _mapped(transforms: Float64, points: Float64) -> Float64:
    """Return homogeneous coordinates of transformed points: [t, 3, 3], [m, 2] -> [3, t, m]."""
    columns = np.stack([*points.T, np.ones(len(points))])
    mapped: Float64 = (transforms.transpose(1, 0, 2).reshape(-1, 3) @ columns).reshape(
        3, len(transforms), len(points)
    )
    return mapped


def _squared_distances(
    transforms: Float64, start: Float64, end: Float64
) -> tuple[Float64, Float64]:
    """Return depths, and squared distances between transformed points and their targets: [t, m].

    The distance of a point that comes to lie behind the camera is infinite.
    """
    x, y, depths = _mapped(transforms, start)
    w = np.where(depths > 0, depths, 1)
    squared: Float64 = (x / w - end[:, 0]) ** 2 + (y / w - end[:, 1]) ** 2
    squared[~(depths > 0)] = np.inf
    return depths, squared


def _determinants(linear: Float64) -> Float64:
    det: Float64 = linear[:, 0, 0] * linear[:, 1, 1] - linear[:, 0, 1] * linear[:, 1, 0]
    return det


def _centers(points: Float64, share: Float64) -> tuple[Float64, Float64]:
    """Return the mean of chosen points [t, 2], and their mean distance from it [t, 1]."""
    middle = share @ points
    x, y = (points - middle[:, None]).transpose(2, 0, 1)
    size = np.maximum((np.hypot(x, y) * share).sum(axis=1), 1e-9)
    return middle, size[:, None]


def _similarities(scale: Float64, shift: Float64) -> Float64:
    """Return the transforms scale · x + shift: [t, 1], [t, 2] -> [t, 3, 3]."""
    transforms = np.zeros((len(shift), 3, 3))
    transforms[:, 0, 0] = transforms[:, 1, 1] = scale[:, 0]
    transforms[:, :2, 2] = shift
    transforms[:, 2, 2] = 1
    return transforms
