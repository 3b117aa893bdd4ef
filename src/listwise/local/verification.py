"""Spatial verification: count the local features of two photos that agree on one transform."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from listwise.local.features import Features
from listwise.local.hessian import Float32
from listwise.local.transforms import (
    MIN_HOMOGRAPHY_INLIERS,
    Float64,
    PointPairs,
    fit_affine,
    fit_homographies,
    plausible,
)

Pairs = NDArray[np.int64]

MIN_SIMILARITY = 0.6  # cosine similarity of deep features that may match
MAX_RATIO = 0.9  # of the distances to the nearest and to the second nearest feature
TOLERANCE = 0.02  # maximum error of an inlier, relative to the extent of the points of each photo
HYPOTHESES = 1024
REFINED_HYPOTHESES = 8  # number of best hypotheses that are fitted to their inliers
MIN_INLIERS = 4
REFINEMENTS = 3  # fits of the best transform to its nearest inliers
NEAR = 3.0  # maximum error of these, relative to the median error


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

    def inverse(self) -> "Verification":
        """Return the same result with the two photos exchanged."""
        back = np.linalg.inv(self.transform)
        return Verification(self.inliers, self.points, self.query_points, back / back[2, 2])


def verify(query: Features, other: Features, pairs: Pairs | None = None) -> Verification:
    """Find the transform on which most pairs of features agree.

    The shapes of each pair give one affine transform. The best of these are fitted to the pairs
    that agree with them, first as affine transforms, then as homographies. The result is
    deterministic, and `verify(other, query)` gives the same one with the inverse transform.

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
    if _swapped(query.points, other.points):
        return verify(other, query, pairs[:, ::-1]).inverse()
    if len(pairs) < MIN_INLIERS:
        return _no_match()
    pairs = pairs[np.lexsort(pairs.T)]
    one, two = pairs.T
    start, end = query.points[one].astype(np.float64), other.points[two].astype(np.float64)
    matched = PointPairs(
        start,
        end,
        TOLERANCE * query.extent,
        TOLERANCE * other.extent,
        np.log(other.scales[two] / query.scales[one]).astype(np.float64),
    )
    frames = _frames(query, one), _frames(other, two)
    best, inliers = _best(matched, _hypotheses(start, end, *frames))
    if best is None:
        return _no_match()
    chosen = _one_to_one(pairs, inliers, matched.errors(best[None])[0])
    if len(chosen) < MIN_INLIERS:
        return _no_match()
    best = _refined(matched, best, chosen)
    return Verification(
        len(chosen), query.points[one[chosen]], other.points[two[chosen]], best / best[2, 2]
    )


def nearest_pairs(query: Float32, other: Float32, max_ratio: float = MAX_RATIO) -> Pairs:
    """Return the mutual nearest neighbors of unit descriptors that pass the ratio test: [m, 2].

    `max_ratio` is the maximum ratio of the distances to the nearest and second nearest feature of
    the photo with more features. The order of the two photos makes no difference.
    """
    if len(query) < 2 or len(other) < 2:
        return np.zeros((0, 2), np.int64)
    if _swapped(query, other):
        return nearest_pairs(other, query, max_ratio)[:, ::-1]
    pairs, first, products = _mutual_nearest(query, other)
    block = products[pairs[:, 0]]
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
    pairs, similarities, _ = _mutual_nearest(query, other)
    return pairs[similarities >= least]


def _mutual_nearest(query: Float32, other: Float32) -> tuple[Pairs, Float32, Float32]:
    """Return mutual nearest neighbors [m, 2], their products [m], and all products [n, n']."""
    products: Float32 = query @ other.T
    nearest = products.argmax(axis=1)
    largest = products[np.arange(len(query)), nearest]
    # The largest product of a column is found faster than its place.
    rows = np.flatnonzero(largest == products.max(axis=0)[nearest])
    # Of equal descriptors, the first one is the nearest of a column.
    rows = rows[np.sort(np.unique(nearest[rows], return_index=True)[1])]
    return np.stack([rows, nearest[rows]], axis=1), largest[rows], products


def verifier_for(extractor: str) -> Callable[[Features, Features], Verification]:
    """Return the function that verifies two photos with features of the extractor of this name."""
    pairs: Callable[..., Pairs] = similar_pairs if extractor.startswith("delf-") else nearest_pairs
    return lambda one, two: verify(one, two, pairs(one.descriptors, two.descriptors))


def _swapped(query: Float32, other: Float32) -> bool:
    """Whether two photos are compared in the other order, so that both orders give one result."""
    return (len(query), query.tobytes()) > (len(other), other.tobytes())


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
    return transforms[plausible(transforms[:, :2, :2])]


def _best(pairs: PointPairs, hypotheses: Float64) -> tuple[Float64 | None, NDArray[np.bool_]]:
    """Fit the best hypotheses again; return the transform with most inliers, and the inliers."""
    best: Float64 | None = None
    inliers: NDArray[np.bool_] = np.zeros(len(pairs.start), bool)
    if not len(hypotheses):
        return best, inliers
    counts, near = pairs.count_affine_inliers(hypotheses)
    # With fewer pairs than these, none of the fits below is possible.
    usable = (near >= 3) | (counts >= MIN_HOMOGRAPHY_INLIERS)
    chosen = np.argsort(-counts, kind="stable")[:REFINED_HYPOTHESES]
    errors = pairs.affine_errors(hypotheses[chosen[usable[chosen]]])
    most = (MIN_INLIERS - 1, 0)
    for fit, limit, least in 2 * [(fit_affine, 4, 3)] + 2 * [
        (fit_homographies, 1, MIN_HOMOGRAPHY_INLIERS)
    ]:
        near_pairs = errors <= limit
        places = np.flatnonzero(np.count_nonzero(near_pairs, axis=1) >= least)
        if not len(places):
            continue
        transforms, sound = fit(pairs.start, pairs.end, near_pairs[places])
        transforms, places = transforms[sound], places[sound]
        if not len(places):
            continue
        measure = pairs.affine_errors if fit is fit_affine else pairs.errors
        errors[places] = fitted = measure(transforms)
        numbers = np.count_nonzero(fitted <= 1, axis=1)
        first = int(numbers.argmax())
        # Of equally good transforms, the one of the better hypothesis.
        if (int(numbers[first]), -int(places[first])) > most:
            most = int(numbers[first]), -int(places[first])
            best, inliers = transforms[first], fitted[first] <= 1
    return best, inliers


def _refined(pairs: PointPairs, best: Float64, inliers: NDArray[np.int64]) -> Float64:
    """Fit a transform to its inliers, then to the nearest of them: the tolerance is wide.

    The homography is taken if it is nearer to the inliers than two more parameters explain.
    """
    middle = np.inf
    for fit, more in (
        (fit_affine, 1.0),
        (fit_homographies, (2 * len(inliers)) ** (1 / len(inliers))),
    ):
        near = np.zeros((1, len(pairs.start)), bool)
        near[0, inliers] = True
        for _ in range(REFINEMENTS):
            transforms, sound = fit(pairs.start, pairs.end, near)
            if not sound[0]:
                break
            errors = pairs.errors(transforms)[0]
            now = float(np.median(errors[inliers]))
            if now * more < middle:
                best, middle = transforms[0], now * more
            near[0, inliers] = errors[inliers] <= NEAR**2 * now
    return best


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
