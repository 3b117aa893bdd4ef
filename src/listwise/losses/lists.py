"""The queries of a batch and the images that they rank: the batch itself, or references."""

import torch
from torch import Tensor

from listwise.losses.tiles import accumulation_dtype


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
