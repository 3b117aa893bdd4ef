"""InfoNCE (van den Oord et al., 2018), known as NT-Xent for pairs of views of an image."""

import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint

from listwise.errors import InputError
from listwise.losses.base import BatchLoss
from listwise.losses.checks import check_positives
from listwise.losses.lists import Lists
from listwise.losses.tiles import blocks

_ENTRIES = 2**24  # scores in memory at a time


class InfoNCELoss(BatchLoss):
    """The cross-entropy of finding each positive among the negatives of the batch.

    The loss of a query with score s_p to a positive p and s_n to the negatives n is the mean over
    its positives of −log(exp(s_p/T) / (exp(s_p/T) + Σ exp(s_n/T))); other positives are not in the
    sum. Call it as loss(descriptors [B, C], labels [B], weights [B] or None) -> scalar. Memory
    grows linearly with the batch.

    Args:
        temperature: T; smaller values weight the hardest negatives more.

    Examples:
        >>> loss = InfoNCELoss()(torch.eye(4)[[0, 0, 1, 1]], torch.tensor([5, 5, 7, 7]))
    """

    def __init__(self, temperature: float = 0.07) -> None:
        super().__init__()
        if not temperature > 0:
            raise InputError(f"temperature must be above zero, not {temperature}")
        self.temperature = temperature

    def share(self, lists: Lists, weights: Tensor, start: int, stop: int) -> Tensor:  # noqa: D102
        weights = torch.where(lists.positives() > 0, weights, 0)
        total = weights.sum()
        check_positives(total.item(), lists.within_batch)
        size = max(1, _ENTRIES // len(lists.references))
        losses = [
            # Recomputed in backward, so that only the scores of one block are in memory.
            checkpoint(self._losses, lists, part, use_reentrant=False, preserve_rng_state=False)
            for part in blocks(start, stop, size)
        ]
        return (weights[start:stop] * torch.cat(losses)).sum() / total

    def _losses(self, lists: Lists, part: slice) -> Tensor:
        """Compute the losses of some queries; 0 without a positive: [Q]."""
        scores = lists.scores(part.start, part.stop) / self.temperature
        same = lists.same(part.start, part.stop)
        hardness = scores.masked_fill(same, -torch.inf).logsumexp(1, keepdim=True)
        positive = lists.relevant(part.start, part.stop)
        # −log(p / (p + n)) = log(1 + n / p); with no negative in the batch it is 0.
        gap = torch.where(positive & hardness.isfinite(), hardness - scores, -torch.inf)
        return softplus(gap).sum(1) / positive.sum(1).clamp(min=1)

    def extra_repr(self) -> str:  # noqa: D102
        return f"temperature={self.temperature}"
