"""RootSIFT of affine regions, many patches at a time."""

import numpy as np
from numpy.typing import NDArray

from listwise.local.hessian import Float32, Regions, sample_patches, square_grid
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
    spacing = regions.scales * (EXTENT / half)
    # Each level has half the size. A patch is sampled where its samples are about a pixel apart.
    levels = np.maximum(np.floor(np.log2(np.maximum(spacing, 1e-6))), 0).astype(int)
    descriptors = np.zeros((len(regions.points), CELLS * CELLS * DIRECTIONS), np.float32)
    pooling = _cell_weights()
    image, step = gray, 1.0
    for level in range(int(levels.max(initial=-1)) + 1):
        if level:
            image, step = cv2.pyrDown(image), step * 2
        chosen = np.flatnonzero(levels == level)
        for start in range(0, len(chosen), BLOCK):
            block = chosen[start : start + BLOCK]
            frames = regions.shapes[block] * (spacing[block] / step)[:, None, None]
            patches = sample_patches(image, regions.points[block] / step, frames, grid)
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
