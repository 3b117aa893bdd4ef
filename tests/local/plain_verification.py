"""Spatial verification with one call per transform, to compare the fast one with."""

import numpy as np

from listwise.local.features import Features
from listwise.local.transforms import MAX_SCALE, MAX_SCALE_CHANGE, MAX_STRETCH
from listwise.local.verification import TOLERANCE


def mutual(query: np.ndarray, other: np.ndarray) -> list[tuple[int, int]]:
    """The pairs that are each other's nearest."""
    if not len(query) or not len(other):
        return []
    products = query @ other.T
    nearest = [(row, int(line.argmax())) for row, line in enumerate(products)]
    return [(row, column) for row, column in nearest if products[:, column].argmax() == row]


def is_clear(products: np.ndarray, column: int, ratio: float) -> bool:
    """Whether the nearest feature passes the ratio test, by its products with all."""
    second = np.delete(products, column).max()
    return bool(max(1 - products[column], 0) < ratio**2 * max(1 - second, 0))


def verify(query: Features, other: Features, pairs: np.ndarray) -> list[int]:
    """The positions of the pairs that are inliers, sorted."""
    start = query.points[pairs[:, 0]].astype(np.float64)
    end = other.points[pairs[:, 1]].astype(np.float64)
    growth = np.log(other.scales[pairs[:, 1]] / query.scales[pairs[:, 0]]).astype(np.float64)
    allowed = [TOLERANCE * max(np.hypot(*np.ptp(f.points, axis=0)), 1.0) for f in (query, other)]

    def errors(transform: np.ndarray) -> np.ndarray:
        there = distances(transform, start, end) / allowed[1]
        back = distances(np.linalg.inv(transform), end, start) / allowed[0]
        depth = np.maximum(transform[2, :2] @ start.T + transform[2, 2], 1e-12)
        grown = np.log(np.linalg.det(transform)) / 2 - 1.5 * np.log(depth)
        far = np.abs(grown - growth) > np.log(MAX_SCALE_CHANGE)
        return np.where(far, np.inf, np.maximum(there, back) ** 2)

    hypotheses = []
    for (one, two), x, y in zip(pairs, start, end, strict=True):
        frames = [
            (f.shapes[i] * f.scales[i]).astype(float) for f, i in ((query, one), (other, two))
        ]
        linear = frames[1] @ np.linalg.inv(frames[0])
        if plausible(linear):
            hypotheses.append(affine_transform(linear, y - linear @ x))
    measured = [errors(transform) for transform in hypotheses]
    order = sorted(range(len(measured)), key=lambda i: -(measured[i] <= 1).sum())[:8]
    best: tuple[int, int, np.ndarray | None] = (3, 0, None)
    current = [measured[i] for i in order]
    for fit, limit in ((affine, 4), (affine, 4), (homography, 1), (homography, 1)):
        for place, before in enumerate(current):
            transform = fit(start[before <= limit], end[before <= limit])
            if transform is None:
                continue
            current[place] = errors(transform)
            count = int((current[place] <= 1).sum())
            if (count, -place) > best[:2]:
                best = count, -place, current[place]
    return [] if best[2] is None else np.flatnonzero(best[2] <= 1).tolist()


def distances(transform: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    x, y, w = transform @ np.concatenate([start, np.ones((len(start), 1))], axis=1).T
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(w > 0, np.hypot(x / w - end[:, 0], y / w - end[:, 1]), np.inf)


def plausible(linear: np.ndarray) -> bool:
    det = np.linalg.det(linear)
    if not MAX_SCALE**-2 < det < MAX_SCALE**2:
        return False
    values = np.linalg.svd(linear, compute_uv=False)
    return bool(values[0] / values[1] < MAX_STRETCH)


def affine_transform(linear: np.ndarray, shift: np.ndarray) -> np.ndarray:
    return np.block([[linear, shift[:, None]], [np.array([[0, 0, 1]])]])


def affine(start: np.ndarray, end: np.ndarray) -> np.ndarray | None:
    if len(start) < 3:
        return None
    middle, target = start.mean(axis=0), end.mean(axis=0)
    solution, _, rank, _ = np.linalg.lstsq(start - middle, end - target, rcond=1e-6)
    if rank < 2 or not plausible(solution.T):
        return None
    return affine_transform(solution.T, target - solution.T @ middle)


def homography(start: np.ndarray, end: np.ndarray) -> np.ndarray | None:
    if len(start) < 10:
        return None
    one, two = normalizer(start), normalizer(end)
    rows = []
    for p, q in zip(start, end, strict=True):
        x = one @ [*p, 1]
        u, v, _ = two @ [*q, 1]
        rows += [[*x, 0, 0, 0, *(-u * x)], [0, 0, 0, *x, *(-v * x)]]
    _, values, vectors = np.linalg.svd(np.array(rows))
    if values[-2] ** 2 < 1e-9 * values[0] ** 2:
        return None
    transform = np.linalg.inv(two) @ vectors[-1].reshape(3, 3) @ one
    depth = transform[2] @ [*start.mean(axis=0), 1]
    if abs(depth) < 1e-12:
        return None
    transform = transform / depth
    for p in start:
        x, y, w = transform @ [*p, 1]
        if w <= 0.1:
            return None
        jacobian = (transform[:2, :2] - np.outer([x / w, y / w], transform[2, :2])) / w
        if not plausible(jacobian):
            return None
    return transform


def normalizer(points: np.ndarray) -> np.ndarray:
    middle = points.mean(axis=0)
    size = max(float(np.linalg.norm(points - middle, axis=1).mean()), 1e-9)
    return np.array([[1 / size, 0, -middle[0] / size], [0, 1 / size, -middle[1] / size], [0, 0, 1]])
