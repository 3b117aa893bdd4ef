"""The paper's equations written down plainly: dense, in float64, one line an equation."""

import math
from itertools import combinations

import torch
from torch import Tensor


class Triangle(torch.autograd.Function):
    """δ(x, m) of Eq. 7 and its derivative, Eq. 8; at a kink the mean of the two sides' derivatives.

    Scores past ±1 count as ±1. Bin centers are rarely whole in binary: "equal" means equal up to
    the last bits.
    """

    @staticmethod
    def forward(ctx, scores: Tensor, centers: Tensor, delta: float) -> Tensor:
        ctx.save_for_backward(scores, centers)
        ctx.delta = delta
        return torch.clamp(1 - (scores[..., None] - centers).abs() / delta, min=0)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        scores, centers = ctx.saved_tensors
        distance, delta, near = scores[..., None] - centers, ctx.delta, 1e-15
        rising = (distance >= -delta - near) & (distance < -near)
        falling = (distance >= -near) & (distance < delta - near)
        by_more = (rising.double() - falling.double()) * (scores < 1 - near)[..., None]
        rising = (distance > -delta + near) & (distance <= near)
        falling = (distance > near) & (distance <= delta + near)
        by_less = (rising.double() - falling.double()) * (scores > -1 + near)[..., None]
        return (gradient * (by_more + by_less) / (2 * delta)).sum(-1), None, None


def soft_assignment(scores: Tensor, bins: int) -> Tensor:
    """Eq. 7 for every score and bin: [Q, N] -> [Q, N, M]."""
    delta = 2 / (bins - 1)
    centers = torch.tensor([1 - (m - 1) * delta for m in range(1, bins + 1)], dtype=torch.float64)
    return Triangle.apply(scores, centers, delta)


def histograms(scores: Tensor, relevance: Tensor, valid: Tensor, bins: int):
    assigned = soft_assignment(scores, bins) * valid[..., None]
    return (assigned * relevance[..., None]).sum(1), assigned.sum(1)


def quantized(relevant: Tensor, every: Tensor) -> Tensor:
    """Eq. 9 to 11 without the division by the number of positives."""
    total = 0
    for m in range(relevant.shape[1]):
        above, below = relevant[:, : m + 1].sum(1), every[:, : m + 1].sum(1)
        precision = torch.where(below > 0, above / torch.where(below > 0, below, 1), 1)
        total = total + precision * relevant[:, m]
    return total


def simplified_tie_aware(relevant: Tensor, every: Tensor) -> Tensor:
    """Eq. 13."""
    total = 0
    for m in range(relevant.shape[1]):
        above = 1 + relevant[:, m] + 2 * relevant[:, :m].sum(1)
        below = 1 + every[:, m] + 2 * every[:, :m].sum(1)
        total = total + above / below * relevant[:, m]
    return total


def average_precisions(scores, relevance, valid, bins, formula=quantized) -> Tensor:
    relevance = relevance & valid
    gain = formula(*histograms(scores, relevance.double(), valid.double(), bins))
    return gain / relevance.sum(1)


def loss(descriptors, labels, bins, weights=None, include_self=False, formula=quantized) -> Tensor:
    """Eq. 12, with the weights of section 4.2 and the meanings of self-pairs and no positives."""
    size = len(labels)
    relevance = labels[:, None] == labels[None, :]
    valid = torch.ones(size, size, dtype=torch.bool)
    if not include_self:
        valid = valid & ~torch.eye(size, dtype=torch.bool)
    counted = (relevance & valid).any(1)
    scores = descriptors @ descriptors.T
    precision = average_precisions(
        scores[counted], relevance[counted], valid[counted], bins, formula
    )
    weights = torch.ones(size, dtype=torch.float64) if weights is None else weights.double()
    weights = weights[counted]
    return (weights * (1 - precision)).sum() / weights.sum()


def mean_precision_over_orders(relevant: list[int], every: list[int]) -> float:
    """Mean AP over all orders inside each bin, counting them one by one (whole counts)."""
    total, ahead, relevant_ahead = 0.0, 0, 0
    for n_relevant, n in zip(relevant, every, strict=True):
        gains = [
            sum((relevant_ahead + k + 1) / (ahead + place + 1) for k, place in enumerate(places))
            for places in combinations(range(n), n_relevant)
        ]
        total += math.fsum(gains) / len(gains)
        ahead, relevant_ahead = ahead + n, relevant_ahead + n_relevant
    return total / sum(relevant)
