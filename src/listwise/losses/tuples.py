"""The base class of losses of tuples: a query, a positive and some negatives."""

import torch
from torch import Tensor, nn

from listwise.errors import InputError
from listwise.losses.base import check_inputs
from listwise.losses.checks import check_count, check_positives, check_references
from listwise.losses.lists import Lists

_BLOCK = 1024  # queries compared with the batch at a time


class TupleLoss(nn.Module):
    """The weighted mean of a local loss over tuples of a query, a positive and N negatives."""

    def __init__(self, negatives: int) -> None:
        super().__init__()
        self.negatives = check_count("negatives", negatives, 1)

    def forward(
        self,
        descriptors: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        *,
        queries: tuple[int, int] | None = None,
        tuples: Tensor | None = None,
        references: Tensor | None = None,
        reference_labels: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss of a batch.

        Args:
            descriptors: [B, C] unit rows.
            labels: [B] integers; images with equal labels are relevant to each other.
            weights: [B] weights of the queries; all equal by default.
            queries: rows (start, stop): return only the share of the tuples of these queries.
            tuples: [T, 2 + N] rows of the batch: a query, an image of its class, N images of other
                classes. By default every image that has a positive is the query of one tuple, with
                the farthest image of its class and the N nearest of other classes.
            references: [N, C] unit rows. Positives and negatives are then rows of the references
                instead of the batch.
            reference_labels: [N] labels of the references.

        Returns:
            A scalar: Σ w ℓ / Σ w over the tuples.
        """
        weights, start, stop = check_inputs(descriptors, labels, weights, queries, references)
        check_references(descriptors, references, reference_labels)
        # Autocast would search for the hardest images in half precision.
        with torch.autocast(descriptors.device.type, enabled=False):
            rows = descriptors.to(weights.dtype)
            if references is not None:
                references = references.to(weights.dtype)
            lists = Lists(rows, labels, references, reference_labels)
            return self._share(lists, weights, (start, stop), tuples)

    def _share(
        self, lists: Lists, weights: Tensor, queries: tuple[int, int], tuples: Tensor | None
    ) -> Tensor:
        """Compute the share of the tuples of some queries; see `forward`."""
        if tuples is None:
            query_rows = torch.nonzero(lists.positives() > 0)[:, 0]
        else:
            tuples = _check_tuples(tuples, lists, self.negatives)
            query_rows = tuples[:, 0]
        total = weights[query_rows].sum()
        check_positives(total.item(), lists.within_batch)
        share = (query_rows >= queries[0]) & (query_rows < queries[1])
        if tuples is None:
            tuples = hardest_images(lists, query_rows[share], self.negatives)
        else:
            tuples = tuples[share]
        query, others = lists.descriptors[tuples[:, 0]], lists.references
        positive = (query - others[tuples[:, 1]]).square().sum(-1)
        negative = (query[:, None] - others[tuples[:, 2:]]).square().sum(-1)
        return (weights[tuples[:, 0]] * self.local_loss(positive, negative)).sum() / total

    def local_loss(self, positive: Tensor, negative: Tensor) -> Tensor:
        """Compute the loss of each tuple from its squared distances: [T], [T, N] -> [T]."""
        raise NotImplementedError


@torch.no_grad()
def hardest_images(lists: Lists, queries: Tensor, negatives: int) -> Tensor:
    """Find the farthest image of its class and the N nearest of other classes for each query.

    Shapes: rows [Q] of queries that have a positive -> rows of query, positive and negatives
    [Q, 2 + N].
    """
    labels, reference_labels = lists.labels, lists.reference_labels
    same_class = lists.positives(include_self=True)
    largest = 0 if len(same_class) == 0 else int(same_class.max())
    if len(reference_labels) - largest < negatives:
        raise InputError(
            f"each query needs {negatives} images of other classes, but one class has {largest} "
            f"of the {len(reference_labels)} images of the batch: sample more classes"
        )
    found = [torch.empty(0, 2 + negatives, dtype=torch.int64, device=labels.device)]
    for block in torch.split(queries, _BLOCK):
        scores = lists.descriptors[block] @ lists.references.T
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
