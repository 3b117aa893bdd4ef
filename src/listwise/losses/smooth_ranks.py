"""Losses that rank images by smooth functions of differences of scores.

Smooth-AP (Brown et al., ECCV 2020), Recall@k (Patel et al., CVPR 2022) and ROADMAP (Ramzi et al.,
2021), for classes of any size in any order.
"""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from listwise.errors import InputError
from listwise.losses.base import BatchLoss, LossModule
from listwise.losses.checks import check_above_zero, check_count, check_range
from listwise.losses.lists import Lists, sum_over_pairs


class SmoothAPLoss(BatchLoss):
    """1 − mAP where ranks are sums of sigmoids of score differences.

    Call it as loss(descriptors [B, C], labels [B], weights [B] or None) -> scalar. As in the
    authors' code, an image is in its own list.

    Args:
        temperature: of the sigmoid; smaller values are closer to true ranks.

    Examples:
        >>> loss = SmoothAPLoss()(torch.eye(4)[[0, 0, 1, 1]], torch.tensor([5, 5, 7, 7]))
    """

    def __init__(self, temperature: float = 0.01) -> None:
        super().__init__()
        check_above_zero("temperature", temperature)
        self.temperature = temperature

    def losses(self, lists: Lists, positives: Tensor, start: int, stop: int) -> Tensor:  # noqa: D102
        same = lists.same(start, stop)

        def precisions(gap: Tensor, query: Tensor, image: Tensor) -> Tensor:
            """Compute the smooth precision at the rank of each image in its query's list: [R]."""
            ahead = torch.sigmoid(gap / self.temperature)
            ahead = ahead.scatter(1, image[:, None], 1.0)  # the rank includes the image itself
            return (ahead * same[query]).sum(1) / ahead.sum(1)

        total = sum_over_pairs(precisions, lists.scores(start, stop), same)
        return 1 - total / same.sum(1).clamp(min=1)


class RecallAtKLoss(BatchLoss):
    """One minus a differentiable Recall@k, averaged over several k.

    The recall of a query q is the mean, over its positives x, of
    σ((k − 1 − Σ σ((s_z − s_x) / temperature)) / k_temperature) with the sum over all other images z
    of the batch: the inner sigmoids count the images ahead of x, the outer one compares the rank of
    x with k. Call it as loss(descriptors [B, C], labels [B], weights [B] or None) -> scalar. The
    defaults are those of the paper, without its similarity mixup.

    With similarity mixup (SimMix), virtual examples are added to the batch, as queries and as
    images. One lies on the line between two images x and z of a class: its score with any image
    is a·s_x + (1 − a)·s_z, with a random a from 0 to 1, and its weight is mixed in the same way.
    Images with the weight 0 are not mixed.
    The random numbers depend only on the labels of the batch and their order, so they are the same
    in all processes and for all sizes of micro-batches.

    Args:
        ks: the values of k.
        temperature: of the sigmoids that count images; smaller values are closer to true ranks.
        k_temperature: of the sigmoid that compares a rank with k.
        virtual: maximum number of virtual examples per class; at most one for each pair of its
            images. 0 is off. The paper has 4 images and so 6 pairs per class.

    Examples:
        >>> loss = RecallAtKLoss()(torch.eye(4)[[0, 0, 1, 1]], torch.tensor([5, 5, 7, 7]))
    """

    def __init__(
        self,
        ks: Sequence[int] = (1, 2, 4, 8, 16),
        temperature: float = 0.01,
        k_temperature: float = 1.0,
        virtual: int = 0,
    ) -> None:
        super().__init__()
        self.virtual = check_count("virtual", virtual, 0)
        self.ks = tuple(check_count("ks", k, 1) for k in ks)
        if not self.ks:
            raise InputError("ks is empty: give at least one value of k")
        check_above_zero("temperature", temperature)
        check_above_zero("k_temperature", k_temperature)
        self.temperature = temperature
        self.k_temperature = k_temperature

    def share(self, lists: Lists, weights: Tensor, start: int, stop: int) -> Tensor:  # noqa: D102
        if not self.virtual:
            return super().share(lists, weights, start, stop)
        size = len(lists.labels)
        lists, weights, first = with_virtual_examples(lists, weights, self.virtual)
        value = super().share(lists, weights, start, stop)
        # A virtual query is in the same share as the first of its two images.
        bounds = torch.searchsorted(first, first.new_tensor([start, stop]))
        begin, end = (size + int(bound) for bound in bounds)
        return value if begin == end else value + super().share(lists, weights, begin, end)

    def losses(self, lists: Lists, positives: Tensor, start: int, stop: int) -> Tensor:  # noqa: D102

        def recalls(gap: Tensor, query: Tensor, image: Tensor) -> Tensor:
            """Compute how surely each image is among the first k, averaged over all k: [R]."""
            # Neither the image itself nor the query is ahead of it.
            ahead = torch.sigmoid(gap / self.temperature).scatter(1, image[:, None], 0.0)
            count = lists.without_self(ahead, start, stop, 0.0, query).sum(1)
            found = [torch.sigmoid((k - 1 - count) / self.k_temperature) for k in self.ks]
            return torch.stack(found).mean(0)

        scores = lists.scores(start, stop)
        return 1 - sum_over_pairs(recalls, scores, lists.relevant(start, stop)) / positives


