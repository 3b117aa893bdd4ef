"""Spatial verification: how many local features of two photos agree on one transform."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from listwise.local.features import Features
from listwise.local.hessian import Float32

Float64 = NDArray[np.float64]
Pairs = NDArray[np.int64]

SIMILAR = 0.6  # cosine of deep features that may be of the same thing
RATIO = 0.9  # of the distances to the nearest and the second nearest feature
TOLERANCE = 0.02  # distance of an inlier from its place, in parts of each photo's extent
GROWTH = 1.5  # a pair's scales may differ so much more than the transform says, or less
HYPOTHESES = 1024
REFINED = 8  # the best hypotheses are fitted to their inliers
FEWEST = 4  # inliers of a transform
FOR_HOMOGRAPHY = 10  # inliers needed to fit one
MOST_SCALE, MOST_STRETCH = 8.0, 6.0


@dataclass(frozen=True, eq=False)
class Verified:
    """What two photos share: m features, and the transform that brings one set to the other.

    Shapes: `query_points` [m, 2] and `points` [m, 2] (x, y, the same row for the same thing),
    `transform` [3, 3] from the query's pixels to the other photo's.
    """

    inliers: int
    query_points: Float32
    points: Float32
    transform: Float64


def verify(query: Features, other: Features, pairs: Pairs | None = None) -> Verified:
    """Find the transform on which most pairs of features agree; the same answer every time.

    Every pair's two shapes alone give an affine transform; the best of these are fitted to the
    pairs that agree with them, as affine transforms and then as homographies.

    `pairs` are positions in both that may belong together, int64 [m, 2]; by default those whose
    descriptors are nearest to each other and to nothing else.
    """
    if pairs is None:
        pairs = nearest_pairs(query.descriptors, other.descriptors)
    if len(pairs) < FEWEST:
        return _nothing()
    one, two = pairs.T
    start, end = query.points[one].astype(np.float64), other.points[two].astype(np.float64)
    judge = _Judge(
        start,
        end,
        TOLERANCE * _extent(query.points),
        TOLERANCE * _extent(other.points),
        np.log(other.scales[two] / query.scales[one]).astype(np.float64),
    )
    frames = _frames(query, one), _frames(other, two)
    best, inliers = _best(judge, _hypotheses(start, end, *frames))
    if best is None:
        return _nothing()
    chosen = _one_to_one(pairs, inliers, judge.errors(best[None])[0])
    if len(chosen) < FEWEST:
        return _nothing()
    return Verified(
        len(chosen), query.points[one[chosen]], other.points[two[chosen]], best / best[2, 2]
    )


def nearest_pairs(query: Float32, other: Float32) -> Pairs:
    """Pairs of unit descriptors that are each other's nearest, and clearly so: [m, 2]."""
    if len(query) < 2 or len(other) < 2:
        return np.zeros((0, 2), np.int64)
    pairs, products = _mutual(query, other)
    block = products[pairs[:, 0]]
    first = products[pairs[:, 0], pairs[:, 1]]
    block[np.arange(len(pairs)), pairs[:, 1]] = -1
    # Squared distances are twice these; rounding must not make them negative.
    gap, next_gap = np.maximum(1 - first, 0), np.maximum(1 - block.max(axis=1), 0)
    clear: Pairs = pairs[gap < RATIO**2 * next_gap]
    return clear


def similar_pairs(query: Float32, other: Float32, least: float = SIMILAR) -> Pairs:
    """Pairs of unit descriptors that are each other's nearest and similar enough: [m, 2].

    For deep features, where the ratio test would refuse most true pairs: the second nearest of a
    location is mostly its neighbour, which sees nearly the same.
    """
    if not len(query) or not len(other):
        return np.zeros((0, 2), np.int64)
    pairs, products = _mutual(query, other)
    return pairs[products[pairs[:, 0], pairs[:, 1]] >= least]


def _mutual(query: Float32, other: Float32) -> tuple[Pairs, Float32]:
    """Pairs that are each other's nearest [m, 2], and all products [n, n']."""
    products: Float32 = query @ other.T
    nearest = products.argmax(axis=1)
    rows = np.flatnonzero(products.argmax(axis=0)[nearest] == np.arange(len(query)))
    return np.stack([rows, nearest[rows]], axis=1).astype(np.int64), products


