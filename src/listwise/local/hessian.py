"""Hessian-affine regions: blobs and saddles of a scale space, each with its own affine shape.

The scale space and the localisation follow Lowe's pyramid, with the determinant of the Hessian
instead of the difference of Gaussians. The shapes follow Baumberg's iteration, as in the detector
of Mikolajczyk and Schmid. Regions are upright: their shapes keep the vertical direction.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from listwise.optional import requires

with requires("local", "local features"):
    import cv2

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

LEVELS = 3  # levels per octave
FIRST_BLUR = 1.6  # blur of the first image of an octave, in its own pixels
CAMERA_BLUR = 0.5  # blur assumed for every photo
BORDER = 5
MIN_RESPONSE = 1e-5  # of |sigma^4 det H|, with intensities from 0 to 1; smaller values are noise
SMALLEST_OCTAVE = 2 * BORDER + 3

WINDOW = 19  # width in pixels of the patch whose gradients give the shape
MAX_ITERATIONS = 16  # of the shape iteration
MIN_ROUNDNESS = 0.95  # ratio of the axes of the gradients' second moments
MAX_STRETCH = 6.0  # ratio of the axes of a region


Regions = tuple[Float32, Float32, Float32]
"""Points [n, 2] (x, y; the center of the first pixel is 0), scales [n] and shapes [n, 2, 2].

A region of a photo is the ellipse point + scale · shape · unit circle; shapes have determinant 1.
"""


@dataclass(frozen=True, eq=False)
class _LevelExtrema:
    """Extrema of one level: `points` [n, 2], `scales` [n], `strength` [n], in pixels of `image`.

    The shapes are fitted in `image`, one pixel of which is `step` pixels of the photo.
    """

    image: Float32
    step: float
    points: Float32
    scales: Float32
    strength: Float32


def hessian_regions(gray: Float32, count: int, blur: float = CAMERA_BLUR) -> Regions:
    """Find the `count` strongest Hessian-affine regions of a gray image [H, W], values 0 to 1.

    The strongest regions come first.
    """
    extrema = list(_find_extrema(gray, blur))
    levels = [tuple(np.zeros(shape, np.float32) for shape in ((0, 2), (0,), (0, 2, 2), (0,)))]
    strength = np.concatenate([levels[0][3], *(found.strength for found in extrema)])
    # Fitting the shape removes some regions, so start with twice as many as wanted.
    spare = 2 * count
    floor = np.partition(strength, -spare)[-spare] if len(strength) > spare else 0.0
    for found in extrema:
        strong = np.flatnonzero(found.strength >= floor)
        fitted, kept = _fit_shapes(found.image, found.points[strong], found.scales[strong])
        places, sizes = found.points[strong[kept]], found.scales[strong[kept]]
        strengths = found.strength[strong[kept]]
        levels.append((places * found.step, sizes * found.step, fitted, strengths))
    points, scales, shapes, strength = (np.concatenate(part) for part in zip(*levels, strict=True))
    order = np.argsort(-strength, kind="stable")[:count]
    return points[order], scales[order], shapes[order]


def _find_extrema(gray: Float32, blur: float) -> Iterator[_LevelExtrema]:
    """Yield the extrema over position and scale, level by level."""
    image, step = _blur(gray, blur, FIRST_BLUR), 1
    sigmas = [FIRST_BLUR * 2.0 ** (level / LEVELS) for level in range(LEVELS + 2)]
    finer: list[Float32] = []
    while min(image.shape) >= SMALLEST_OCTAVE:
        octave = [image]
        for before, after in pairwise(sigmas):
            octave.append(_blur(octave[-1], before, after))
        response = np.stack(list(map(_response, octave, sigmas)))
        for level in range(1, LEVELS + 1):
            rows, columns = _extrema(response, level)
            points, offsets, strength = _refine(response, level, rows, columns)
            scales = sigmas[level] * 2.0 ** (offsets / LEVELS)
            # Blur makes shapes look rounder, so fit them in the octave with half the blur.
            zoom = 2 if finer else 1
            yield _LevelExtrema(
                finer[level] if finer else octave[0],
                step / zoom,
                (points * zoom).astype(np.float32),
                (scales * zoom).astype(np.float32),
                strength.astype(np.float32),
            )
        finer = octave
        image, step = np.ascontiguousarray(octave[LEVELS][::2, ::2]), step * 2


def _blur(image: Float32, before: float, after: float) -> Float32:
    if after <= before:
        return image
    sigma = (after**2 - before**2) ** 0.5
    blurred: Float32 = cv2.GaussianBlur(image, (0, 0), sigma, borderType=cv2.BORDER_REPLICATE)
    return blurred


def _response(image: Float32, sigma: float) -> Float32:
    """Return the scale-normalized determinant of the Hessian: [H, W]."""
    padded = cv2.copyMakeBorder(image, 1, 1, 1, 1, cv2.BORDER_REPLICATE)
    middle = 2 * image
    xx = padded[1:-1, 2:] - middle + padded[1:-1, :-2]
    yy = padded[2:, 1:-1] - middle + padded[:-2, 1:-1]
    xy = (padded[2:, 2:] - padded[2:, :-2] - padded[:-2, 2:] + padded[:-2, :-2]) * 0.25
    response: Float32 = (xx * yy - xy * xy) * np.float32(sigma**4)
    return response


def _extrema(response: Float32, level: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return rows and columns where a level exceeds, or is below, all neighbors in 3-D."""
    window = np.ones((3, 3), np.uint8)
    here = response[level]
    around = response[level - 1 : level + 2]
    top = np.maximum.reduce([cv2.dilate(image, window) for image in around])
    bottom = np.minimum.reduce([cv2.erode(image, window) for image in around])
    found = ((here >= top) & (here > MIN_RESPONSE)) | ((here <= bottom) & (here < -MIN_RESPONSE))
    inner = np.zeros_like(found)
    inner[BORDER:-BORDER, BORDER:-BORDER] = found[BORDER:-BORDER, BORDER:-BORDER]
    rows, columns = np.nonzero(inner)
    return rows, columns


