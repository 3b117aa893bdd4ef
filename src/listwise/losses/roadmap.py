"""ROADMAP: the SupAP surrogate of average precision and its calibration (Ramzi et al., 2021)."""

from functools import partial

import torch
from torch import Tensor

from listwise.errors import InputError
from listwise.losses.base import PrecisionLoss
from listwise.losses.lists import Lists
from listwise.losses.pairs import sum_over_pairs


class RankBound:
    """A smooth upper bound H of the step function, whose gradient does not vanish.

    H(t) is σ(t/τ) below 0, σ(t/τ) + ½ from 0 to δ, and a line of slope ρ above δ.

    Args:
        temperature: τ.
        slope: ρ.
        offset: δ.
    """

    def __init__(self, temperature: float, slope: float, offset: float) -> None:
        if not temperature > 0:
            raise InputError(f"temperature must be above zero, not {temperature}")
        for name, value in (("slope", slope), ("offset", offset)):
            if not value >= 0:
                raise InputError(f"{name} must be at least zero, not {value}")
        self.temperature, self.slope, self.offset = temperature, slope, offset

    def __call__(self, gap: Tensor) -> Tensor:
        """Compute H of differences of scores, of any shape."""
        inner = torch.sigmoid(gap.clamp(max=self.offset) / self.temperature)
        return inner + 0.5 * (gap >= 0) + self.slope * (gap - self.offset).clamp(min=0)

    def __repr__(self) -> str:
        return f"temperature={self.temperature}, slope={self.slope}, offset={self.offset}"


class RoadmapLoss(PrecisionLoss):
    """An upper bound of 1 − AP whose gradient does not vanish, with a calibration of the scores.

    For a query with positives P and negatives N, the loss is (1 − λ)·(1 − SupAP) + λ·C with

    - SupAP = mean over k in P of rank⁺(k) / (rank⁺(k) + rank⁻(k)), where rank⁺ is the true rank of
      k among the positives (without a gradient) and rank⁻ = Σ H(s_j − s_k) over j in N. H(t) is
      σ(t/τ) below 0, σ(t/τ) + ½ from 0 to δ, and a line of slope ρ above δ.
    - C = mean over P of max(0, α − s) + mean over N of max(0, s − β), which makes the scores of
      different batches comparable.

    Call it as loss(descriptors [B, C], labels [B], weights [B] or None) -> scalar. The defaults are
    those of the paper.

    Args:
        temperature: τ.
        slope: ρ.
        offset: δ.
        calibration: λ, from 0 to 1.
        positive_margin: α; positives with larger scores do not contribute to C.
        negative_margin: β; negatives with smaller scores do not contribute to C.

    Examples:
        >>> loss = RoadmapLoss()(torch.eye(4)[[0, 0, 1, 1]], torch.tensor([5, 5, 7, 7]))
    """

    def __init__(
        self,
        temperature: float = 0.01,
        slope: float = 100.0,
        offset: float = 0.05,
        calibration: float = 0.5,
        positive_margin: float = 0.9,
        negative_margin: float = 0.6,
    ) -> None:
        super().__init__()
        if not 0 <= calibration <= 1:
            raise InputError(f"calibration must be from 0 to 1, not {calibration}")
        self.bound = RankBound(temperature, slope, offset)
        self.calibration = calibration
        self.positive_margin, self.negative_margin = positive_margin, negative_margin

    def precision(self, lists: Lists, positives: Tensor, start: int, stop: int) -> Tensor:  # noqa: D102
        scores, negative = lists.scores(start, stop), ~lists.same(start, stop)
        positive = lists.relevant(start, stop)
        ratios = partial(self._ratios, positive=positive, negative=negative)
        precision = sum_over_pairs(ratios, scores, positive) / positives
        close = torch.where(positive, (self.positive_margin - scores).clamp(min=0), 0).sum(1)
        far = torch.where(negative, (scores - self.negative_margin).clamp(min=0), 0).sum(1)
        distance = close / positives + far / negative.sum(1).clamp(min=1)
        # `share` takes one minus what is returned here.
        return (1 - self.calibration) * precision + self.calibration * (1 - distance)

    def _ratios(
        self, scores: Tensor, query: Tensor, image: Tensor, positive: Tensor, negative: Tensor
    ) -> Tensor:
        """Compute rank⁺ / (rank⁺ + rank⁻) of each pair of a query and a positive: [R]."""
        gap = scores[query] - scores[query, image][:, None]
        ahead = (positive[query] & (gap > 0)).sum(1)
        bounds = torch.where(negative[query], self.bound(gap), 0)
        rank = 1 + ahead
        return rank / (rank + bounds.sum(1))

    def extra_repr(self) -> str:  # noqa: D102
        margins = f"{self.positive_margin}, {self.negative_margin}"
        return f"{self.bound}, calibration={self.calibration}, margins={margins}"
