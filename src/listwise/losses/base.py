"""The base classes of the losses: they check a batch, and a subclass computes its formula."""

import torch
from torch import Tensor, nn

from listwise.losses.checks import (
    check_batch,
    check_labels,
    check_positives,
    check_queries,
    check_references,
    query_weights,
)
from listwise.losses.lists import Lists
from listwise.losses.tiles import accumulation_dtype


class BatchLoss(nn.Module):
    """A loss of a batch in which every image is a query; subclasses define `share`."""

    def forward(
        self,
        descriptors: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        *,
        queries: tuple[int, int] | None = None,
        references: Tensor | None = None,
        reference_labels: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss of a batch; every image is a query and ranks all others.

        Args:
            descriptors: [B, C] unit rows.
            labels: [B] integers; images with equal labels are relevant to each other.
            weights: [B] weights of the queries; all equal by default.
            queries: rows (start, stop): return only the share of these queries. The shares of all
                rows of the batch add up to its loss, so several processes can divide the queries.
            references: [N, C] unit rows that the queries rank instead of the batch, such as a
                gallery, descriptors of another network, or of texts. They get a gradient too,
                unless they are detached.
            reference_labels: [N] labels of the references.

        Returns:
            A scalar: Σ w ℓ / Σ w over the queries that have a positive; ℓ is the loss of a query.
        """
        # Two statements, because PyTorch 2.4 cannot compile a call with unpacked arguments.
        weights, start, stop = check_inputs(descriptors, labels, weights, queries, references)
        check_references(descriptors, references, reference_labels)
        lists = Lists(descriptors, labels, references, reference_labels)
        # Autocast would compute the scores in half precision.
        with torch.autocast(descriptors.device.type, enabled=False):
            return self.share(lists, weights, start, stop)

    def share(self, lists: Lists, weights: Tensor, start: int, stop: int) -> Tensor:
        """Compute the share of the queries start to stop, with weights [B]: a scalar."""
        raise NotImplementedError


class PrecisionLoss(BatchLoss):
    """One minus the weighted mean of an average precision over the queries.

    Attributes:
        include_self: whether an image is a positive in its own list.
    """

    include_self = False

    def share(self, lists: Lists, weights: Tensor, start: int, stop: int) -> Tensor:  # noqa: D102
        positives = lists.positives(self.include_self)
        weights = torch.where(positives > 0, weights, 0)
        total = weights.sum()
        check_positives(total.item(), lists.within_batch)
        precision = self.precision(lists, positives[start:stop].clamp(min=1), start, stop)
        return (weights[start:stop] * (1 - precision)).sum() / total

    def precision(self, lists: Lists, positives: Tensor, start: int, stop: int) -> Tensor:
        """Compute the average precision of queries start to stop; ignored without a positive.

        Shapes: numbers of positives [Q], at least 1 -> [Q].
        """
        raise NotImplementedError


def check_inputs(
    descriptors: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    queries: tuple[int, int] | None,
    references: Tensor | None = None,
) -> tuple[Tensor, int, int]:
    """Check a batch; return the weights [B] and the rows (start, stop) of the queries."""
    check_batch(descriptors, labels, 2 if references is None else 1)
    start, stop = check_queries(queries, len(labels))
    dtype = accumulation_dtype(descriptors.dtype)
    return query_weights(weights, len(labels), dtype, labels.device), start, stop


def class_balanced_weights(labels: Tensor) -> Tensor:
    """Return weights that give every class the same total weight (section 4.2).

    The weight of an image is inversely proportional to the size of its class in the batch. The
    losses scale weights once more, to a mean of 1 over the queries that have a positive.

    Shapes: labels [B] integers -> [B], mean 1.

    Examples:
        >>> class_balanced_weights(torch.tensor([5, 5, 5, 7]))
        tensor([0.6667, 0.6667, 0.6667, 2.0000])
    """
    check_labels(labels)
    _, position, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
    weights: Tensor = (len(labels) / len(sizes)) / sizes[position].float()
    return weights
