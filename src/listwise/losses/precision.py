"""Average precision as a function of two histograms: of the relevant images, and of all images.

Each function takes histograms [..., M], highest scores first, and the number of relevant images
[...], and returns the average precision [...]. Autograd computes the gradients.
"""

import torch
from torch import Tensor


def quantized_precision(relevant: Tensor, every: Tensor, positives: Tensor) -> Tensor:
    """Compute AP_Q, Eq. 9 to 11: the precision up to each bin times the recall of the bin."""
    found, ranked = relevant.cumsum(-1), every.cumsum(-1)
    # Where there is no image up to a bin, the precision is 0/0. It becomes 1 as soon as a relevant
    # image comes in; an irrelevant one adds nothing. So 1 gives the derivative by either image.
    precision = torch.where(ranked > 0, found / torch.where(ranked > 0, ranked, 1), 1)
    return (precision * relevant).sum(-1) / positives


def tie_aware_precision(relevant: Tensor, every: Tensor, positives: Tensor) -> Tensor:
    """Compute the simplified tie-aware AP of section 4.2: precision in the middle of each bin."""
    relevant_twice = 2 * relevant.cumsum(-1) - relevant
    every_twice = 2 * every.cumsum(-1) - every
    precision = (1 + relevant_twice) / (1 + every_twice)
    return (precision * relevant).sum(-1) / positives


def expected_precision(relevant: Tensor, every: Tensor, positives: Tensor) -> Tensor:
    """Compute the closed form of He et al. (CVPR 2018): the mean AP over all orders of tied images.

    A bin of n images, n⁺ of them relevant, after N images, N⁺ of them relevant, adds
    (n⁺/n) Σ_t (N⁺ + 1 + (t − N − 1)(n⁺ − 1)/(n − 1)) / t over the ranks t = N+1 … N+n. The sum of
    1/t is a difference of digamma functions, which is also defined for fractional counts.
    """
    dtype = relevant.dtype
    # Differences of digamma at large counts lose most digits of a float32.
    relevant, every = relevant.double(), every.double()
    ahead = every.cumsum(-1) - every
    relevant_ahead = relevant.cumsum(-1) - relevant
    mean_inverse = _digamma_slope(ahead + 1, every)
    # Two forms of the same number: the first is undefined at n = 1, the second at n = 0.
    few = every < 0.5
    left = (1 - (ahead + 1) * mean_inverse) / torch.where(few, every - 1, 1)
    right = (1 - (ahead + 1) * _digamma_slope(ahead + 2, every - 1)) / torch.where(few, 1, every)
    growth = torch.where(few, left, right)
    gain = relevant * ((relevant_ahead + 1) * mean_inverse + (relevant - 1) * growth)
    return gain.sum(-1).to(dtype) / positives


def _digamma_slope(x: Tensor, step: Tensor, near: float = 0.02) -> Tensor:
    """Compute (ψ(x + step) − ψ(x)) / step, by its Taylor series for small steps."""
    small = step.abs() < near
    far_step = torch.where(small, 1, step)
    far = (torch.digamma(x + far_step) - torch.digamma(x)) / far_step
    near_step = torch.where(small, step, 0)
    series = torch.zeros_like(x)
    power = torch.ones_like(x)
    factorial = 1
    for order in range(1, 8):
        factorial *= order
        series = series + torch.polygamma(order, x) * power / factorial
        power = power * near_step
    return torch.where(small, series, far)
