"""The Recall@k surrogate (Patel et al., CVPR 2022)."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from listwise.errors import InputError
from listwise.losses.base import PrecisionLoss
from listwise.losses.checks import check_count
from listwise.losses.pairs import sum_over_pairs
from listwise.losses.tiles import accumulation_dtype


class RecallAtKLoss(PrecisionLoss):
    """One minus a differentiable Recall@k, averaged over several k.

    The recall of a query q is the mean, over its positives x, of
    σ((k − 1 − Σ σ((s_z − s_x) / temperature)) / k_temperature) with the sum over all other images z
    of the batch: the inner sigmoids count the images ahead of x, the outer one compares the rank of
    x with k. Call it as loss(descriptors [B, C], labels [B], weights [B] or None) -> scalar. The
    defaults are those of the paper, without its similarity mixup.

    Args:
        ks: the values of k.
        temperature: of the sigmoids that count images; smaller values are closer to true ranks.
        k_temperature: of the sigmoid that compares a rank with k.

    Examples:
        >>> loss = RecallAtKLoss()(torch.eye(4)[[0, 0, 1, 1]], torch.tensor([5, 5, 7, 7]))
    """

    def __init__(
        self,
        ks: Sequence[int] = (1, 2, 4, 8, 16),
        temperature: float = 0.01,
        k_temperature: float = 1.0,
    ) -> None:
        super().__init__()
        self.ks = tuple(check_count("ks", k, 1) for k in ks)
        if not self.ks:
            raise InputError("ks is empty: give at least one value of k")
        for name, value in (("temperature", temperature), ("k_temperature", k_temperature)):
            if not value > 0:
                raise InputError(f"{name} must be above zero, not {value}")
        self.temperature = temperature
        self.k_temperature = k_temperature

    def precision(  # noqa: D102
        self, descriptors: Tensor, labels: Tensor, positives: Tensor, start: int, stop: int
    ) -> Tensor:
        dtype = accumulation_dtype(descriptors.dtype)
        rows = descriptors.to(dtype)
        scores = rows[start:stop] @ rows.T
        own = torch.arange(start, stop, device=labels.device)
        same = labels[start:stop, None] == labels
        same = same.scatter(1, own[:, None], False)
        recalls = partial(self._recalls, own=own)
        return sum_over_pairs(recalls, scores, same) / positives[start:stop].clamp(min=1)

    def _recalls(self, scores: Tensor, query: Tensor, image: Tensor, own: Tensor) -> Tensor:
        """Compute how surely each image is among the first k, averaged over all k: [R]."""
        ahead = torch.sigmoid((scores[query] - scores[query, image][:, None]) / self.temperature)
        # Neither the image itself nor the query is ahead of it.
        ahead = ahead.scatter(1, image[:, None], 0.0).scatter(1, own[query][:, None], 0.0)
        count = ahead.sum(1)
        recalls = [torch.sigmoid((k - 1 - count) / self.k_temperature) for k in self.ks]
        return torch.stack(recalls).mean(0)

    def extra_repr(self) -> str:  # noqa: D102
        temperatures = f"temperature={self.temperature}, k_temperature={self.k_temperature}"
        return f"ks={self.ks}, {temperatures}"
