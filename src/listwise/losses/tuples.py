"""Losses of tuples of a query, a positive and some negatives.

The triplet loss (Gordo et al., IJCV 2017) and the contrastive loss (Radenović et al., TPAMI 2018).
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from listwise.errors import InputError
from listwise.losses.base import BatchLoss
from listwise.losses.checks import check_above_zero, check_count, check_positives, check_range
from listwise.losses.lists import Lists, accumulation_dtype

_BLOCK = 1024  # queries compared with the batch at a time


class TupleLoss(BatchLoss):
    """The weighted mean of a local loss over tuples of a query, a positive and N negatives.

    Called with `tuples` [T, 2 + N], it uses these rows of the batch: a query, an image of its
    class, N images of other classes. By default every image that has a positive is the query of one
    tuple, with the farthest image of its class and the N nearest of other classes. Given
    references, positives and negatives are rows of these instead of the batch.
    """

    def __init__(self, negatives: int) -> None:
        super().__init__()
        self.negatives = check_count("negatives", negatives, 1)

    def share(
        self,
        lists: Lists,
        weights: Tensor,
        start: int,
        stop: int,
        tuples: Tensor | None = None,
    ) -> Tensor:
        """Compute the share of the tuples of the queries start to stop: a scalar."""
        if tuples is None:
            query_rows = torch.nonzero(lists.positives() > 0)[:, 0]
        else:
            tuples = _check_tuples(tuples, lists, self.negatives)
            query_rows = tuples[:, 0]
        total = weights[query_rows].sum()
        check_positives(total.item(), lists.within_batch)
        share = (query_rows >= start) & (query_rows < stop)
        if tuples is None:
            tuples = hardest_images(lists, query_rows[share], self.negatives)
        else:
            tuples = tuples[share]
        query, others = lists.descriptors[tuples[:, 0]].to(weights.dtype), lists.references
        positive = (query - others[tuples[:, 1]]).square().sum(-1)
        negative = (query[:, None] - others[tuples[:, 2:]]).square().sum(-1)
        return (weights[tuples[:, 0]] * self.local_loss(positive, negative)).sum() / total

    def local_loss(self, positive: Tensor, negative: Tensor) -> Tensor:
        """Compute the loss of each tuple from its squared distances: [T], [T, N] -> [T]."""
        raise NotImplementedError


class TripletLoss(TupleLoss):
    """The triplet loss: a query q should be nearer to its positive p than to its negative n.

    Call it as loss(descriptors [B, C], labels [B], weights [B] or None) -> scalar.

    Args:
        margin: how much nearer, as a difference of squared distances.
        form: "margin" is ½ max(0, margin + ‖q − p‖² − ‖q − n‖²); "log-exp" is
            log(1 + exp(‖q − p‖² − ‖q − n‖²)), which has no margin.

    Examples:
        >>> descriptors = torch.eye(4)[[0, 0, 1, 1]]
        >>> TripletLoss()(descriptors, torch.tensor([5, 5, 7, 7])).item()
        0.0
    """

    def __init__(self, margin: float = 0.1, form: Literal["margin", "log-exp"] = "margin") -> None:
        super().__init__(negatives=1)
        if form not in ("margin", "log-exp"):
            raise InputError(f"form must be margin or log-exp, not {form!r}")
        check_range("margin", margin)
        self.margin = margin
        self.form = form

    def local_loss(self, positive: Tensor, negative: Tensor) -> Tensor:  # noqa: D102
        difference = positive - negative[:, 0]
        if self.form == "margin":
            return (self.margin + difference).clamp(min=0) / 2
        return softplus(difference)


class ContrastiveLoss(TupleLoss):
    """The contrastive loss: pulls a query to its positive, and pushes negatives past a margin.

    The loss of a tuple of query q, positive p and negatives n is
    ½ ‖q − p‖² + ½ Σ max(0, margin − ‖q − n‖)². Call it as
    loss(descriptors [B, C], labels [B], weights [B] or None) -> scalar.

    Args:
        margin: the distance from which on a negative adds no loss.
        negatives: number of negatives in a tuple.

    Examples:
        >>> descriptors = torch.eye(4)[[0, 0, 1, 1]]
        >>> ContrastiveLoss(negatives=2)(descriptors, torch.tensor([5, 5, 7, 7])).item()
        0.0
    """

    def __init__(self, margin: float = 0.85, negatives: int = 5) -> None:
        super().__init__(negatives)
        check_above_zero("margin", margin)
        self.margin = margin

    def local_loss(self, positive: Tensor, negative: Tensor) -> Tensor:  # noqa: D102
        # Equal descriptors have no direction to be pushed in: their gradient is 0, not NaN.
        apart = negative > 0
        distance = torch.where(apart, torch.where(apart, negative, 1).sqrt(), 0)
        return (positive + (self.margin - distance).clamp(min=0).square().sum(1)) / 2


@torch.no_grad()
def hardest_images(lists: Lists, queries: Tensor, negatives: int) -> Tensor:
    """Find the farthest image of its class and the N nearest of other classes for each query.

    Shapes: rows [Q] of queries that have a positive -> rows of query, positive and negatives
    [Q, 2 + N].
    """
    labels, reference_labels = lists.labels, lists.reference_labels
    dtype = accumulation_dtype(lists.descriptors.dtype)
    references = lists.references.to(dtype)
    same_class = lists.positives(include_self=True)
    largest = 0 if len(same_class) == 0 else int(same_class.max())
    if len(reference_labels) - largest < negatives:
        raise InputError(
            f"each query needs {negatives} images of other classes, but one class has {largest} "
            f"of the {len(reference_labels)} images of the batch: sample more classes"
        )
    found = [torch.empty(0, 2 + negatives, dtype=torch.int64, device=labels.device)]
    for block in torch.split(queries, _BLOCK):
        scores = lists.descriptors[block].to(dtype) @ references.T
        same = labels[block, None] == reference_labels
        nearest = scores.masked_fill(same, -torch.inf).topk(negatives).indices
        if lists.within_batch:
            same[torch.arange(len(block), device=labels.device), block] = False
        farthest = scores.masked_fill(~same, torch.inf).argmin(1)
        found.append(torch.cat([block[:, None], farthest[:, None], nearest], 1))
    return torch.cat(found)


def _check_tuples(tuples: Tensor, lists: Lists, negatives: int) -> Tensor:
    """Check the rows and classes of tuples; return them on the device of the labels."""
    if not isinstance(tuples, Tensor) or tuples.dtype != torch.int64 or tuples.dim() != 2:
        raise InputError(f"tuples must be a tensor [T, {2 + negatives}] of int64 rows")
    if tuples.shape[1] != 2 + negatives or len(tuples) == 0:
        raise InputError(
            f"tuples are {list(tuples.shape)}: give [T, {2 + negatives}], "
            f"a query, a positive and {negatives} negative(s) each"
        )
    for rows, count in ((tuples[:, 0], lists.labels), (tuples[:, 1:], lists.reference_labels)):
        if rows.min() < 0 or rows.max() >= len(count):
            raise InputError(f"tuples have rows outside of the batch of {len(count)} images")
    tuples = tuples.to(lists.labels.device)
    of_query, others = lists.labels[tuples[:, :1]], lists.reference_labels[tuples[:, 1:]]
    if not ((of_query == others[:, :1]).all() and (of_query != others[:, 1:]).all()):
        raise InputError(
            "a tuple has a positive of another class than its query, or a negative of its class: "
            "give rows in the order query, positive, negatives"
        )
    return tuples
