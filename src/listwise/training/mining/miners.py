"""Choose hard tuples for the triplet and contrastive losses: a query, a positive, hard negatives.

At regular intervals the current network embeds a random pool of photos, and the miner draws from it
the tuples of the updates until the next mining. The result depends only on the seed, the number of
the update, and the descriptors.
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from listwise.errors import InputError
from listwise.settings import ContrastiveSettings, TrainConfig, TripletSettings
from listwise.training.sampling import Indices, place_in_class

_BLOCK = 512  # queries compared with the pool at a time
_POOL, _DRAW, _PAIRS = 1, 2, 3  # random numbers for different purposes must differ


class Miner(Protocol):
    """Chooses tuples of photos before every update whose number is divisible by `period`.

    Attributes:
        period: updates from one mining to the next.
        per_update: tuples per update.
    """

    period: int
    per_update: int

    def photos(self, update: int) -> Indices:
        """Return the indices of the photos to embed before an update, in order: [n]."""
        ...

    def tuples(self, update: int, photos: Indices, descriptors: Tensor) -> Indices:
        """Return the tuples of the next updates, as indices of photos.

        Args:
            update: the update before which tuples are mined.
            photos: [n] those of `photos(update)` that can be read.
            descriptors: [n, C] their descriptors.

        Returns:
            [period × per_update, 2 + N]: a query, a positive and N negatives in each row.
        """
        ...


def make_miner(config: TrainConfig, labels: Indices) -> Miner | None:
    """Create the miner for the loss in the settings; None if the loss needs no tuples."""
    if config.loss == "triplet":
        return TripletMiner(config.triplet, labels, config.seed)
    if config.loss == "contrastive":
        return ContrastiveMiner(config.contrastive, labels, config.seed)
    return None


class TripletMiner:
    """Draws triplets as Gordo et al. do (IJCV 2017).

    A random image of the pool is the query. Its positives are the other images of its class in the
    pool, its negatives all images of other classes. One of its hardest triplets is drawn, among
    those whose loss is not zero.

    Shapes: `labels` [N] of all training photos.
    """

    def __init__(self, settings: TripletSettings, labels: Indices, seed: int) -> None:
        self.settings, self.labels, self.seed = settings, labels, seed
        self.per_update = settings.tuples
        self.period = _period(settings, len(labels))

    def photos(self, update: int) -> Indices:
        """Return a random pool: [n]."""
        generator = _generator(self.seed, update, _POOL)
        return np.sort(generator.permutation(len(self.labels))[: self.settings.pool])

    def tuples(self, update: int, photos: Indices, descriptors: Tensor) -> Indices:
        """Draw hard triplets: [period × per_update, 3]."""
        generator = _generator(self.seed, update, _DRAW)
        labels = torch.from_numpy(self.labels[photos]).to(descriptors.device)
        gaps, triplets = hardest_triplets(descriptors, labels, self.settings.hardest)
        possible = gaps.isfinite()
        # ½ (margin + ‖q − p‖² − ‖q − n‖²) = ½ margin + gap for unit rows.
        with_loss = possible
        if self.settings.form == "margin":
            with_loss = possible & (gaps > -self.settings.margin / 2)
        # If every triplet has a loss of zero, draw any of them, so that training continues.
        counts = (with_loss if with_loss.any() else possible).sum(1).cpu().numpy()
        queries = np.flatnonzero(counts)
        if len(queries) == 0:
            raise InputError(
                f"a pool of {len(photos)} photos has no triplet: it needs two photos of one class "
                "and one of another; increase `triplet.pool`"
            )
        drawn = generator.choice(queries, self.period * self.per_update)
        which = (generator.random(len(drawn)) * counts[drawn]).astype(np.int64)
        rows: Indices = np.column_stack([drawn, triplets.cpu().numpy()[drawn, which]])
        return photos[rows]


class ContrastiveMiner:
    """Chooses tuples as Radenović et al. do (TPAMI 2018).

    Every photo has one positive for the whole run. Random photos are queries. Their negatives are
    the nearest photos of a random pool, each of a different class.

    Shapes: `labels` [N] of all training photos.
    """

    def __init__(self, settings: ContrastiveSettings, labels: Indices, seed: int) -> None:
        self.settings, self.labels, self.seed = settings, labels, seed
        self.per_update = settings.tuples
        self.period = _period(settings, len(labels))
        self.positives = fixed_positives(labels, _generator(seed, 0, _PAIRS))

    def photos(self, update: int) -> Indices:
        """Return the queries and the pool: [n]."""
        return np.union1d(*self._draw(update))

    def tuples(self, update: int, photos: Indices, descriptors: Tensor) -> Indices:
        """Return queries, their positives and nearest negatives: [period × per_update, 2 + N]."""
        queries, pool = (drawn[np.isin(drawn, photos)] for drawn in self._draw(update))
        if len(queries) == 0:
            raise InputError("no query for mining: none of the drawn training photos can be read")
        labels = torch.from_numpy(self.labels[photos]).to(descriptors.device)
        found = nearest_of_other_classes(
            descriptors,
            labels,
            torch.from_numpy(np.searchsorted(photos, queries)),
            torch.from_numpy(np.searchsorted(photos, pool)),
            self.settings.negatives,
        )
        tuples = np.column_stack([queries, self.positives[queries], photos[found.cpu().numpy()]])
        # Repeat queries if the updates need more tuples than there are photos.
        return tuples[np.arange(self.period * self.per_update) % len(tuples)]

    def _draw(self, update: int) -> tuple[Indices, Indices]:
        generator = _generator(self.seed, update, _POOL)
        queries = generator.permutation(np.flatnonzero(self.positives >= 0))
        pool = generator.permutation(len(self.labels))[: self.settings.pool]
        return queries[: self.period * self.per_update], pool


def hardest_triplets(descriptors: Tensor, labels: Tensor, hardest: int) -> tuple[Tensor, Tensor]:
    """Find, for each image of a pool as the query, its h triplets with the largest loss.

    Args:
        descriptors: [n, C] unit rows.
        labels: [n].
        hardest: the number h of triplets; n at most.

    Returns:
        The gaps q·n − q·p, largest first, −∞ where there is no triplet: [n, h]; and the rows of the
        positives and negatives: [n, h, 2].
    """
    hardest = min(hardest, len(labels))
    # The triplet of the i-th farthest positive and the j-th nearest negative is the easiest of at
    # least i·j triplets, so only triplets with i·j <= h can be among the h hardest.
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
    """Find the nearest images of a pool to each query, all of different classes.

    None of them has the class of the query. Shapes: descriptors [n, C] unit rows, labels [n], rows
    of the queries [Q] and of the pool [P] -> rows of the pool, nearest first: [Q, count].
    """
    queries, pool = queries.to(labels.device), pool.to(labels.device)
    if len(torch.unique(labels[pool])) <= count:
        raise InputError(
            f"a pool of {len(pool)} photos has too few classes for {count} negatives of different "
            "classes: increase `contrastive.pool`, or decrease `contrastive.negatives`"
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
    """Draw another random image of its class for each image; −1 if there is none: [N] -> [N]."""
    place = place_in_class(labels)
    _, position, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    size, start = sizes[position], (np.cumsum(sizes) - sizes)[position]
    step = 1 + (generator.random(len(labels)) * (size - 1)).astype(np.int64)
    positives = np.argsort(labels, kind="stable")[start + (place + step) % size]
    return np.where(size > 1, positives, -1)


def _period(settings: TripletSettings | ContrastiveSettings, photos: int) -> int:
    """Return the updates between two minings; a small set has at most one tuple per photo."""
    return max(1, min(settings.refresh, photos) // settings.tuples)


def _generator(seed: int, update: int, purpose: int) -> np.random.Generator:
    # Four numbers, so that the seeds differ from those of batches (two) and crops (three).
    return np.random.default_rng([seed, update, 0, purpose])
