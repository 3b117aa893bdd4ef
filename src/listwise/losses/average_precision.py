"""The listwise losses: one minus the mean average precision of the batch (Eq. 12)."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from listwise.errors import InputError
from listwise.losses.checks import (
    check_batch,
    check_bins,
    check_queries,
    check_scores,
    check_shapes,
    check_weight_shape,
    query_weights,
    refuse_no_positives,
)
from listwise.losses.histogram import (
    accumulation_dtype,
    label_histograms,
    on_gpu,
    score_histograms,
)
from listwise.losses.precision import expected_precision, quantized_precision, tie_aware_precision

Precision = Callable[[Tensor, Tensor, Tensor], Tensor]


def quantized_ap(scores: Tensor, relevance: Tensor, bins: int = 20) -> Tensor:
    """Quantized average precision AP_Q (Eq. 11) of each row of any score matrix.

    Use it where queries and database differ: a query/gallery split, or a memory of earlier
    batches. A row without a relevant image has no average precision and gives NaN; take
    `.nanmean()`.

    Args:
        scores: [Q, N] cosine similarities.
        relevance: [Q, N], 1 or True where the image is relevant to the query.
        bins: number M of bins.

    Returns:
        [Q], differentiable with respect to the scores; float32 for half-precision scores.
    """
    check_bins(bins)
    relevant = check_scores(scores, relevance)
    histograms = score_histograms(scores, relevant, bins)
    positives = relevant.sum(1)
    precision = quantized_precision(histograms[0], histograms[1], positives.clamp(min=1))
    return torch.where(positives > 0, precision, torch.nan)


class _ListwiseLoss(nn.Module):
    """One minus the weighted mean, over the batch's queries, of an average precision."""

    def __init__(self, precision: Precision, bins: int, include_self: bool) -> None:
        super().__init__()
        self.bins = check_bins(bins)
        self.include_self = include_self
        self._precision = precision

    def forward(
        self,
        descriptors: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        *,
        queries: tuple[int, int] | None = None,
    ) -> Tensor:
        """The loss of a batch in which every image asks and all others are ranked.

        Args:
            descriptors: [B, C] unit rows.
            labels: [B] integers; images of equal label are relevant to each other.
            weights: [B] weights of the queries; equal ones by default.
            queries: rows (start, stop): give only their share of the loss. The shares of a
                partition of the batch add up to the loss of the batch, so that several
                processes can split the queries.

        Returns:
            A scalar: Σ w (1 − AP) / Σ w over the queries that have a positive.
        """
        check_batch(descriptors, labels)
        size = len(labels)
        start, stop = check_queries(queries, size)
        positives = _positives(labels, self.include_self)
        dtype = accumulation_dtype(descriptors.dtype)
        weights = query_weights(weights, size, dtype, labels.device)
        weights = torch.where(positives > 0, weights, 0)
        total = weights.sum()
        refuse_no_positives(total.item())
        histograms = label_histograms(
            descriptors, labels, self.bins, self.include_self, (start, stop)
        )
        precision = self._precision(
            histograms[0], histograms[1], positives[start:stop].clamp(min=1)
        )
        return (weights[start:stop] * (1 - precision)).sum() / total

    def extra_repr(self) -> str:
        return f"bins={self.bins}, include_self={self.include_self}"


class QuantizedAPLoss(_ListwiseLoss):
    """1 − mAP_Q: the quantized average precision loss of Revaud et al. (Eq. 5 to 12).

    Memory is linear in the batch: scores are never kept.

    Args:
        bins: number M of bins; the result hardly depends on it.
        include_self: rank each image in its own list, as Eq. 12 is written, instead of among
            "all other batch images".

    Example:
        >>> loss = QuantizedAPLoss(bins=20)
        >>> descriptors = nn.functional.normalize(torch.eye(4)[[0, 0, 1, 1]], dim=1)
        >>> loss(descriptors, torch.tensor([5, 5, 7, 7])).item()
        0.0
    """

    def __init__(self, bins: int = 20, *, include_self: bool = False) -> None:
        super().__init__(quantized_precision, bins, include_self)

    def forward(  # noqa: D102
        self,
        descriptors: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        *,
        queries: tuple[int, int] | None = None,
    ) -> Tensor:
        check_shapes(descriptors, labels)
        # A compiler sees the operator below, which runs the same kernels; and a gradient by the
        # weights is nothing that the fused loss has.
        learned = weights is not None and weights.requires_grad
        if learned or torch.compiler.is_compiling() or not on_gpu(descriptors, self.bins):
            return super().forward(descriptors, labels, weights, queries=queries)
        from listwise.losses import gpu

        start, stop = check_queries(queries, len(labels))
        if weights is not None:
            check_weight_shape(weights, len(labels))
        return gpu.quantized_loss(
            descriptors, labels, weights, self.bins, self.include_self, start, stop
        )


class TieAwareAPLoss(_ListwiseLoss):
    """1 − mAP_T: average precision that is fair to images that share a bin.

    Args:
        bins: number M of bins.
        form: "simplified" is the precision of section 4.2; "closed" the mean over all orders of
            a bin's images (He et al., CVPR 2018).
        include_self: as in `QuantizedAPLoss`.
    """

    def __init__(
        self,
        bins: int = 20,
        form: Literal["simplified", "closed"] = "simplified",
        *,
        include_self: bool = False,
    ) -> None:
        forms = {"simplified": tie_aware_precision, "closed": expected_precision}
        if form not in forms:
            raise InputError(f"form must be one of {', '.join(forms)}, not {form!r}")
        super().__init__(forms[form], bins, include_self)
        self.form = form

    def extra_repr(self) -> str:  # noqa: D102
        return f"{super().extra_repr()}, form={self.form}"


def _positives(labels: Tensor, include_self: bool) -> Tensor:
    """Number of relevant images in each query's list: [B]."""
    _, position, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
    positives: Tensor = sizes[position] - (0 if include_self else 1)
    return positives
