"""Matryoshka training (Kusupati et al., NeurIPS 2022): every prefix of a descriptor is trained."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from listwise.errors import InputError
from listwise.losses.checks import check_count
from listwise.losses.tiles import accumulation_dtype


class MatryoshkaLoss(nn.Module):
    """The mean of a loss over several lengths of the descriptors.

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

    def extra_repr(self) -> str:  # noqa: D102
        return f"dims={self.dims}"


def cut(descriptors: Tensor, dim: int) -> Tensor:
    """Return the first dimensions of descriptors as unit rows: [N, C] -> [N, dim]."""
    if descriptors.shape[1] == dim:
        return descriptors
    rows = descriptors[:, :dim].to(accumulation_dtype(descriptors.dtype))
    return normalize(rows, dim=1).to(descriptors.dtype)
