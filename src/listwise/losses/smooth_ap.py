"""Smooth-AP (Brown et al., ECCV 2020), for classes of any size in any order."""

from functools import partial

import torch
from torch import Tensor

from listwise.errors import InputError
from listwise.losses.base import PrecisionLoss
from listwise.losses.lists import Lists
from listwise.losses.pairs import sum_over_pairs


class SmoothAPLoss(PrecisionLoss):
    """1 − mAP where ranks are sums of sigmoids of score differences.

    Call it as loss(descriptors [B, C], labels [B], weights [B] or None) -> scalar. As in the
    authors' code, an image is in its own list.

    Args:
        temperature: of the sigmoid; smaller values are closer to true ranks.

    Examples:
        >>> loss = SmoothAPLoss()(torch.eye(4)[[0, 0, 1, 1]], torch.tensor([5, 5, 7, 7]))
    """

    def __init__(self, temperature: float = 0.01) -> None:
        super().__init__()
        if not temperature > 0:
            raise InputError(f"temperature must be above zero, not {temperature}")
        self.temperature = temperature

    def precision(self, lists: Lists, positives: Tensor, start: int, stop: int) -> Tensor:  # noqa: D102
        same = lists.same(start, stop)
        precisions = partial(self._precisions, same=same)
        total = sum_over_pairs(precisions, lists.scores(start, stop), same)
        return total / same.sum(1).clamp(min=1)

    def _precisions(self, scores: Tensor, query: Tensor, image: Tensor, same: Tensor) -> Tensor:
        """Compute the smooth precision at the rank of each image in its query's list: [R]."""
        ahead = torch.sigmoid((scores[query] - scores[query, image][:, None]) / self.temperature)
        ahead = ahead.scatter(1, image[:, None], 1.0)  # the rank includes the image itself
        precisions: Tensor = (ahead * same[query]).sum(1) / ahead.sum(1)
        return precisions

    def extra_repr(self) -> str:  # noqa: D102
        return f"temperature={self.temperature}"
