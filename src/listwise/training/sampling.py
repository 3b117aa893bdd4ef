"""Draw the images of a batch: random ones of every class, or mined tuples of hard ones.

The triplet and contrastive losses are trained on tuples: a query, a positive, hard negatives. At
regular intervals the current network embeds a random pool of photos, and a miner draws from it the
tuples of the updates until the next mining. All draws depend only on the seed, the number of the
update, and the descriptors.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from listwise.errors import InputError
from listwise.settings import ContrastiveSettings, TrainConfig, TripletSettings

Indices = npt.NDArray[np.int64]

_BLOCK = 512  # queries compared with the pool at a time
_POOL, _DRAW, _PAIRS = 1, 2, 3  # random numbers for different purposes must differ


def draw_batch(
    labels: npt.NDArray[np.int64],
    batch_size: int,
    seed: int,
    update: int,
    classes_per_batch: int | None = None,
    levels: Indices | None = None,
) -> Indices:
    """Draw the indices of the images of one batch, without repetition.

    Every class has two images in the batch (one, if it has only one). The rest is drawn uniformly
    from all images, so large classes have more (section 4.2, "Class sampling").

    If `classes_per_batch` is set, or the batch is too small for two images of every class, only
    some random classes take part. Classes with a single image are then chosen last, because a
    query of such a class has no positive. If `levels` are given, a class is chosen together with
    another class of its group, and groups in the same way, so that queries have positives at every
    level.

    Shapes: labels [N], levels [K, L] with a row per class -> [B] in random order. B is
    `batch_size`, or less if the classes that take part have fewer images.
    """
    generator = np.random.default_rng([seed, update])
    shuffled = generator.permutation(len(labels))
    classes, sizes = np.unique(labels, return_counts=True)
    order = generator.permutation(len(classes))
    order = order[np.argsort(sizes[order] == 1, kind="stable")]
    if levels is not None:
        several = sizes[order] > 1
        parts = (order[several], order[~several])
        groups = np.asarray(levels)[classes]
        order = np.concatenate([_with_relatives(part, groups, generator) for part in parts])
    classes = classes[order[: min(classes_per_batch or len(classes), max(1, batch_size // 2))]]
    shuffled = shuffled[np.isin(labels[shuffled], classes)]
    paired = place_in_class(labels[shuffled]) < 2
    # In this order the remaining images of small classes come late, so it is shuffled again.
    rest = generator.permutation(shuffled[~paired])
    return generator.permutation(np.concatenate([shuffled[paired], rest])[:batch_size])


def _with_relatives(order: Indices, levels: Indices, generator: np.random.Generator) -> Indices:
    """Reorder classes so that the first ones have others of their groups beside them.

    From fine to coarse groups, each class is joined with another class of its group, each of these
    pairs with a pair of another group, and so on. What is left over is joined with the last pair.

    Shapes: order [k] of rows of levels [K, L] -> [k].
    """
    units = order.reshape(-1, 1).tolist()
    for level in range(levels.shape[1] - 2, -1, -1):  # the last level is the class itself
        members: dict[int, list[list[int]]] = {}
        # Units of one finer group lie apart, so that different ones are joined.
        finer = levels[[unit[0] for unit in units], level + 1]
        for i in np.argsort(place_in_class(finer), kind="stable"):
            members.setdefault(int(levels[units[i][0], level]), []).append(units[i])
        joined = []
        for alike in members.values():
            starts = range(0, max(1, len(alike) - 1), 2)
            ends = [*starts[1:], len(alike)]
            pairs = [alike[start:end] for start, end in zip(starts, ends, strict=True)]
            joined += [[k for unit in pair for k in unit] for pair in pairs]
        units = [joined[i] for i in generator.permutation(len(joined))]
    return np.array([k for unit in units for k in unit], dtype=np.int64)


def place_in_class(labels: npt.NDArray[np.int64]) -> Indices:
    """Count, for each entry, the earlier entries with the same label: [N] -> [N]."""
    order = np.argsort(labels, kind="stable")
    grouped = labels[order]
    starts = np.flatnonzero(np.r_[True, grouped[1:] != grouped[:-1]])
    lengths = np.diff(np.r_[starts, len(labels)])
    place = np.empty(len(labels), dtype=np.int64)
    place[order] = np.arange(len(labels)) - np.repeat(starts, lengths)
    return place


def make_miner(config: TrainConfig, labels: Indices) -> "Miner | None":
    """Create the miner for the loss in the settings; None if the loss needs no tuples."""
    if isinstance(config.mined, TripletSettings):
        return TripletMiner(config.mined, labels, config.seed)
    return ContrastiveMiner(config.mined, labels, config.seed) if config.mined else None


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


Miner = TripletMiner | ContrastiveMiner
"""Chooses tuples before every update whose number is divisible by its `period`.

`per_update` is the number of tuples per update. `photos(update)` are the photos to embed, in order;
`tuples(update, photos, descriptors)` are the tuples of the next updates, from those of these photos
that can be read: [period × per_update, 2 + N], a query, a positive and N negatives in each row.
"""


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