def _refine(
    response: Float32, level: int, rows: NDArray[np.intp], columns: NDArray[np.intp]
) -> tuple[Float64, Float64, Float64]:
    """Fit a quadratic around each extremum: points [k, 2], level offsets [k], |response| [k].

    Extrema whose maximum lies far from the grid point are dropped: the fit is not valid there.
    """
    center = (level, rows, columns)

    def at(scale: int, row: int, column: int) -> Float64:
        values: Float64 = response[level + scale, rows + row, columns + column].astype(np.float64)
        return values

    value = response[center].astype(np.float64)
    gradient = np.empty((len(rows), 3))
    hessian = np.empty((len(rows), 3, 3))
    for axis, (scale, row, column) in enumerate(((0, 0, 1), (0, 1, 0), (1, 0, 0))):
        after, before = at(scale, row, column), at(-scale, -row, -column)
        gradient[:, axis] = (after - before) / 2
        hessian[:, axis, axis] = after - 2 * value + before
    xy = (at(0, 1, 1) - at(0, 1, -1) - at(0, -1, 1) + at(0, -1, -1)) / 4
    xs = (at(1, 0, 1) - at(1, 0, -1) - at(-1, 0, 1) + at(-1, 0, -1)) / 4
    ys = (at(1, 1, 0) - at(1, -1, 0) - at(-1, 1, 0) + at(-1, -1, 0)) / 4
    for (i, j), mixed in (((0, 1), xy), ((0, 2), xs), ((1, 2), ys)):
        hessian[:, i, j] = hessian[:, j, i] = mixed
    solvable = np.abs(np.linalg.det(hessian)) > 1e-30
    hessian[~solvable] = np.eye(3)
    offset = -np.linalg.solve(hessian, gradient[..., None])[..., 0]
    good = solvable & (np.abs(offset) <= 1.0).all(axis=1)
    strength = np.abs(value + 0.5 * (gradient * offset).sum(axis=1))
    points = np.stack([columns, rows], axis=1) + offset[:, :2]
    return points[good], offset[good, 2], strength[good]


