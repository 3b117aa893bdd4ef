"""The base class of losses of tuples: a query, a positive and some negatives."""

import torch
from torch import Tensor, nn

from listwise.errors import InputError
from listwise.losses.base import check_inputs, class_sizes
from listwise.losses.checks import check_count, check_positives

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

        Returns:
            A scalar: Σ w ℓ / Σ w over the tuples.
        """
        weights, start, stop = check_inputs(descriptors, labels, weights, queries)
        # Autocast would search for the hardest images in half precision.
        with torch.autocast(descriptors.device.type, enabled=False):
            rows = descriptors.to(weights.dtype)
            return self._share(rows, labels, weights, (start, stop), tuples)

    def _share(
        self,
        rows: Tensor,
        labels: Tensor,
        weights: Tensor,
        queries: tuple[int, int],
        tuples: Tensor | None,
    ) -> Tensor:
        """Compute the share of the tuples of some queries; see `forward`."""
        if tuples is None:
            query_rows = torch.nonzero(class_sizes(labels) > 1)[:, 0]
        else:
            tuples = _check_tuples(tuples, labels, self.negatives)
            query_rows = tuples[:, 0]
        total = weights[query_rows].sum()
        check_positives(total.item())
        share = (query_rows >= queries[0]) & (query_rows < queries[1])
        if tuples is None:
            tuples = hardest_in_batch(rows.detach(), labels, query_rows[share], self.negatives)
        else:
            tuples = tuples[share]
        query = rows[tuples[:, 0]]
        positive = (query - rows[tuples[:, 1]]).square().sum(-1)
        negative = (query[:, None] - rows[tuples[:, 2:]]).square().sum(-1)
        return (weights[tuples[:, 0]] * self.local_loss(positive, negative)).sum() / total

    def local_loss(self, positive: Tensor, negative: Tensor) -> Tensor:
        """Compute the loss of each tuple from its squared distances: [T], [T, N] -> [T]."""
        raise NotImplementedError


def hardest_in_batch(
    descriptors: Tensor, labels: Tensor, queries: Tensor, negatives: int
) -> Tensor:
    """Find the farthest image of its class and the N nearest of other classes for each query.

    Shapes: descriptors [B, C] unit rows, labels [B], rows [Q] of queries that have a positive ->
    rows of query, positive and negatives [Q, 2 + N].
    """
    sizes = torch.unique(labels, return_counts=True)[1]
    if len(labels) - int(sizes.max()) < negatives:
        raise InputError(
            f"each query needs {negatives} images of other classes, but one class has "
            f"{int(sizes.max())} of the {len(labels)} images of the batch: sample more classes"
        )
    found = [torch.empty(0, 2 + negatives, dtype=torch.int64, device=labels.device)]
    for block in torch.split(queries, _BLOCK):
        scores = descriptors[block] @ descriptors.T
        same = labels[block, None] == labels
        nearest = scores.masked_fill(same, -torch.inf).topk(negatives).indices
        same[torch.arange(len(block), device=labels.device), block] = False
        farthest = scores.masked_fill(~same, torch.inf).argmin(1)
        found.append(torch.cat([block[:, None], farthest[:, None], nearest], 1))
    return torch.cat(found)


def _check_tuples(tuples: Tensor, labels: Tensor, negatives: int) -> Tensor:
    """Check the rows and classes of tuples; return them on the device of the labels."""
    if not isinstance(tuples, Tensor) or tuples.dtype != torch.int64 or tuples.dim() != 2:
        raise InputError(f"tuples must be a tensor [T, {2 + negatives}] of int64 rows")
    if tuples.shape[1] != 2 + negatives or len(tuples) == 0:
        raise InputError(
            f"tuples are {list(tuples.shape)}: give [T, {2 + negatives}], "
            f"a query, a positive and {negatives} negative(s) each"
        )
    if tuples.min() < 0 or tuples.max() >= len(labels):
        raise InputError(f"tuples have rows outside of the batch of {len(labels)} images")
    tuples = tuples.to(labels.device)
    of_query, others = labels[tuples[:, :1]], labels[tuples[:, 1:]]
    if not ((of_query == others[:, :1]).all() and (of_query != others[:, 1:]).all()):
        raise InputError(
            "a tuple has a positive of another class than its query, or a negative of its class: "
            "give rows in the order query, positive, negatives"
        )
    return tuples