def comparison(extractor: str) -> Callable[[Features, Features], Verified]:
    """How two photos' features of an extractor are compared, by its name."""
    pairs: Callable[..., Pairs] = similar_pairs if extractor.startswith("delf-") else nearest_pairs
    return lambda one, two: verify(one, two, pairs(one.descriptors, two.descriptors))


@dataclass(frozen=True, eq=False)
class _Judge:
    """Tells how well transforms agree with m pairs of features.

    Shapes: points `start` [m, 2] and `end` [m, 2], the distances `one` and `two` allowed in each
    photo, and how much larger the second feature of a pair is, `growth` [m], a logarithm.
    """

    start: Float64
    end: Float64
    one: float
    two: float
    growth: Float64

    def errors(self, transforms: Float64) -> Float64:
        """The larger of the squared errors there and back, 1 if just allowed: [t, 3, 3] -> [t, m].

        It is infinite where a transform scales things otherwise than the pair does.
        """
        there = _squared(transforms, self.start, self.end) / self.two**2
        inverse = np.linalg.inv(transforms).astype(np.float64)
        back = _squared(inverse, self.end, self.start) / self.one**2
        # The area of a small thing grows by det / w^3.
        depth = np.maximum(_depths(transforms, self.start), 1e-12)
        growth = np.log(np.linalg.det(transforms))[:, None] / 2 - 1.5 * np.log(depth)
        unlike = np.abs(growth - self.growth) > np.log(GROWTH)
        errors: Float64 = np.where(unlike, np.inf, np.maximum(there, back))
        return errors


def _depths(transforms: Float64, points: Float64) -> Float64:
    """The third coordinate of transformed points, negative behind the camera: [t, m]."""
    depths: Float64 = transforms[:, 2, :2] @ points.T + transforms[:, 2, 2:]
    return depths


def _squared(transforms: Float64, start: Float64, end: Float64) -> Float64:
    """Squared distances of transformed points from where they should be: [t, m]."""
    x, y = start.T
    t = transforms[:, :, :, None]
    w = _depths(transforms, start)
    with np.errstate(divide="ignore", invalid="ignore"):
        dx = (t[:, 0, 0] * x + t[:, 0, 1] * y + t[:, 0, 2]) / w - end[:, 0]
        dy = (t[:, 1, 0] * x + t[:, 1, 1] * y + t[:, 1, 2]) / w - end[:, 1]
    squared: Float64 = dx * dx + dy * dy
    squared[~(w > 0)] = np.inf
    return squared


def _extent(points: Float32) -> float:
    """The diagonal of the box around points, of which errors are parts."""
    return float(max(np.hypot(*np.ptp(points, axis=0)), 1.0))


def _frames(features: Features, rows: NDArray[np.int64]) -> Float64:
    frames: Float64 = (features.shapes[rows] * features.scales[rows, None, None]).astype(float)
    return frames


def _hypotheses(start: Float64, end: Float64, one: Float64, two: Float64) -> Float64:
    """The affine transforms that single pairs give: [h, 3, 3]."""
    if len(start) > HYPOTHESES:
        chosen = np.linspace(0, len(start) - 1, HYPOTHESES).astype(int)
        start, end, one, two = start[chosen], end[chosen], one[chosen], two[chosen]
    transforms = np.zeros((len(start), 3, 3))
    transforms[:, :2, :2] = two @ np.linalg.inv(one)
    transforms[:, :2, 2] = end - (transforms[:, :2, :2] @ start[..., None])[..., 0]
    transforms[:, 2, 2] = 1
    return transforms[_sensible(transforms[:, :2, :2])]


def _sensible(linear: Float64) -> NDArray[np.bool_]:
    """Whether maps keep the sides, and neither scale nor stretch beyond belief: [t, 2, 2]."""
    det = np.linalg.det(linear)
    scale = np.sqrt(np.maximum(det, 1e-12))
    stretch = (linear**2).sum(axis=(1, 2)) / scale**2  # r + 1/r
    sensible: NDArray[np.bool_] = (
        (det > 0)
        & (scale < MOST_SCALE)
        & (scale > 1 / MOST_SCALE)
        & (stretch < MOST_STRETCH + 1 / MOST_STRETCH)
    )
    return sensible


