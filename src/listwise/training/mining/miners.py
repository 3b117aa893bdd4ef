"""Hard tuples for the losses that need them: a query, a positive and hard negatives.

Every so many tuples the photos of a random pool are embedded by the network as it is, and the
tuples of the updates until the next time are drawn from what is hard for it. What is drawn depends
on the seed and the number of the update alone, and on the descriptors.
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from listwise.errors import InputError
from listwise.settings import ContrastiveSettings, TrainConfig, TripletSettings
from listwise.training.sampling import Indices, place_in_class

_BLOCK = 512  # queries compared with the pool at a time
_POOL, _DRAW, _PAIRS = 1, 2, 3  # what random numbers are for


class Miner(Protocol):
    """Chooses tuples of photos; there is a mining before every update divisible by `period`."""

    period: int
    per_update: int

    def photos(self, update: int) -> Indices:
        """Photos whose descriptors the mining before an update needs: [n], rising."""
        ...

    def tuples(self, update: int, photos: Indices, descriptors: Tensor) -> Indices:
        """Photos of the tuples of the next updates: [period × per_update, 2 + N].

        `photos` [n] are those of `photos(update)` that can be read, `descriptors` [n, C] theirs.
        """
        ...


def make_miner(config: TrainConfig, labels: Indices) -> Miner | None:
    """The miner of the config's loss; None if it takes whole batches."""
    if config.loss == "triplet":
        return TripletMiner(config.triplet, labels, config.seed)
    if config.loss == "contrastive":
        return ContrastiveMiner(config.contrastive, labels, config.seed)
    return None


class TripletMiner:
    """Triplets as Gordo et al. draw them (IJCV 2017).

    A query is drawn from the pool, and one of its hardest triplets that have a loss: any other
    image of its class in the pool as the positive, any of another class as the negative. `labels`
    [N] are those of all training photos.
    """

    def __init__(self, settings: TripletSettings, labels: Indices, seed: int) -> None:
        self.settings, self.labels, self.seed = settings, labels, seed
        self.per_update = settings.tuples
        self.period = _period(settings, len(labels))

    def photos(self, update: int) -> Indices:
        """A random pool."""
        generator = _generator(self.seed, update, _POOL)
        return np.sort(generator.permutation(len(self.labels))[: self.settings.pool])

    def tuples(self, update: int, photos: Indices, descriptors: Tensor) -> Indices:
        """Random triplets, hard ones: [period × per_update, 3]."""
        generator = _generator(self.seed, update, _DRAW)
        labels = torch.from_numpy(self.labels[photos]).to(descriptors.device)
        gaps, triplets = hardest_triplets(descriptors, labels, self.settings.hardest)
        possible = gaps.isfinite()
        # ½ (margin + ‖q − p‖² − ‖q − n‖²) = ½ margin + gap for unit rows.
        with_loss = possible
        if self.settings.form == "margin":
            with_loss = possible & (gaps > -self.settings.margin / 2)
        # Where no triplet of any query has a loss, there is nothing to learn; training continues.
        counts = (with_loss if with_loss.any() else possible).sum(1).cpu().numpy()
        queries = np.flatnonzero(counts)
        if len(queries) == 0:
            raise InputError(
                f"no triplet in a pool of {len(photos)} photos: no class has two of them beside "
                "another class; raise `triplet.pool`"
            )
        drawn = generator.choice(queries, self.period * self.per_update)
        which = (generator.random(len(drawn)) * counts[drawn]).astype(np.int64)
        rows: Indices = np.column_stack([drawn, triplets.cpu().numpy()[drawn, which]])
        return photos[rows]


