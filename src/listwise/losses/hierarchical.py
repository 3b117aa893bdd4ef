"""HAPPIER: average precision for labels with levels (Ramzi et al., ECCV 2022)."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from listwise.errors import InputError
from listwise.losses.base import BatchLoss
from listwise.losses.checks import (
    check_above_zero,
    check_count,
    check_integers,
    check_label_range,
    check_range,
)
from listwise.losses.lists import Lists, accumulation_dtype, sum_over_pairs
from listwise.losses.smooth_ranks import RankBound


class HierarchicalAPLoss(BatchLoss):
    """One minus a smooth bound of the hierarchical average precision H-AP, with a clustering term.

    Labels have L levels, such as genus and species. An image that shares l levels with a query has
    the relevance rel = (l/L)^α / n, where n images of the list share as many. With the images k
    that share a level, the loss of a query is (1 − λ)·(1 − H) + λ·C with

    - H = Σ H-rank(k) / rank(k) / Σ rel(k), where H-rank(k) = rel(k) + Σ min(rel(k), rel(j)) over
      the images j ahead of k. In rank(k) = 1 + (the number of images ahead of k), images that share
      fewer levels with the query count by the smooth upper bound of `RoadmapLoss`; all others
      count as they are, without a gradient.
    - C: the cross-entropy of the class of the query among all classes, by the cosines with one
      learned vector per class.

    Call it as loss(descriptors [B, C], labels [B], weights [B] or None) -> scalar, with labels that
    are rows of `levels`. The defaults are those of the paper.

    Args:
        levels: [K, L] integers: the groups of each of the K classes, from the coarsest level to
            the classes themselves. Classes share a level if all numbers up to it are equal.
        dim: number of dimensions C of the descriptors; None leaves out the clustering term.
        alpha: α; larger values make images that share few levels less relevant.
        clustering: λ, from 0 to 1.
        clustering_temperature: divides the cosines in C.
        temperature: τ of the bound, as in `RoadmapLoss`.
        slope: ρ of the bound.
        offset: δ of the bound.

    Examples:
        >>> levels = torch.tensor([[0, 0], [0, 1], [1, 2]])  # the first two classes are related
        >>> loss = HierarchicalAPLoss(levels)
        >>> value = loss(torch.eye(3)[[0, 0, 1, 2]], torch.tensor([0, 0, 1, 2]))
    """

    levels: Tensor

    def __init__(
        self,
        levels: Tensor,
        dim: int | None = None,
        alpha: float = 1.0,
        clustering: float = 0.1,
        clustering_temperature: float = 0.05,
        temperature: float = 0.01,
        slope: float = 100.0,
        offset: float = 0.05,
    ) -> None:
        super().__init__()
        if not isinstance(levels, Tensor) or levels.dim() != 2 or 0 in levels.shape:
            raise InputError("levels must be a tensor [K, L] with the groups of each class")
        check_integers("levels", levels)
        check_range("alpha", alpha)
        check_range("clustering", clustering, 1)
        check_above_zero("clustering_temperature", clustering_temperature)
        # The labels of the data determine them, so a checkpoint does not have them.
        self.register_buffer("levels", levels, persistent=False)
        self.alpha = alpha
        self.clustering = 0.0 if dim is None else clustering
        self.clustering_temperature = clustering_temperature
        self.bound = RankBound(temperature, slope, offset)
        self.centers: nn.Parameter | None = None
        if self.clustering:
            self.centers = nn.Parameter(torch.empty(len(levels), check_count("dim", dim or 0, 1)))
            limit = self.centers.shape[1] ** -0.5
            nn.init.uniform_(self.centers, -limit, limit)

    def positives(self, lists: Lists) -> Tensor:  # noqa: D102
        check_label_range(lists.labels, len(self.levels))
        check_label_range(lists.reference_labels, len(self.levels))
        coarsest = self.levels[:, 0]
        references = None if lists.within_batch else lists.references
        groups = coarsest[lists.labels], references, coarsest[lists.reference_labels]
        return Lists(lists.descriptors, *groups).positives()

    def losses(self, lists: Lists, positives: Tensor, start: int, stop: int) -> Tensor:  # noqa: D102
        losses = 1 - self._precision(lists, start, stop)
        if self.centers is None:
            return losses
        cluster = self._cluster(self.centers, lists, start, stop)
        return (1 - self.clustering) * losses + self.clustering * cluster

    def _precision(self, lists: Lists, start: int, stop: int) -> Tensor:
        """Compute the bound of H-AP of each query; 1 without a relevant image: [Q]."""
        shared = self._shared_levels(lists, start, stop)
        scores = lists.scores(start, stop)
        relevance = torch.zeros_like(scores)
        count = self.levels.shape[1]
        for level in range(1, count + 1):
            here = shared == level
            alike = here.sum(1, keepdim=True).clamp(min=1).to(scores.dtype)
            relevance = torch.where(here, (level / count) ** self.alpha / alike, relevance)

        def ratios(gap: Tensor, query: Tensor, image: Tensor) -> Tensor:
            """Compute H-rank / rank of each pair of a query and a relevant image: [R]."""
            levels, rel = shared[query], relevance[query, image]
            fewer = (levels < shared[query, image][:, None]) & (levels >= 0)
            ahead = (gap > 0) & (levels >= 0)
            gain = torch.minimum(relevance[query], rel[:, None])
            rank = 1 + (ahead & ~fewer).sum(1) + torch.where(fewer, self.bound(gap), 0).sum(1)
            return (rel + torch.where(ahead, gain, 0).sum(1)) / rank

        found = sum_over_pairs(ratios, scores, shared > 0)
        total = relevance.sum(1)
        return torch.where(total > 0, found / torch.where(total > 0, total, 1), 1)

    def _shared_levels(self, lists: Lists, start: int, stop: int) -> Tensor:
        """Count the levels that images share with queries; −1 for the query itself: [Q, N]."""
        queries, images = self.levels[lists.labels[start:stop]], self.levels[lists.reference_labels]
        same = torch.ones(len(queries), len(images), dtype=torch.bool, device=queries.device)
        shared = torch.zeros_like(same, dtype=torch.int64)
        for level in range(self.levels.shape[1]):
            same = same & (queries[:, level, None] == images[:, level])
            shared = shared + same
        return lists.without_self(shared, start, stop, -1)

    def _cluster(self, centers: Tensor, lists: Lists, start: int, stop: int) -> Tensor:
        """Compute the cross-entropy of the class of each query: [Q]."""
        dtype = accumulation_dtype(lists.descriptors.dtype)
        rows = lists.descriptors[start:stop].to(dtype)
        if rows.shape[1] > centers.shape[1]:
            raise InputError(
                f"descriptors have {rows.shape[1]} dimensions, but dim is {centers.shape[1]}"
            )
        cosines = rows @ normalize(centers[:, : rows.shape[1]].to(dtype), dim=1).T
        logits = cosines / self.clustering_temperature
        return cross_entropy(logits, lists.labels[start:stop], reduction="none")
