"""The queries of a batch, the images that they rank, and sums over both in blocks."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ENTRIES = 2**24
"""Scores, or comparisons of scores, that are in memory at a time."""


def blocks(start: int, stop: int, size: int) -> list[slice]:
    """Divide the range from start to stop into blocks of a size; the last may be smaller."""
    return [slice(i, min(i + size, stop)) for i in range(start, stop, size)]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type for products, histograms and sums: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def in_blocks(function: Callable[[slice], Tensor], rows: int, width: int) -> Tensor:
    """Concatenate what a function computes for blocks of rows with `width` entries each.

    It is called again in the backward pass, so that only the entries of one block are in memory.
    """
    found = [
        checkpoint(function, block, use_reentrant=False, preserve_rng_state=False)
        for block in blocks(0, rows, max(1, ENTRIES // width))
    ]
    return torch.cat(found)


def sum_over_pairs(
    function: Callable[[Tensor, Tensor, Tensor], Tensor], scores: Tensor, pairs: Tensor
) -> Tensor:
    """Sum a function of pairs over the images of each query: -> [Q].

    Args:
        function: maps some pairs to a value for each of them [R]. It gets the scores of all images
            minus that of the image of the pair [R, N], and the queries [R] and images [R].
        scores: [Q, N] scores of every query with every image.
        pairs: [Q, N] whether a query and an image are a pair.
    """
    query, image = torch.nonzero(pairs, as_tuple=True)
    sums = torch.zeros(len(scores), dtype=scores.dtype, device=scores.device)
    if not len(query):
        return sums

    def of_pairs(block: slice) -> Tensor:
        rows, columns = query[block], image[block]
        return function(scores[rows] - scores[rows, columns][:, None], rows, columns)

    values = in_blocks(of_pairs, len(query), scores.shape[1])
    return sums.index_put((query,), values, accumulate=True)


class Lists:
    """The images that each image of a batch ranks.

    Attributes:
        descriptors: [B, C] descriptors of the batch.
        labels: [B] labels of the batch.
        references: [N, C] descriptors of the images that are ranked.
        reference_labels: [N] their labels.
        within_batch: whether the batch itself is ranked. An image is then not in its own list.
    """

    def __init__(
        self,
        descriptors: Tensor,
        labels: Tensor,
        references: Tensor | None = None,
        reference_labels: Tensor | None = None,
    ) -> None:
        self.descriptors = descriptors
        self.labels = labels
        self.within_batch = references is None or reference_labels is None
        self.references = descriptors if references is None else references
        self.reference_labels = labels if reference_labels is None else reference_labels

    def positives(self, include_self: bool = False) -> Tensor:
        """Count the images that are relevant to each image of the batch: [B]."""
        classes, position, sizes = torch.unique(
            self.reference_labels, return_inverse=True, return_counts=True
        )
        if self.within_batch:
            found: Tensor = sizes[position] - (0 if include_self else 1)
            return found
        place = torch.searchsorted(classes, self.labels).clamp(max=len(classes) - 1)
        return torch.where(classes[place] == self.labels, sizes[place], 0)

    def scores(self, start: int, stop: int) -> Tensor:
        """Compute the scores of some queries with all images, in at least float32: [Q, N]."""
        dtype = accumulation_dtype(self.descriptors.dtype)
        return self.descriptors[start:stop].to(dtype) @ self.references.to(dtype).T

    def same(self, start: int, stop: int) -> Tensor:
        """Return whether an image has the label of a query; the query itself included: [Q, N]."""
        return self.labels[start:stop, None] == self.reference_labels

    def relevant(self, start: int, stop: int) -> Tensor:
        """Return which images are positives of some queries: [Q, N]."""
        return self.without_self(self.same(start, stop), start, stop, False)

    def without_self(
        self, values: Tensor, start: int, stop: int, value: bool | float, rows: Tensor | None = None
    ) -> Tensor:
        """Replace the value of each query with itself, if the batch is ranked.

        Shapes: values [Q, N]; or, with the queries `rows` [R] of the rows, [R, N].
        """
        if not self.within_batch:
            return values
        own = torch.arange(start, stop, device=self.labels.device)
        own = own if rows is None else own[rows]
        return values.scatter(1, own[:, None], value)