def with_virtual_examples(
    lists: Lists, weights: Tensor, count: int
) -> tuple[Lists, Tensor, Tensor]:
    """Add mixtures of two images of a class to a batch, at most `count` per class.

    Images without a weight, such as those of a memory, are ranked but not mixed.

    Returns:
        The lists with the mixtures [V, C] after the images of the batch, the weights [B + V], and
        the first image of each mixture [V], in ascending order.
    """
    rows, labels = lists.descriptors, lists.labels
    weighted = torch.nonzero(weights > 0)[:, 0]
    first, second, share = draw_pairs(labels[weighted], count)
    order = torch.argsort(first, stable=True)
    share = share.to(rows.device)[order]
    first, second = weighted[first[order]], weighted[second[order]]
    mixed = share[:, None].to(rows.dtype) * rows[first]
    mixed = mixed + (1 - share)[:, None].to(rows.dtype) * rows[second]
    rows, labels = torch.cat([rows, mixed]), torch.cat([labels, labels[first]])
    part = share.to(weights.dtype)
    weights = torch.cat([weights, part * weights[first] + (1 - part) * weights[second]])
    if lists.within_batch:
        return Lists(rows, labels), weights, first
    return Lists(rows, labels, lists.references, lists.reference_labels), weights, first


def draw_pairs(labels: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw pairs of images of a class, at most `count` per class, and the share of the first.

    Returns:
        Rows [V] and [V] of the batch, and shares float64 [V] on the CPU.
    """
    numbers = labels.cpu()
    generator = torch.Generator().manual_seed(zlib.crc32(numbers.numpy().tobytes()))
    order = torch.argsort(numbers, stable=True)
    sizes = torch.unique(numbers, return_counts=True)[1]
    pairs = [order.new_empty(0, 2)]
    for members in torch.split(order, sizes.tolist()):
        if len(members) > 2 * count:  # else a large class would have millions of pairs
            members = members[torch.randperm(len(members), generator=generator)[: 2 * count]]
        both = torch.combinations(members)
        if len(both) > count:
            both = both[torch.randperm(len(both), generator=generator)[:count]]
        pairs.append(both)
    chosen = torch.cat(pairs)
    share = torch.rand(len(chosen), generator=generator, dtype=torch.float64)
    return chosen[:, 0].to(labels.device), chosen[:, 1].to(labels.device), share


class RankBound(LossModule):
    """A smooth upper bound H of the step function, whose gradient does not vanish.

    H(t) is σ(t/τ) below 0, σ(t/τ) + ½ from 0 to δ, and a line of slope ρ above δ.

    Args:
        temperature: τ.
        slope: ρ.
        offset: δ.
    """

    def __init__(self, temperature: float, slope: float, offset: float) -> None:
        super().__init__()
        check_above_zero("temperature", temperature)
        check_range("slope", slope)
        check_range("offset", offset)
        self.temperature, self.slope, self.offset = temperature, slope, offset

    def forward(self, gap: Tensor) -> Tensor:
        """Compute H of differences of scores, of any shape."""
        inner = torch.sigmoid(gap.clamp(max=self.offset) / self.temperature)
        return inner + 0.5 * (gap >= 0).to(gap) + self.slope * (gap - self.offset).clamp(min=0)


class RoadmapLoss(BatchLoss):
    """An upper bound of 1 − AP whose gradient does not vanish, with a calibration of the scores.

    For a query with positives P and negatives N, the loss is (1 − λ)·(1 − SupAP) + λ·C with

    - SupAP = mean over k in P of rank⁺(k) / (rank⁺(k) + rank⁻(k)), where rank⁺ is the true rank of
      k among the positives (without a gradient) and rank⁻ = Σ H(s_j − s_k) over j in N. H(t) is
      σ(t/τ) below 0, σ(t/τ) + ½ from 0 to δ, and a line of slope ρ above δ.
    - C = mean over P of max(0, α − s) + mean over N of max(0, s − β), which makes the scores of
      different batches comparable.

    Call it as loss(descriptors [B, C], labels [B], weights [B] or None) -> scalar. The defaults are
    those of the paper.

    Args:
        temperature: τ.
        slope: ρ.
        offset: δ.
        calibration: λ, from 0 to 1.
        positive_margin: α; positives with larger scores do not contribute to C.
        negative_margin: β; negatives with smaller scores do not contribute to C.

    Examples:
        >>> loss = RoadmapLoss()(torch.eye(4)[[0, 0, 1, 1]], torch.tensor([5, 5, 7, 7]))
    """

    def __init__(
        self,
        temperature: float = 0.01,
        slope: float = 100.0,
        offset: float = 0.05,
        calibration: float = 0.5,
        positive_margin: float = 0.9,
        negative_margin: float = 0.6,
    ) -> None:
        super().__init__()
        check_range("calibration", calibration, 1)
        self.bound = RankBound(temperature, slope, offset)
        self.calibration = calibration
        self.positive_margin, self.negative_margin = positive_margin, negative_margin

    def losses(self, lists: Lists, positives: Tensor, start: int, stop: int) -> Tensor:  # noqa: D102
        scores, negative = lists.scores(start, stop), ~lists.same(start, stop)
        positive = lists.relevant(start, stop)

        def ratios(gap: Tensor, query: Tensor, image: Tensor) -> Tensor:
            """Compute rank⁺ / (rank⁺ + rank⁻) of each pair of a query and a positive: [R]."""
            rank = 1 + (positive[query] & (gap > 0)).sum(1)
            return rank / (rank + torch.where(negative[query], self.bound(gap), 0).sum(1))

        precision = sum_over_pairs(ratios, scores, positive) / positives
        close = torch.where(positive, (self.positive_margin - scores).clamp(min=0), 0).sum(1)
        far = torch.where(negative, (scores - self.negative_margin).clamp(min=0), 0).sum(1)
        distance = close / positives + far / negative.sum(1).clamp(min=1)
        return (1 - self.calibration) * (1 - precision) + self.calibration * distance
