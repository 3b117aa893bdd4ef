"""Move the descriptor of a query by marks, so that it ranks "same" entries before "different" ones.

The start is the query plus the mean of the "same" descriptors minus the mean of the "different"
ones, with weights (Rocchio). From there, a few gradient steps maximize the quantized average
precision of the marked entries. It is the loss that networks are trained with, for one descriptor.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from listwise.losses.precision import quantized_precision
from listwise.search.entries import Float32

BINS = 6
"""Bins of the average precision: few, so that the steps separate the entries by a margin."""
SAME, DIFFERENT = 3.0, 0.4
"""Weights of the mean of the "same" and the "different" descriptors in the start."""
KEEP = 0.5
"""Weight of the distance to the start, which keeps few marks from moving the query far away."""
STEPS, STEP = 20, 0.1
"""Number of gradient steps, and the length of the first one; the following ones get shorter."""


def move_query(query: Float32, same: Float32, different: Float32) -> Float32:
    """Move a query toward the entries that show the same thing, and away from the others.

    Args:
        query: a unit descriptor [C].
        same: descriptors of the entries that are marked "same" [p, C].
        different: descriptors of the entries that are marked "different" [n, C].

    Returns:
        A unit descriptor [C]. Without one of the two kinds of marks, it is the start, because
        every order of the marked entries has the same average precision.
    """
    begin = start(query, same, different)
    if not len(same) or not len(different):
        return begin
    # A caller may have turned gradients off.
    with torch.inference_mode(False), torch.enable_grad():
        marked = torch.from_numpy(np.concatenate([same, different]).astype(np.float32))
        relevant = torch.arange(len(marked)) < len(same)
        return _climb(torch.from_numpy(begin), marked, relevant).numpy()


def start(query: Float32, same: Float32, different: Float32) -> Float32:
    """Return where the gradient steps begin: L2(q + 3 s − 0.4 · 4 d), or L2(q − 0.4 d) without s.

    s and d are the means of the "same" and the "different" descriptors.
    """
    moved, weight = query.astype(np.float32), 1.0
    if len(same):
        moved, weight = moved + np.float32(SAME) * same.mean(axis=0), 1.0 + SAME
    if len(different):
        moved = moved - np.float32(DIFFERENT * weight) * different.mean(axis=0)
    norm = float(np.linalg.norm(moved))
    result: Float32 = (moved / norm).astype(np.float32) if norm > 1e-6 else query
    return result


def _climb(begin: Tensor, marked: Tensor, relevant: Tensor) -> Tensor:
    """Take gradient steps on the unit sphere, and return the best point on the way."""
    point, best, most = begin, begin, -torch.inf
    for number in range(STEPS + 1):
        point = point.detach().requires_grad_()
        value = objective(point, begin, marked, relevant)
        if value.item() > most:
            best, most = point.detach(), value.item()
        (slope,) = torch.autograd.grad(value, point)
        slope = slope - (slope @ point) * point
        size = slope.norm()
        if number == STEPS or size < 1e-7:
            break
        length = STEP * (1 - number / STEPS)
        point = functional.normalize(point + length * slope / size, dim=0)
    return best


def objective(point: Tensor, begin: Tensor, marked: Tensor, relevant: Tensor) -> Tensor:
    """Compute what the steps maximize: AP_Q of the marked entries − 0.5 (1 − point · begin).

    AP_Q is that of `listwise.losses.quantized_ap`. Its histograms are computed densely, because
    the operator of the losses takes longer for so few scores than the search itself.

    Shapes: point and begin [C], marked [n, C], relevant bool [n] -> scalar.
    """
    width = 2 / (BINS - 1)
    centers = 1 - width * torch.arange(BINS, dtype=marked.dtype)
    shares = (1 - (marked @ point)[:, None].sub(centers).abs() / width).clamp(min=0)  # [n, M]
    average = quantized_precision(shares[relevant].sum(0), shares.sum(0), relevant.sum())
    return average - KEEP * (1 - point @ begin)
