"""The call that all losses share: a batch is checked once, and each loss is its formula."""

import torch
from torch import Tensor, nn

from listwise.losses.checks import (
    check_batch,
    check_labels,
    check_queries,
    query_weights,
    refuse_no_positives,
)
from listwise.losses.tiles import accumulation_dtype


class BatchLoss(nn.Module):
    """A loss of a batch in which every image is a query; `share` is its formula."""

    def forward(
        self,
        descriptors: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        *,
        queries: tuple[int, int] | None = None,
    ) -> Tensor:
        """The loss of a batch in which every image is a query and all others are ranked.

        Args:
            descriptors: [B, C] unit rows.
            labels: [B] integers; images of equal label are relevant to each other.
            weights: [B] weights of the queries; equal ones by default.
            queries: rows (start, stop): give only their share of the loss. The shares of a
                partition of the batch add up to the loss of the batch, so that several
                processes can split the queries.

        Returns:
            A scalar: Σ w ℓ / Σ w over the queries that have a positive, ℓ the loss of a query.
        """
        # In two statements: PyTorch 2.4 cannot compile a call whose arguments are unpacked.
        weights, start, stop = checked(descriptors, labels, weights, queries)
        return self.share(descriptors, labels, weights, start, stop)

    def share(
        self, descriptors: Tensor, labels: Tensor, weights: Tensor, start: int, stop: int
    ) -> Tensor:
        """The share of queries start to stop of the loss: [B, C], [B], [B] -> scalar."""
        raise NotImplementedError


class PrecisionLoss(BatchLoss):
    """One minus the weighted mean, over the queries, of an average precision.

    Attributes:
        include_self: whether an image is a positive of its own list.
    """

    include_self = False

    def share(  # noqa: D102
        self, descriptors: Tensor, labels: Tensor, weights: Tensor, start: int, stop: int
    ) -> Tensor:
        positives = class_sizes(labels) - (0 if self.include_self else 1)
        weights = torch.where(positives > 0, weights, 0)
        total = weights.sum()
        refuse_no_positives(total.item())
        precision = self.precision(descriptors, labels, positives, start, stop)
        return (weights[start:stop] * (1 - precision)).sum() / total

    def precision(
        self, descriptors: Tensor, labels: Tensor, positives: Tensor, start: int, stop: int
    ) -> Tensor:
        """Average precision of queries start to stop, anything where there is no positive: [Q].

        Shapes: descriptors [B, C] unit rows, labels [B], numbers of positives [B].
        """
        raise NotImplementedError


def checked(
    descriptors: Tensor, labels: Tensor, weights: Tensor | None, queries: tuple[int, int] | None
) -> tuple[Tensor, int, int]:
    """The weights [B] and the rows (start, stop) of a sound batch; any other is refused."""
    check_batch(descriptors, labels)
    start, stop = check_queries(queries, len(labels))
    dtype = accumulation_dtype(descriptors.dtype)
    return query_weights(weights, len(labels), dtype, labels.device), start, stop


def class_sizes(labels: Tensor) -> Tensor:
    """How many images have the label of each: [B]."""
    _, position, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
    found: Tensor = sizes[position]
    return found


def class_balanced_weights(labels: Tensor) -> Tensor:
    """Weights under which every class counts the same (section 4.2): [B] integers -> [B], mean 1.

    The weight of an image is inversely proportional to the size of its class. The losses scale
    weights once more, so that their mean over the queries that have a positive is 1.
    """
    check_labels(labels)
    _, position, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
    weights: Tensor = (len(labels) / len(sizes)) / sizes[position].float()
    return weights