def _fit_shapes(
    image: Float32, points: Float32, scales: Float32
) -> tuple[Float32, NDArray[np.intp]]:
    """Fit the affine shape of each region: shapes [k, 2, 2] and the k positions that converged.

    In its fitted frame a region has the same gradient energy in all directions. Regions that do
    not converge, or that would be stretched too far, are dropped.
    """
    half = WINDOW // 2
    grid = square_grid(WINDOW)
    inner = square_grid(WINDOW - 2)  # where the patch has gradients
    weight = np.exp(-(inner**2).sum(axis=1) / (2 * (half / 3) ** 2)).astype(np.float32)
    shapes = np.broadcast_to(np.eye(2, dtype=np.float32), (len(points), 2, 2)).copy()
    active = np.arange(len(points))
    done = np.zeros(len(points), bool)
    spacing = scales / FIRST_BLUR
    for _ in range(MAX_ITERATIONS):
        if not len(active):
            break
        frames = shapes[active] * spacing[active, None, None]
        patches = sample_patches(image, points[active], frames, grid).reshape(-1, WINDOW, WINDOW)
        x = (patches[:, 1:-1, 2:] - patches[:, 1:-1, :-2]).reshape(len(active), -1)
        y = (patches[:, 2:, 1:-1] - patches[:, :-2, 1:-1]).reshape(len(active), -1)
        moments = np.stack([(x * x) @ weight, (x * y) @ weight, (y * y) @ weight], axis=1)
        root, ratio = _inverse_root(moments.astype(np.float64))
        shapes[active] = shapes[active] @ root.astype(np.float32)
        stretched = np.linalg.norm(shapes[active], axis=(1, 2)) ** 2  # r + 1/r
        allowed = stretched <= MAX_STRETCH + 1 / MAX_STRETCH
        finished = ratio >= MIN_ROUNDNESS
        done[active[finished & allowed]] = True
        active = active[~finished & allowed]
    kept = np.flatnonzero(done)
    return _make_upright(shapes[kept]), kept


def _inverse_root(moments: Float64) -> tuple[Float64, Float64]:
    """Return M^-1/2 with determinant 1, and the ratio of its axes: [n, 3] -> [n, 2, 2], [n]."""
    a, b, c = moments.T
    middle, spread = (a + c) / 2, np.hypot((a - c) / 2, b)
    large, small = middle + spread, np.maximum(middle - spread, 1e-12 * middle + 1e-30)
    ratio = np.sqrt(small / np.maximum(large, 1e-30))
    # sqrt(M) = (M + sqrt(det) I) / sqrt(trace + 2 sqrt(det)); its inverse is its adjugate over det.
    root_det = np.sqrt(large * small)
    inverse = np.stack([c + root_det, -b, -b, a + root_det], axis=1).reshape(-1, 2, 2)
    det = inverse[:, 0, 0] * inverse[:, 1, 1] - inverse[:, 0, 1] ** 2
    return inverse / np.sqrt(np.maximum(det, 1e-30))[:, None, None], ratio


def _make_upright(shapes: Float32) -> Float32:
    """Rotate frames so that they keep the vertical direction: lower triangular, determinant 1."""
    first = np.hypot(shapes[:, 0, 0], shapes[:, 0, 1])
    det = shapes[:, 0, 0] * shapes[:, 1, 1] - shapes[:, 0, 1] * shapes[:, 1, 0]
    upright = np.zeros_like(shapes)
    upright[:, 0, 0] = first
    upright[:, 1, 0] = (shapes[:, 0] * shapes[:, 1]).sum(axis=1) / first
    upright[:, 1, 1] = det / first
    upright /= np.sqrt(np.abs(det))[:, None, None]
    return upright


def square_grid(side: int) -> Float32:
    """Return the sample positions of a square patch: x, y from its center, [side², 2]."""
    line = np.arange(side, dtype=np.float32) - side // 2
    return np.stack(np.meshgrid(line, line), axis=-1).reshape(-1, 2)


def sample_patches(image: Float32, points: Float32, frames: Float32, grid: Float32) -> Float32:
    """Sample an image at point + frame · grid: [n, 2], [n, 2, 2], [g, 2] -> [n, g]."""
    x, y = frames[:, 0] @ grid.T, frames[:, 1] @ grid.T
    x += points[:, :1]
    y += points[:, 1:]
    values: Float32 = cv2.remap(image, x, y, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    return values
