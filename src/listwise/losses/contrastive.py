"""The contrastive loss (Radenović et al., TPAMI 2018)."""

import torch
from torch import Tensor

from listwise.errors import InputError
from listwise.losses.tuples import TupleLoss


class ContrastiveLoss(TupleLoss):
    """The contrastive loss: pulls a query to its positive, and pushes negatives past a margin.

    The loss of a tuple of query q, positive p and negatives n is
    ½ ‖q − p‖² + ½ Σ max(0, margin − ‖q − n‖)². Call it as
    loss(descriptors [B, C], labels [B], weights [B] or None) -> scalar.

    Args:
        margin: the distance from which on a negative adds no loss.
        negatives: number of negatives in a tuple.

    Examples:
        >>> descriptors = torch.eye(4)[[0, 0, 1, 1]]
        >>> ContrastiveLoss(negatives=2)(descriptors, torch.tensor([5, 5, 7, 7])).item()
        0.0
    """

    def __init__(self, margin: float = 0.85, negatives: int = 5) -> None:
        super().__init__(negatives)
        if not margin > 0:
            raise InputError(f"margin must be above zero, not {margin}")
        self.margin = margin

    def local_loss(self, positive: Tensor, negative: Tensor) -> Tensor:  # noqa: D102
        # Equal descriptors have no direction to be pushed in: their gradient is 0, not NaN.
        apart = negative > 0
        distance = torch.where(apart, torch.where(apart, negative, 1).sqrt(), 0)
        return (positive + (self.margin - distance).clamp(min=0).square().sum(1)) / 2

    def extra_repr(self) -> str:  # noqa: D102
        return f"margin={self.margin}, negatives={self.negatives}"
