"""ASMK*: the similarity of two photos by their visual words, with one bit per dimension.

After Tolias, Avrithis and Jégou, "Image search with selective match kernels: aggregation across
single and multiple images" (IJCV 2016). With X_c the descriptors of a photo that belong to the
word c, V(X_c) = Σ (x − q_c) and b its signs,

    K(X, Y) = γ(X) γ(Y) Σ_c σ(b(V(X_c))ᵀ b(V(Y_c)) / D),   σ(u) = sign(u) |u|^α if u > τ, else 0,

where γ makes K(X, X) = 1: γ(X) = (number of words of X)^(−1/2). A word counts once, however many
descriptors it has, so repeated structure does not dominate the score.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

ALPHA: Final = 3.0
TAU: Final = 0.0
ASSIGNMENTS: Final = 5
"""Number of words per descriptor of a query; descriptors of the database have one word."""

Bits = NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class PhotoWords:
    """The visual words of a photo: `words` int32 [w], ascending, and `bits` uint64 [w, L].

    The bits are the signs of the summed residuals of each word, L = ⌈D/64⌉; bits after D are zero.
    """

    words: NDArray[np.int32]
    bits: Bits


def aggregate(
    descriptors: NDArray[np.floating], words: NDArray[np.int32], centroids: NDArray[np.float32]
) -> PhotoWords:
    """Sum the residuals of a photo's descriptors per word, and keep the signs.

    Shapes: descriptors [n, D], words of each descriptor [n, m], centroids [K, D].
    """
    flat = words.ravel()
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    residuals = descriptors[order // words.shape[1]] - centroids[ordered]
    if not len(starts):
        return PhotoWords(ordered, pack(residuals))
    return PhotoWords(ordered[starts], pack(np.add.reduceat(residuals, starts, axis=0)))


def pack(values: NDArray[np.floating]) -> Bits:
    """Pack the signs of values into bits, 1 above zero: [w, D] -> uint64 [w, ⌈D/64⌉]."""
    rows, dim = values.shape
    packed = np.zeros((rows, -(-dim // 64) * 8), np.uint8)
    packed[:, : -(-dim // 8)] = np.packbits(values > 0, axis=1)
    return packed.view(np.uint64)


def selectivity(dim: int, alpha: float = ALPHA, tau: float = TAU) -> NDArray[np.float64]:
    """Return σ(1 − 2h/D) for each Hamming distance h from 0 to D: [D + 1]."""
    similarity = 1 - 2 * np.arange(dim + 1) / dim
    powers = np.sign(similarity) * np.abs(similarity) ** alpha
    return np.where(similarity > tau, powers, 0.0)


def hamming(one: Bits, two: Bits) -> NDArray[np.integer]:
    """Return the Hamming distance of each row: [n, L], [n, L] -> [n]."""
    counts = _bit_count(one ^ two)
    total = counts[:, 0].astype(np.uint16)
    for column in range(1, counts.shape[1]):
        total += counts[:, column]
    return total


def _bit_count_by_table(values: Bits) -> NDArray[np.uint8]:
    """Count the set bits of each value, for NumPy without `bitwise_count`: [n, L] -> [n, L]."""
    bytes_ = np.arange(256, dtype=np.uint8)
    table = np.unpackbits(bytes_[:, None], axis=1).sum(axis=1, dtype=np.uint8)
    sixteen = (table[:, None] + table).ravel()
    found: NDArray[np.uint8] = (
        sixteen[values.view(np.uint16)].reshape(*values.shape, 4).sum(axis=-1, dtype=np.uint8)
    )
    return found


_bit_count: Callable[[Bits], NDArray[Any]] = getattr(np, "bitwise_count", _bit_count_by_table)


def run_positions(starts: NDArray[np.integer], lengths: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the positions in consecutive runs: starts [r], lengths [r] -> [Σ lengths]."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total)
