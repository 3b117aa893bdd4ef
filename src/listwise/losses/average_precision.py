"""The listwise losses of the paper: one minus the mean average precision of a batch (Eq. 12)."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from listwise.errors import InputError
from listwise.losses import checks
from listwise.losses.base import BatchLoss
from listwise.losses.histogram import list_histograms, score_histograms
from listwise.losses.lists import Lists
from listwise.losses.precision import expected_precision, quantized_precision, tie_aware_precision
from listwise.optional import runs_triton

# Of the kernels of `gpu.py`.
MAX_BINS = 128

Formula = Callable[[Tensor, Tensor, Tensor], Tensor]


def quantized_ap(scores: Tensor, relevance: Tensor, bins: int = 20) -> Tensor:
    """Compute the quantized average precision AP_Q (Eq. 11) of each row of a score matrix.

    Use it for scores of your own; a loss takes a gallery as `references`. A row without a relevant
    image has no average precision and gives NaN; use `.nanmean()` for the mean.

    Args:
        scores: [Q, N] cosine similarities.
        relevance: [Q, N], 1 or True where the image is relevant to the query.
        bins: number M of bins.

    Returns:
        [Q], differentiable with respect to the scores; float32 for half-precision scores.

    Examples:
        >>> quantized_ap(torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([[1, 0, 0]])).item()
        1.0
    """
    bins = checks.check_count("bins", bins, 2)
    relevant = checks.check_scores(scores, relevance)
    histograms = score_histograms(scores, relevant, bins)
    positives = relevant.sum(1)
    precision = quantized_precision(histograms[0], histograms[1], positives.clamp(min=1))
    return torch.where(positives > 0, precision, torch.nan)


class _HistogramLoss(BatchLoss):
    """One minus the mean, over the queries, of an average precision computed from histograms."""

    def __init__(self, formula: Formula, bins: int, include_self: bool) -> None:
        super().__init__()
        self.bins = checks.check_count("bins", bins, 2)
        self.include_self = include_self
        self._formula = formula

    def losses(self, lists: Lists, positives: Tensor, start: int, stop: int) -> Tensor:
        found = list_histograms(lists, start, stop, self.bins, self.include_self)
        return 1 - self._formula(found[0], found[1], positives)


class QuantizedAPLoss(_HistogramLoss):
    """1 − mAP_Q: the quantized average precision loss of Revaud et al. (Eq. 5 to 12).

    Call it as loss(descriptors [B, C], labels [B], weights [B] or None) -> scalar. Memory is linear
    in the size of the batch, because scores are not kept.

    Args:
        bins: number M of bins; the result hardly depends on it.
        include_self: keep each image in its own list, as Eq. 12 is written; by default a query
            ranks "all other batch images".

    Examples:
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
        **references: Tensor | None,
    ) -> Tensor:
        alone = all(given is None for given in references.values())
        # The fused loss has no gradient with respect to the weights, and cannot be compiled.
        learned = isinstance(weights, Tensor) and weights.requires_grad
        usual = alone and not learned and not torch.compiler.is_compiling()
        if not (usual and isinstance(descriptors, Tensor) and _on_gpu(descriptors, self.bins)):
            return super().forward(descriptors, labels, weights, queries=queries, **references)
        from listwise.losses import gpu

        checks.check_shapes(descriptors, labels)
        start, stop = checks.check_queries(queries, len(labels))
        if weights is not None:
            checks.check_weight_shape(weights, len(labels))
        return gpu.quantized_loss(
            descriptors, labels, weights, self.bins, self.include_self, start, stop
        )


def _on_gpu(descriptors: Tensor, bins: int) -> bool:
    """Return whether the kernels of `gpu.py` can compute this case."""
    suits = descriptors.is_cuda and descriptors.dtype != torch.float64 and bins <= MAX_BINS
    return suits and runs_triton(descriptors.device)


class TieAwareAPLoss(_HistogramLoss):
    """1 − mAP_T: the tie-aware average precision loss, where images in the same bin are tied.

    Call it as loss(descriptors [B, C], labels [B], weights [B] or None) -> scalar.

    Args:
        bins: number M of bins.
        form: "simplified" is the precision of section 4.2; "closed" is the mean over all orders of
            the images in a bin (He et al., CVPR 2018).
        include_self: as in `QuantizedAPLoss`.

    Examples:
        >>> loss = TieAwareAPLoss(form="closed")
        >>> loss(torch.eye(4)[[0, 0, 1, 1]], torch.tensor([5, 5, 7, 7])).item()
        0.0
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