class ContrastiveMiner:
    """Tuples as Radenović et al. choose them (TPAMI 2018).

    Every photo has one positive for the whole run. Random photos are queries; the negatives are the
    nearest of a random pool, each of another class than the query and the other negatives. `labels`
    [N] are those of all training photos.
    """

    def __init__(self, settings: ContrastiveSettings, labels: Indices, seed: int) -> None:
        self.settings, self.labels, self.seed = settings, labels, seed
        self.per_update = settings.tuples
        self.period = _period(settings, len(labels))
        self.positives = fixed_positives(labels, _generator(seed, 0, _PAIRS))

    def photos(self, update: int) -> Indices:
        """Queries and pool."""
        return np.union1d(*self._draw(update))

    def tuples(self, update: int, photos: Indices, descriptors: Tensor) -> Indices:
        """Queries with their positives and nearest negatives: [period × per_update, 2 + N]."""
        queries, pool = (drawn[np.isin(drawn, photos)] for drawn in self._draw(update))
        if len(queries) == 0:
            raise InputError("no photo of the training set can be a query: none can be read")
        labels = torch.from_numpy(self.labels[photos]).to(descriptors.device)
        found = nearest_of_other_classes(
            descriptors,
            labels,
            torch.from_numpy(np.searchsorted(photos, queries)),
            torch.from_numpy(np.searchsorted(photos, pool)),
            self.settings.negatives,
        )
        tuples = np.column_stack([queries, self.positives[queries], photos[found.cpu().numpy()]])
        # An update may hold more tuples than there are photos: they are queries again.
        return tuples[np.arange(self.period * self.per_update) % len(tuples)]

    def _draw(self, update: int) -> tuple[Indices, Indices]:
        generator = _generator(self.seed, update, _POOL)
        queries = generator.permutation(np.flatnonzero(self.positives >= 0))
        pool = generator.permutation(len(self.labels))[: self.settings.pool]
        return queries[: self.period * self.per_update], pool


def hardest_triplets(descriptors: Tensor, labels: Tensor, hardest: int) -> tuple[Tensor, Tensor]:
    """The h triplets of largest loss for each image of a pool as the query; h is n at most.

    Shapes: unit rows [n, C], labels [n] -> gaps q·n − q·p [n, h], largest first, −∞ where there is
    no triplet; and the rows of the positives and negatives [n, h, 2].
    """
    hardest = min(hardest, len(labels))
    # With the i-th farthest positive and the j-th nearest negative there are i j triplets at least
    # as hard as theirs, itself among them: only those with i j <= h can be of the h hardest.
    places = torch.arange(1, hardest + 1, device=labels.device)
    of_positive, of_negative = torch.nonzero(places[:, None] * places <= hardest).T
    gaps, pairs = [], []
    for query in torch.split(torch.arange(len(labels), device=labels.device), _BLOCK):
        scores = descriptors[query] @ descriptors.T
        same = labels[query, None] == labels
        negative = scores.masked_fill(same, -torch.inf).topk(hardest)
        same[torch.arange(len(query), device=labels.device), query] = False
        positive = scores.masked_fill(~same, torch.inf).topk(hardest, largest=False)
        best = (negative.values[:, of_negative] - positive.values[:, of_positive]).topk(hardest)
        gaps.append(best.values)
        far = positive.indices.gather(1, of_positive[best.indices])
        near = negative.indices.gather(1, of_negative[best.indices])
        pairs.append(torch.stack([far, near], 2))
    return torch.cat(gaps), torch.cat(pairs)


def nearest_of_other_classes(
    descriptors: Tensor, labels: Tensor, queries: Tensor, pool: Tensor, count: int
) -> Tensor:
    """The nearest images of a pool to each query, one of a class and none of the query's.

    Shapes: unit rows [n, C], labels [n], rows of queries [Q] and of the pool [P] -> rows of the
    pool, nearest first: [Q, count].
    """
    queries, pool = queries.to(labels.device), pool.to(labels.device)
    if len(torch.unique(labels[pool])) <= count:
        raise InputError(
            f"a pool of {len(pool)} photos has too few classes for {count} negatives of different "
            "classes: raise `contrastive.pool`, or lower `contrastive.negatives`"
        )
    found = []
    for block in torch.split(queries, _BLOCK):
        scores = descriptors[block] @ descriptors[pool].T
        classes = labels[block]
        rows = []
        for _ in range(count):
            scores = scores.masked_fill(classes[:, None] == labels[pool], -torch.inf)
            rows.append(pool[scores.argmax(1)])
            classes = labels[rows[-1]]
        found.append(torch.stack(rows, 1))
    return torch.cat(found)


def fixed_positives(labels: Indices, generator: np.random.Generator) -> Indices:
    """Another random image of its class for each image, −1 where there is none: [N]."""
    place = place_in_class(labels)
    _, position, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    size, start = sizes[position], (np.cumsum(sizes) - sizes)[position]
    step = 1 + (generator.random(len(labels)) * (size - 1)).astype(np.int64)
    positives = np.argsort(labels, kind="stable")[start + (place + step) % size]
    return np.where(size > 1, positives, -1)


def _period(settings: TripletSettings | ContrastiveSettings, photos: int) -> int:
    """Updates from one mining to the next: in a small set, no more tuples than photos."""
    return max(1, min(settings.refresh, photos) // settings.tuples)


def _generator(seed: int, update: int, purpose: int) -> np.random.Generator:
    # With four numbers, for batches take two and crops three.
    return np.random.default_rng([seed, update, 0, purpose])