def _best(judge: _Judge, hypotheses: Float64) -> tuple[Float64 | None, NDArray[np.bool_]]:
    """The transform with most inliers of all hypotheses and what is fitted to the best of them."""
    none: NDArray[np.bool_] = np.zeros(len(judge.start), bool)
    if not len(hypotheses):
        return None, none
    counts = np.concatenate(
        [
            (judge.errors(part) <= 1).sum(axis=1)
            for part in np.array_split(hypotheses, len(hypotheses) // 256 + 1)
        ]
    )
    best, most, inliers = None, 0, none
    for number in np.argsort(-counts, kind="stable")[:REFINED]:
        transform = hypotheses[number]
        for fit in (_affine, _affine, _homography, _homography):
            found = judge.errors(transform[None])[0] <= (4 if fit is _affine else 1)
            fitted = fit(judge.start[found], judge.end[found])
            if fitted is None:
                continue
            agreed = judge.errors(fitted[None])[0] <= 1
            if agreed.sum() >= max(most + 1, FEWEST):
                best, most, inliers = fitted, int(agreed.sum()), agreed
            transform = fitted
    return best, inliers


def _affine(start: Float64, end: Float64) -> Float64 | None:
    """The affine transform nearest to pairs of points, None if they do not tell one."""
    if len(start) < 3:
        return None
    middle, target = start.mean(axis=0), end.mean(axis=0)
    solution, _, rank, _ = np.linalg.lstsq(start - middle, end - target, rcond=1e-6)
    if rank < 2 or not _sensible(solution.T[None])[0]:
        return None
    transform = np.eye(3)
    transform[:2, :2] = solution.T
    transform[:2, 2] = target - solution.T @ middle
    return transform


def _homography(start: Float64, end: Float64) -> Float64 | None:
    """The homography nearest to pairs of points, None if they do not tell a sensible one."""
    if len(start) < FOR_HOMOGRAPHY:
        return None
    one, two = _normaliser(start), _normaliser(end)
    (x, y), (u, v) = _moved(one, start).T, _moved(two, end).T
    zero, unit = np.zeros_like(x), np.ones_like(x)
    equations = np.concatenate(
        [
            np.stack([x, y, unit, zero, zero, zero, -u * x, -u * y, -u], axis=1),
            np.stack([zero, zero, zero, x, y, unit, -v * x, -v * y, -v], axis=1),
        ]
    )
    values, vectors = np.linalg.eigh(equations.T @ equations)
    if values[1] < 1e-9 * values[-1]:
        return None
    transform = np.linalg.inv(two) @ vectors[:, 0].reshape(3, 3) @ one
    w = np.append(start.mean(axis=0), 1) @ transform[2]
    if abs(w) < 1e-12:
        return None
    transform = transform / w
    if not ((start @ transform[2, :2] + transform[2, 2]) > 0.1).all():
        return None
    return transform if _sensible(_jacobians(transform, start)).all() else None


def _normaliser(points: Float64) -> Float64:
    """The similarity that centres points and brings them to a mean distance of one."""
    middle = points.mean(axis=0)
    size = max(float(np.linalg.norm(points - middle, axis=1).mean()), 1e-9)
    return np.array([[1 / size, 0, -middle[0] / size], [0, 1 / size, -middle[1] / size], [0, 0, 1]])


def _moved(transform: Float64, points: Float64) -> Float64:
    moved: Float64 = points @ transform[:2, :2].T + transform[:2, 2]
    return moved


def _jacobians(transform: Float64, points: Float64) -> Float64:
    """What a homography does to small things near points: [m, 2, 2]."""
    homogeneous = np.concatenate([points, np.ones((len(points), 1))], axis=1) @ transform.T
    w = homogeneous[:, 2, None, None]
    place = homogeneous[:, :2] / homogeneous[:, 2:]
    jacobians: Float64 = (transform[:2, :2] - place[:, :, None] * transform[2, :2]) / w
    return jacobians


def _one_to_one(pairs: Pairs, inliers: NDArray[np.bool_], errors: Float64) -> NDArray[np.int64]:
    """Inliers in which no feature is used twice, the better pair kept: positions in `pairs`."""
    rows = np.flatnonzero(inliers)
    rows = rows[np.argsort(errors[rows], kind="stable")]
    for side in (0, 1):
        _, first = np.unique(pairs[rows, side], return_index=True)
        rows = rows[np.sort(first)]
    return np.sort(rows)


def _nothing() -> Verified:
    none = np.zeros((0, 2), np.float32)
    return Verified(0, none, none, np.eye(3))
