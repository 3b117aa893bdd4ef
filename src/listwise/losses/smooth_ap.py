"""Smooth-AP (Brown et al., ECCV 2020), for classes of any size in any order."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from listwise.errors import InputError
from listwise.losses.checks import check_batch, check_queries, query_weights
from listwise.losses.histogram import accumulation_dtype

_ENTRIES = 2**24  # comparisons of scores held at a time


class SmoothAPLoss(nn.Module):
    """1 − mAP with ranks counted by sigmoids of score differences.

    As in the authors' code an image is in its own list.

    Args:
        temperature: of the sigmoid; the smaller, the nearer to true ranks.
    """

    def __init__(self, temperature: float = 0.01) -> None:
        super().__init__()
        if not temperature > 0:
            raise InputError(f"temperature must be above zero, but is {temperature}")
        self.temperature = temperature

    def forward(
        self,
        descriptors: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        *,
        queries: tuple[int, int] | None = None,
    ) -> Tensor:
        """The loss of a batch in which every image asks.

        Args:
            descriptors: [B, C] unit rows.
            labels: [B] integers.
            weights: [B] weights of the queries; equal ones by default.
            queries: rows (start, stop): give only their share of the loss.

        Returns:
            A scalar: Σ w (1 − AP) / Σ w over the queries that have a positive.
        """
        check_batch(descriptors, labels)
        size = len(labels)
        start, stop = check_queries(queries, size)
        dtype = accumulation_dtype(descriptors.dtype)
        same = labels[start:stop, None] == labels
        _, position, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
        weights = query_weights(weights, size, dtype, labels.device)
        weights = torch.where(sizes[position] > 1, weights, 0)
        total = weights.sum()
        if not total > 0:
            raise InputError(
                "no query has a positive: every class of this batch has a single image "
                "(or a weight of zero); sample at least two images of some class"
            )
        rows = descriptors.to(dtype)
        scores = rows[start:stop] @ rows.T
        asking, image = torch.nonzero(same, as_tuple=True)
        blocks = torch.arange(len(asking), device=labels.device).chunk(
            -(-len(asking) * size // _ENTRIES)
        )
        precisions = [
            # Kept for all blocks, the comparisons would be as many as images cubed.
            checkpoint(
                self._precisions,
                scores,
                same,
                asking[block],
                image[block],
                use_reentrant=False,
                preserve_rng_state=False,
            )
            for block in blocks
        ]
        sums = torch.zeros(stop - start, dtype=dtype, device=labels.device)
        sums = sums.index_put((asking,), torch.cat(precisions), accumulate=True)
        return (weights[start:stop] * (1 - sums / same.sum(1))).sum() / total

    def _precisions(self, scores: Tensor, same: Tensor, query: Tensor, image: Tensor) -> Tensor:
        """Smooth precision at the rank of an image in the list of a query of its class: [R]."""
        ahead = torch.sigmoid((scores[query] - scores[query, image][:, None]) / self.temperature)
        ahead = ahead.scatter(1, image[:, None], 1.0)  # a rank counts the image itself
        precisions: Tensor = (ahead * same[query]).sum(1) / ahead.sum(1)
        return precisions

    def extra_repr(self) -> str:  # noqa: D102
        return f"temperature={self.temperature}"
