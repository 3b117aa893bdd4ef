"""Losses of metric learning: InfoNCE, Proxy-Anchor, and two of pytorch-metric-learning.

FastAP and multi-similarity need `pip install 'listwise[compare]'`.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, softplus

from listwise.errors import InputError
from listwise.losses.base import BatchLoss, LossModule
from listwise.losses.checks import (
    check_above_zero,
    check_batch,
    check_count,
    check_label_range,
    check_positives,
    check_queries,
)
from listwise.losses.lists import Lists, accumulation_dtype, in_blocks
from listwise.optional import requires


class InfoNCELoss(BatchLoss):
    """The cross-entropy of finding each positive among the negatives of the batch.

    The loss of a query with score s_p to a positive p and s_n to the negatives n is the mean over
    its positives of −log(exp(s_p/T) / (exp(s_p/T) + Σ exp(s_n/T))); other positives are not in the
    sum. Call it as loss(descriptors [B, C], labels [B], weights [B] or None) -> scalar. Memory
    grows linearly with the batch.

    Args:
        temperature: T; smaller values weight the hardest negatives more.

    Examples:
        >>> loss = InfoNCELoss()(torch.eye(4)[[0, 0, 1, 1]], torch.tensor([5, 5, 7, 7]))
    """

    def __init__(self, temperature: float = 0.07) -> None:
        super().__init__()
        check_above_zero("temperature", temperature)
        self.temperature = temperature

    def losses(self, lists: Lists, positives: Tensor, start: int, stop: int) -> Tensor:  # noqa: D102

        def sums(block: slice) -> Tensor:
            """Sum the losses of some queries over their positives: [Q]."""
            rows = start + block.start, start + block.stop
            scores = lists.scores(*rows) / self.temperature
            hardness = scores.masked_fill(lists.same(*rows), -torch.inf)
            hardness = hardness.logsumexp(1, keepdim=True)
            # −log(p / (p + n)) = log(1 + n / p); with no negative in the batch it is 0.
            counted = lists.relevant(*rows) & hardness.isfinite()
            return softplus(torch.where(counted, hardness - scores, -torch.inf)).sum(1)

        return in_blocks(sums, stop - start, len(lists.references)) / positives


class ProxyAnchorLoss(LossModule):
    """Pull images to the proxy of their class, and push them away from the other proxies.

    With s(x, p) the cosine of a descriptor x and a proxy p, the loss is the mean of
    log(1 + Σ exp(−α (s(x, p) − δ))) over the proxies p that have an image in the batch, with the
    sum over these images x, plus the mean of log(1 + Σ exp(α (s(x, p) + δ))) over all proxies, with
    the sum over the images x of other classes.

    Call it as loss(descriptors [B, C], labels [B]) -> scalar. The proxies are parameters: train
    them with the network, at a larger learning rate (100 times in the paper). A batch may have
    shorter descriptors than the proxies, which are then cut to the same length.

    Args:
        classes: the number of classes; labels are from 0 to classes − 1.
        dim: the number of dimensions C of the descriptors.
        margin: δ.
        scale: α.

    Examples:
        >>> loss = ProxyAnchorLoss(classes=2, dim=4)
        >>> value = loss(torch.eye(4)[[0, 0, 1, 1]], torch.tensor([0, 0, 1, 1]))
    """

    def __init__(self, classes: int, dim: int, margin: float = 0.1, scale: float = 32.0) -> None:
        super().__init__()
        check_above_zero("scale", scale)
        if not math.isfinite(margin):
            raise InputError(f"margin must be a finite number, not {margin}")
        classes = check_count("classes", classes, 2)
        self.margin, self.scale = margin, scale
        self.proxies = nn.Parameter(torch.empty(classes, check_count("dim", dim, 1)))
        nn.init.kaiming_normal_(self.proxies, mode="fan_out")

    def forward(
        self, descriptors: Tensor, labels: Tensor, *, queries: tuple[int, int] | None = None
    ) -> Tensor:
        """Compute the loss of a batch.

        Args:
            descriptors: [B, C] unit rows.
            labels: [B] integers from 0 to classes − 1.
            queries: rows (start, stop): return only a share of the loss. The shares of all rows of
                the batch add up to its loss. A share has some of the proxies, and all images.

        Returns:
            A scalar.
        """
        check_batch(descriptors, labels, 1)
        start, stop = check_queries(queries, len(labels))
        count, dim = self.proxies.shape
        check_label_range(labels, count)
        if descriptors.shape[1] > dim:
            raise InputError(f"descriptors have {descriptors.shape[1]} dimensions, proxies {dim}")
        # Proxies are divided like the rows, so that the shares of all rows have all proxies.
        first, last = count * start // len(labels), count * stop // len(labels)
        present = torch.unique(labels)
        with torch.autocast(descriptors.device.type, enabled=False):
            dtype = accumulation_dtype(descriptors.dtype)
            proxies = self.proxies[first:last, : descriptors.shape[1]].to(dtype)
            scores = normalize(proxies, dim=1) @ descriptors.to(dtype).T
            own = torch.arange(first, last, device=labels.device)[:, None] == labels
            pulled = _log_one_plus_sum(-self.scale * (scores - self.margin), own)
            pushed = _log_one_plus_sum(self.scale * (scores + self.margin), ~own)
            return pulled.sum() / len(present) + pushed.sum() / count


def _log_one_plus_sum(exponents: Tensor, counted: Tensor) -> Tensor:
    """Compute log(1 + Σ exp(x)) over the counted exponents of each row: [P, B] -> [P]."""
    kept = exponents.masked_fill(~counted, -torch.inf)
    return torch.cat([kept.new_zeros(len(kept), 1), kept], 1).logsumexp(1)


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
            check_positives(0.0)
        counted = weights[each["indices"]]
        check_positives(counted.sum().item())
        share = (each["indices"] >= start) & (each["indices"] < stop)
        value: Tensor = (counted * each["losses"].flatten())[share].sum() / counted.sum()
        return value


class FastAPLoss(_MetricLearningLoss):
    """FastAP (Cakir et al., CVPR 2019): 1 − mAP from histograms of squared distances.

    Call it as loss(descriptors [B, C], labels [B], weights [B] or None) -> scalar.

    Args:
        bins: number of histogram bins.

    Examples:
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
        >>> loss = MultiSimilarityLoss()(torch.eye(4)[[0, 0, 1, 1]], torch.tensor([5, 5, 7, 7]))
    """

    def __init__(self, alpha: float = 2.0, beta: float = 50.0, base: float = 0.5) -> None:
        super().__init__("MultiSimilarityLoss", alpha=alpha, beta=beta, base=base)
