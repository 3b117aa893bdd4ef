"""Losses of pytorch-metric-learning with the same call as all others.

They need `pip install 'listwise[compare]'`.
"""

from typing import Any

from torch import Tensor

from listwise.errors import InputError
from listwise.losses.base import BatchLoss
from listwise.losses.lists import Lists
from listwise.losses.tiles import accumulation_dtype
from listwise.optional import requires


class _MetricLearningLoss(BatchLoss):
    """The weighted mean, over the images, of a loss of pytorch-metric-learning."""

    _takes_references = True

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__()
        with requires("compare", "this loss"):
            from pytorch_metric_learning import losses, reducers
        self._each = getattr(losses, name)(**settings, reducer=reducers.DoNothingReducer())

    def share(self, lists: Lists, weights: Tensor, start: int, stop: int) -> Tensor:
        dtype = accumulation_dtype(lists.descriptors.dtype)
        references: dict[str, Tensor] = {}
        if not lists.within_batch:
            if not self._takes_references:
                raise InputError(
                    f"{type(self).__name__} does not take references: leave `references` out, or "
                    "use another loss"
                )
            references = {"ref_emb": lists.references.to(dtype)}
            references["ref_labels"] = lists.reference_labels
        (each,) = self._each(lists.descriptors.to(dtype), lists.labels, **references).values()
        if each["indices"] is None:
            raise InputError(
                "no query has a positive: every class of this batch has a single image; "
                "sample at least two images of some class"
            )
        counted = weights[each["indices"]]
        if not counted.sum() > 0:
            raise InputError(
                "every query with a positive has a weight of zero: increase at least one weight"
            )
        share = (each["indices"] >= start) & (each["indices"] < stop)
        value: Tensor = (counted * each["losses"].flatten())[share].sum() / counted.sum()
        return value


class FastAPLoss(_MetricLearningLoss):
    """FastAP (Cakir et al., CVPR 2019): 1 − mAP from histograms of squared distances.

    Call it as loss(descriptors [B, C], labels [B], weights [B] or None) -> scalar.

    Args:
        bins: number of histogram bins.

    Examples:
        >>> import torch
        >>> loss = FastAPLoss()(torch.eye(4)[[0, 0, 1, 1]], torch.tensor([5, 5, 7, 7]))
    """

    _takes_references = False

    def __init__(self, bins: int = 10) -> None:
        super().__init__("FastAPLoss", num_bins=bins)


class MultiSimilarityLoss(_MetricLearningLoss):
    """The multi-similarity loss (Wang et al., CVPR 2019), without its mining of pairs.

    Call it as loss(descriptors [B, C], labels [B], weights [B] or None) -> scalar.

    Args:
        alpha: sharpness for positives.
        beta: sharpness for negatives.
        base: the similarity that should separate positives from negatives.

    Examples:
        >>> import torch
        >>> loss = MultiSimilarityLoss()(torch.eye(4)[[0, 0, 1, 1]], torch.tensor([5, 5, 7, 7]))
    """

    def __init__(self, alpha: float = 2.0, beta: float = 50.0, base: float = 0.5) -> None:
        super().__init__("MultiSimilarityLoss", alpha=alpha, beta=beta, base=base)
