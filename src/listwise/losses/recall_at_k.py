"""The Recall@k surrogate (Patel et al., CVPR 2022)."""

import zlib
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from listwise.errors import InputError
from listwise.losses.base import PrecisionLoss
from listwise.losses.checks import check_count
from listwise.losses.lists import Lists
from listwise.losses.pairs import sum_over_pairs


class RecallAtKLoss(PrecisionLoss):
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
        for name, value in (("temperature", temperature), ("k_temperature", k_temperature)):
            if not value > 0:
                raise InputError(f"{name} must be above zero, not {value}")
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

    def precision(self, lists: Lists, positives: Tensor, start: int, stop: int) -> Tensor:  # noqa: D102
        recalls = partial(self._recalls, lists=lists, start=start, stop=stop)
        scores = lists.scores(start, stop)
        return sum_over_pairs(recalls, scores, lists.relevant(start, stop)) / positives

    def _recalls(
        self, scores: Tensor, query: Tensor, image: Tensor, lists: Lists, start: int, stop: int
    ) -> Tensor:
        """Compute how surely each image is among the first k, averaged over all k: [R]."""
        ahead = torch.sigmoid((scores[query] - scores[query, image][:, None]) / self.temperature)
        # Neither the image itself nor the query is ahead of it.
        ahead = lists.without_self(ahead.scatter(1, image[:, None], 0.0), start, stop, 0.0, query)
        count = ahead.sum(1)
        recalls = [torch.sigmoid((k - 1 - count) / self.k_temperature) for k in self.ks]
        return torch.stack(recalls).mean(0)

    def extra_repr(self) -> str:  # noqa: D102
        temperatures = f"temperature={self.temperature}, k_temperature={self.k_temperature}"
        return f"ks={self.ks}, {temperatures}, virtual={self.virtual}"


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
