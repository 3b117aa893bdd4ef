"""The base class of the losses, which checks a batch, and a loss of several lengths."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from listwise.errors import InputError
from listwise.losses.checks import (
    check_batch,
    check_count,
    check_labels,
    check_positives,
    check_queries,
    check_references,
    query_weights,
)
from listwise.losses.lists import Lists, accumulation_dtype


class LossModule(nn.Module):
    """A module that is printed with its settings."""

    def extra_repr(self) -> str:
        """Return the settings, by the names of the constructor."""
        names = inspect.signature(type(self)).parameters
        settings = {name: getattr(self, name, None) for name in names}
        plain = (int, float, str, tuple)
        return ", ".join(f"{k}={v}" for k, v in settings.items() if isinstance(v, plain))


class BatchLoss(LossModule):
    """The weighted mean of a loss over the queries of a batch; subclasses define `losses`.

    Attributes:
        include_self: whether an image is a positive in its own list.
    """

    include_self = False

    def forward(
        self,
        descriptors: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        *,
        queries: tuple[int, int] | None = None,
        references: Tensor | None = None,
        reference_labels: Tensor | None = None,
        **options: Any,
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
            **options: what else a loss takes, such as the `tuples` of a `TupleLoss`.

        Returns:
            A scalar: Σ w ℓ / Σ w over the queries that have a positive; ℓ is the loss of a query.
        """
        check_batch(descriptors, labels, 2 if references is None else 1)
        start, stop = check_queries(queries, len(labels))
        weights = query_weights(weights, len(labels), descriptors)
        check_references(descriptors, references, reference_labels)
        lists = Lists(descriptors, labels, references, reference_labels)
        # Autocast would compute the scores in half precision.
        with torch.autocast(descriptors.device.type, enabled=False):
            return self.share(lists, weights, start, stop, **options)

    def share(self, lists: Lists, weights: Tensor, start: int, stop: int) -> Tensor:
        """Compute the share of the queries start to stop, with weights [B]: a scalar."""
        positives = self.positives(lists)
        weights = torch.where(positives > 0, weights, 0)
        total = weights.sum()
        check_positives(total.item(), lists.within_batch)
        losses = self.losses(lists, positives[start:stop].clamp(min=1), start, stop)
        return (weights[start:stop] * losses).sum() / total

    def positives(self, lists: Lists) -> Tensor:
        """Count the positives of each image of the batch: [B]."""
        return lists.positives(self.include_self)

    def losses(self, lists: Lists, positives: Tensor, start: int, stop: int) -> Tensor:
        """Compute the losses of the queries start to stop; ignored without a positive.

        Shapes: numbers of positives [Q], at least 1 -> [Q].
        """
        raise NotImplementedError


class MatryoshkaLoss(LossModule):
    """The mean of a loss over several lengths of the descriptors (Kusupati et al., NeurIPS 2022).

    For each length m, the first m dimensions of every descriptor are scaled to unit length and
    passed to the loss. Descriptors of the trained network may be cut to any of these lengths.

    Args:
        loss: a loss, called as loss(descriptors [B, m], labels [B], ...) -> scalar.
        dims: the lengths, each at most the number of dimensions of a descriptor.

    Examples:
        >>> from listwise.losses import QuantizedAPLoss
        >>> loss = MatryoshkaLoss(QuantizedAPLoss(), dims=[4, 2])
        >>> loss(torch.eye(4)[[0, 0, 1, 1]], torch.tensor([5, 5, 7, 7])).item()
        0.0
    """

    def __init__(self, loss: Callable[..., Tensor], dims: Sequence[int]) -> None:
        super().__init__()
        self.loss = loss
        self.dims = tuple(sorted({check_count("dims", dim, 1) for dim in dims}, reverse=True))
        if not self.dims:
            raise InputError("dims is empty: give at least one length")

    def forward(
        self,
        descriptors: Tensor,
        labels: Tensor,
        *arguments: Any,
        references: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Compute the mean of the loss over all lengths.

        Args:
            descriptors: [B, C] unit rows.
            labels: [B] integers.
            *arguments: passed to the loss, such as `weights`.
            references: [N, C] unit rows that are cut like the descriptors.
            **options: passed to the loss, such as `queries` and `reference_labels`.

        Returns:
            A scalar.
        """
        if descriptors.shape[1] < self.dims[0]:
            raise InputError(
                f"descriptors have {descriptors.shape[1]} dimensions, but one of dims is "
                f"{self.dims[0]}: give lengths of at most {descriptors.shape[1]}"
            )
        values = []
        for dim in self.dims:
            if references is not None:
                options["references"] = cut(references, dim)
            values.append(self.loss(cut(descriptors, dim), labels, *arguments, **options))
        return torch.stack(values).mean()


def cut(descriptors: Tensor, dim: int) -> Tensor:
    """Return the first dimensions of descriptors as unit rows: [N, C] -> [N, dim]."""
    if descriptors.shape[1] == dim:
        return descriptors
    rows = descriptors[:, :dim].to(accumulation_dtype(descriptors.dtype))
    return normalize(rows, dim=1).to(descriptors.dtype)


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
