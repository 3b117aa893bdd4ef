"""Choose the pairs of photos to compare, in rounds.

Each round compares every photo with one or two others. Pairs whose photos are in one group already
are left out of the next round, which saves most of the work in clean classes.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from listwise.labeling.comparisons import Pairs

Numbers = NDArray[np.int64]
_WINDOW = 8  # neighbors in the sorted list of looks that are compared
_DIFFERENT_BITS = 8  # maximum number of different bits in the looks of near-duplicates


def class_rounds(labels: Numbers, usable: Numbers, partners: int, seed: int) -> Iterator[Pairs]:
    """Yield rounds of pairs of photos of the same class: each photo gets `partners` partners.

    The photos of a class form a ring in random order. A round compares each photo with the photo
    a certain number of places further on, and each round has another number, so no pair is
    compared twice. Small classes are compared completely.

    Args:
        labels: class of each photo: [N].
        usable: numbers of the photos that can be read.
        partners: maximum number of partners per photo.
        seed: seed of the order and of the numbers.
    """
    order = usable[np.argsort(labels[usable], kind="stable")]
    rings = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
    steps = []
    for place, ring in enumerate(rings):
        generator = np.random.default_rng([seed, int(labels[ring[0]]) if len(ring) else 0])
        rings[place] = generator.permutation(ring)
        every = np.arange(1, len(ring) // 2 + 1)
        steps.append(generator.permutation(every)[: max(1, partners // 2)])
    for number in range(max((len(each) for each in steps), default=0)):
        pairs = [
            _ring_pairs(ring, int(step[number]))
            for ring, step in zip(rings, steps, strict=True)
            if number < len(step)
        ]
        yield np.concatenate(pairs)


def _ring_pairs(ring: Numbers, step: int) -> Pairs:
    count = len(ring) // 2 if 2 * step == len(ring) else len(ring)
    first = np.arange(count)
    return np.stack([ring[first], ring[(first + step) % len(ring)]], 1)


def neighbor_rounds(photos: Numbers, neighbors: Numbers) -> Iterator[Pairs]:
    """Yield one round per neighbor: photos [n] with their neighbors [n, k], nearest first.

    Neighbors that do not exist are -1.
    """
    for column in neighbors.T:
        there = column >= 0
        yield np.stack([photos[there], column[there]], 1)


def similar_looks(looks: NDArray[np.uint64], photos: Numbers) -> Pairs:
    """Return pairs of photos that may be near-duplicates, by their looks: [N], [n] -> [m, 2].

    The looks are sorted four times, each time from another bit on, and compared with those that
    follow. Copies whose looks differ in a few bits are neighbors in at least one of the lists.
    """
    found = [np.zeros((0, 2), np.int64)]
    values = looks[photos]
    for turn in (0, 16, 32, 48):
        low, high = np.uint64(turn), np.uint64((64 - turn) % 64)
        turned = values if not turn else (values << low) | (values >> high)
        order = np.argsort(turned, kind="stable")
        for step in range(1, min(_WINDOW, len(order) - 1) + 1):
            one, two = order[:-step], order[step:]
            different = (values[one] ^ values[two]).view(np.uint8).reshape(-1, 8)
            near = np.unpackbits(different, axis=1).sum(axis=1) <= _DIFFERENT_BITS
            found.append(np.stack([photos[one[near]], photos[two[near]]], 1))
    return np.concatenate(found)
