"""Spatial verification: count the local features of two photos that agree on one transform."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from listwise.local.features import Features
from listwise.local.hessian import Float32

Float64 = NDArray[np.float64]
Pairs = NDArray[np.int64]

MIN_SIMILARITY = 0.6  # cosine similarity of deep features that may match
MAX_RATIO = 0.9  # of the distances to the nearest and to the second nearest feature
TOLERANCE = 0.02  # maximum error of an inlier, relative to the extent of the points of each photo
MAX_SCALE_CHANGE = 1.5  # maximum ratio between the scale change of a pair and that of the transform
HYPOTHESES = 1024
REFINED_HYPOTHESES = 8  # number of best hypotheses that are fitted to their inliers
MIN_INLIERS = 4
MIN_HOMOGRAPHY_INLIERS = 10  # to fit a homography
MAX_SCALE, MAX_STRETCH = 8.0, 6.0


@dataclass(frozen=True, eq=False)
class Verification:
    """Result of `verify`: the m features that two photos share, and the transform between them.

    Attributes:
        inliers: m, the number of features that agree on the transform.
        query_points: [m, 2], x and y in the query photo.
        points: [m, 2], x and y of the same features in the other photo.
        transform: [3, 3], from pixels of the query to pixels of the other photo.
    """

    inliers: int
    query_points: Float32
    points: Float32
    transform: Float64


def verify(query: Features, other: Features, pairs: Pairs | None = None) -> Verification:
    """Find the transform on which most pairs of features agree.

    The shapes of each pair give one affine transform. The best of these are fitted to the pairs
    that agree with them, first as affine transforms, then as homographies. The result is
    deterministic.

    Args:
        query: features of the query.
        other: features of the other photo.
        pairs: positions of features that may match, int64 [p, 2]; by default `nearest_pairs`.

    Examples:
        >>> found = verify(hessian_affine(photo), hessian_affine(other))   # doctest: +SKIP
        >>> found.inliers, found.transform.shape                          # doctest: +SKIP
        (57, (3, 3))
    """
    if pairs is None:
        pairs = nearest_pairs(query.descriptors, other.descriptors)
    if len(pairs) < MIN_INLIERS:
        return _no_match()
    one, two = pairs.T
    start, end = query.points[one].astype(np.float64), other.points[two].astype(np.float64)
    pair_errors = _PairErrors(
        start,
        end,
        TOLERANCE * _extent(query.points),
        TOLERANCE * _extent(other.points),
        np.log(other.scales[two] / query.scales[one]).astype(np.float64),
    )
    frames = _frames(query, one), _frames(other, two)
    best, inliers = _best(pair_errors, _hypotheses(start, end, *frames))
    if best is None:
        return _no_match()
    chosen = _one_to_one(pairs, inliers, pair_errors.errors(best[None])[0])
    if len(chosen) < MIN_INLIERS:
        return _no_match()
    return Verification(
        len(chosen), query.points[one[chosen]], other.points[two[chosen]], best / best[2, 2]
    )


def nearest_pairs(query: Float32, other: Float32, max_ratio: float = MAX_RATIO) -> Pairs:
    """Return the mutual nearest neighbors of unit descriptors that pass the ratio test: [m, 2].

    `max_ratio` is the maximum ratio of the distances to the nearest and second nearest feature.
    """
    if len(query) < 2 or len(other) < 2:
        return np.zeros((0, 2), np.int64)
    pairs, products = _mutual_nearest(query, other)
    block = products[pairs[:, 0]]
    first = products[pairs[:, 0], pairs[:, 1]]
    block[np.arange(len(pairs)), pairs[:, 1]] = -1
    # These are half the squared distances; rounding must not make them negative.
    gap, next_gap = np.maximum(1 - first, 0), np.maximum(1 - block.max(axis=1), 0)
    clear: Pairs = pairs[gap < max_ratio**2 * next_gap]
    return clear


def similar_pairs(query: Float32, other: Float32, least: float = MIN_SIMILARITY) -> Pairs:
    """Return the mutual nearest neighbors of unit descriptors that are similar enough: [m, 2].

    This is for deep features. The ratio test would refuse most true pairs of them, because the
    second nearest feature is usually the neighboring location, which looks almost the same.
    """
    if not len(query) or not len(other):
        return np.zeros((0, 2), np.int64)
    pairs, products = _mutual_nearest(query, other)
    return pairs[products[pairs[:, 0], pairs[:, 1]] >= least]


def _mutual_nearest(query: Float32, other: Float32) -> tuple[Pairs, Float32]:
    """Return mutual nearest neighbors [m, 2], and the products of all descriptors [n, n']."""
    products: Float32 = query @ other.T
    nearest = products.argmax(axis=1)
    rows = np.flatnonzero(products.argmax(axis=0)[nearest] == np.arange(len(query)))
    return np.stack([rows, nearest[rows]], axis=1).astype(np.int64), products


def verifier_for(extractor: str) -> Callable[[Features, Features], Verification]:
    """Return the function that verifies two photos with features of the extractor of this name."""
    pairs: Callable[..., Pairs] = similar_pairs if extractor.startswith("delf-") else nearest_pairs
    return lambda one, two: verify(one, two, pairs(one.descriptors, two.descriptors))


@dataclass(frozen=True, eq=False)
class _PairErrors:
    """Measures how well transforms agree with m pairs of features.

    Shapes: points `start` [m, 2] and `end` [m, 2]; `one` and `two` are the distances allowed in
    each photo; `growth` [m] is the logarithm of the scale change of each pair.
    """

    start: Float64
    end: Float64
    one: float
    two: float
    growth: Float64

    def errors(self, transforms: Float64) -> Float64:
        """Return the larger squared error of both directions: [t, 3, 3] -> [t, m].

        An error of 1 is just allowed. It is infinite where the scale change of the transform
        differs too much from that of the pair.
        """
        there = _squared_distances(transforms, self.start, self.end) / self.two**2
        inverse = np.linalg.inv(transforms).astype(np.float64)
        back = _squared_distances(inverse, self.end, self.start) / self.one**2
        # A small area grows by det / w^3.
        depth = np.maximum(_depths(transforms, self.start), 1e-12)
        growth = np.log(np.linalg.det(transforms))[:, None] / 2 - 1.5 * np.log(depth)
        unlike = np.abs(growth - self.growth) > np.log(MAX_SCALE_CHANGE)
        errors: Float64 = np.where(unlike, np.inf, np.maximum(there, back))
        return errors


def _depths(transforms: Float64, points: Float64) -> Float64:
    """Return the third coordinate of transformed points, negative behind the camera: [t, m]."""
    depths: Float64 = transforms[:, 2, :2] @ points.T + transforms[:, 2, 2:]
    return depths


def _squared_distances(transforms: Float64, start: Float64, end: Float64) -> Float64:
    """Return the squared distances between transformed points and their targets: [t, m]."""
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
    """Return the diagonal of the bounding box of points; errors are relative to it."""
    return float(max(np.hypot(*np.ptp(points, axis=0)), 1.0))


def _frames(features: Features, rows: NDArray[np.int64]) -> Float64:
    frames: Float64 = (features.shapes[rows] * features.scales[rows, None, None]).astype(float)
    return frames


def _hypotheses(start: Float64, end: Float64, one: Float64, two: Float64) -> Float64:
    """Return the affine transform that each pair gives: [h, 3, 3]."""
    if len(start) > HYPOTHESES:
        chosen = np.linspace(0, len(start) - 1, HYPOTHESES).astype(int)
        start, end, one, two = start[chosen], end[chosen], one[chosen], two[chosen]
    transforms = np.zeros((len(start), 3, 3))
    transforms[:, :2, :2] = two @ np.linalg.inv(one)
    transforms[:, :2, 2] = end - (transforms[:, :2, :2] @ start[..., None])[..., 0]
    transforms[:, 2, 2] = 1
    return transforms[_plausible(transforms[:, :2, :2])]


def _plausible(linear: Float64) -> NDArray[np.bool_]:
    """Whether linear maps [t, 2, 2] do not mirror, and scale and stretch only moderately."""
    det = np.linalg.det(linear)
    scale = np.sqrt(np.maximum(det, 1e-12))
    stretch = (linear**2).sum(axis=(1, 2)) / scale**2  # r + 1/r
    plausible: NDArray[np.bool_] = (
        (det > 0)
        & (scale < MAX_SCALE)
        & (scale > 1 / MAX_SCALE)
        & (stretch < MAX_STRETCH + 1 / MAX_STRETCH)
    )
    return plausible


def _best(
    pair_errors: _PairErrors, hypotheses: Float64
) -> tuple[Float64 | None, NDArray[np.bool_]]:
    """Fit the best hypotheses again; return the transform with most inliers, and the inliers."""
    none: NDArray[np.bool_] = np.zeros(len(pair_errors.start), bool)
    if not len(hypotheses):
        return None, none
    parts = np.array_split(hypotheses, len(hypotheses) // 256 + 1)
    numbers = [
        [(errors <= limit).sum(axis=1) for limit in (1, 4)]
        for errors in map(pair_errors.errors, parts)
    ]
    counts, near = np.concatenate(numbers, axis=1)
    # With fewer pairs than these, none of the fits below is possible.
    usable = (near >= 3) | (counts >= MIN_HOMOGRAPHY_INLIERS)
    chosen = [i for i in np.argsort(-counts, kind="stable")[:REFINED_HYPOTHESES] if usable[i]]
    errors = pair_errors.errors(hypotheses[chosen])
    best: Float64 | None = None
    most, inliers = (MIN_INLIERS - 1, 0), none
    known: dict[bytes, Float64 | None] = {}  # several hypotheses often have the same inliers
    for fit in (_affine, _affine, _homography, _homography):
        fits: dict[int, Float64] = {}
        for place, pairs in enumerate(errors <= (4 if fit is _affine else 1)):
            name = fit.__name__.encode() + pairs.tobytes()
            if name not in known:
                known[name] = fit(pair_errors.start[pairs], pair_errors.end[pairs])
            made = known[name]
            if made is not None:
                fits[place] = made
        if not fits:
            continue
        errors[list(fits)] = pair_errors.errors(np.stack([*fits.values()]))
        for place, fitted in fits.items():
            agreed = errors[place] <= 1
            # Of equally good transforms, the one of the better hypothesis.
            if (int(agreed.sum()), -place) > most:
                best, most, inliers = fitted, (int(agreed.sum()), -place), agreed
    return best, inliers


def _affine(start: Float64, end: Float64) -> Float64 | None:
    """Fit an affine transform to pairs of points; None if they do not determine one."""
    if len(start) < 3:
        return None
    middle, target = start.mean(axis=0), end.mean(axis=0)
    solution, _, rank, _ = np.linalg.lstsq(start - middle, end - target, rcond=1e-6)
    if rank < 2 or not _plausible(solution.T[None])[0]:
        return None
    transform = np.eye(3)
    transform[:2, :2] = solution.T
    transform[:2, 2] = target - solution.T @ middle
    return transform


def _homography(start: Float64, end: Float64) -> Float64 | None:
    """Fit a homography to pairs of points; None if they do not determine a plausible one."""
    if len(start) < MIN_HOMOGRAPHY_INLIERS:
        return None
    one, two = _normalizer(start), _normalizer(end)
    (x, y), (u, v) = _transform_points(one, start).T, _transform_points(two, end).T
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
    return transform if _plausible(_jacobians(transform, start)).all() else None


def _normalizer(points: Float64) -> Float64:
    """Return the similarity that centers points and scales them to a mean distance of 1."""
    middle = points.mean(axis=0)
    size = max(float(np.linalg.norm(points - middle, axis=1).mean()), 1e-9)
    return np.array([[1 / size, 0, -middle[0] / size], [0, 1 / size, -middle[1] / size], [0, 0, 1]])


def _transform_points(transform: Float64, points: Float64) -> Float64:
    moved: Float64 = points @ transform[:2, :2].T + transform[:2, 2]
    return moved


def _jacobians(transform: Float64, points: Float64) -> Float64:
    """Return the Jacobian of a homography at points: [m, 2, 2]."""
    homogeneous = np.concatenate([points, np.ones((len(points), 1))], axis=1) @ transform.T
    w = homogeneous[:, 2, None, None]
    place = homogeneous[:, :2] / homogeneous[:, 2:]
    jacobians: Float64 = (transform[:2, :2] - place[:, :, None] * transform[2, :2]) / w
    return jacobians


def _one_to_one(pairs: Pairs, inliers: NDArray[np.bool_], errors: Float64) -> NDArray[np.int64]:
    """Return positions in `pairs` of inliers that use each feature once, keeping the best pair."""
    rows = np.flatnonzero(inliers)
    rows = rows[np.argsort(errors[rows], kind="stable")]
    for side in (0, 1):
        _, first = np.unique(pairs[rows, side], return_index=True)
        rows = rows[np.sort(first)]
    return np.sort(rows)


def _no_match() -> Verification:
    none = np.zeros((0, 2), np.float32)
    return Verification(0, none, none, np.eye(3))
