"""Find photos that are in an index more than once: exact copies and near-duplicates."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from listwise.data.images import ImageError
from listwise.errors import InputError
from listwise.search.entries import Entry, Keys, entry_key, in_parts
from listwise.search.store import Store

if TYPE_CHECKING:
    from listwise.local.rerank import Reranker

THRESHOLD = 0.95
NEAREST = 20  # neighbors per photo; larger groups are joined from several photos
_BLOCK = 1000  # entries that are read together
_QUERIES = 64  # photos that are searched together; other searches wait for them


@dataclass(frozen=True)
class DuplicateGroup:
    """Entries that show the same photo.

    Attributes:
        entries: two or more entries; the photo with most pixels comes first.
        exact: whether all files have the same content.
        score: the lowest score of a pair that joins the group; 1 for exact copies.
    """

    entries: tuple[Entry, ...]
    exact: bool
    score: float


def find_duplicates(
    store: Store,
    threshold: float = THRESHOLD,
    reranker: "Reranker | None" = None,
    on_progress: Callable[[int], object] = lambda count: None,
) -> list[DuplicateGroup]:
    """Find groups of duplicates, the largest group first.

    Two photos are duplicates if their content is the same, or if their score reaches a threshold
    and their local features agree on one geometry. Duplicates of duplicates are in one group.
    Photos are searched in blocks: memory grows by 16 bytes per photo, and with the duplicates.

    Args:
        store: the store of an index of N entries.
        threshold: the minimum score of near-duplicates, from -1 to 1.
        reranker: verifies the geometry of near-duplicates whose photos can be read; None skips
            this step.
        on_progress: called with the number of photos that were just searched, and with 0 in
            between; an exception that it raises stops the search.
    """
    if not -1 <= threshold <= 1:
        raise InputError(f"`threshold` must be from -1 to 1, not {threshold:g}")
    groups = _Groups()
    known = [np.zeros((0, 2), np.int64)]
    for entries in _pages(store):
        digests = [(entry_key(entry.digest), entry.key) for entry in entries if entry.digest]
        known.append(np.array(digests, np.int64).reshape(-1, 2))
        keys = np.array([entry.key for entry in entries], np.int64)
        near = _near_pairs(store, keys, threshold, on_progress)
        for one, other, score in _verified(store, near, groups, reranker, on_progress):
            groups.join(one, other, score)
        on_progress(len(entries))
    for one, other in _same_content(np.concatenate(known)):
        groups.join(one, other, 1.0)
    sets = groups.sets()
    members: dict[int, Entry] = {}
    for part in in_parts([key for keys, _ in sets for key in keys], _BLOCK):
        members.update(store.get(part))
        on_progress(0)
    found = [
        _group([members[key] for key in keys if key in members], score) for keys, score in sets
    ]
    kept = [group for group in found if len(group.entries) > 1]
    return sorted(kept, key=lambda group: (-len(group.entries), -group.score, group.entries[0].id))


def _pages(store: Store) -> Iterator[list[Entry]]:
    start = 0
    while found := store.page(start, _BLOCK):
        yield found
        start += len(found)


def _same_content(known: Keys) -> Iterator[tuple[int, int]]:
    """Pairs of entries with equal digests, from numbers of digests and keys [n, 2]."""
    ordered = known[np.argsort(known[:, 0], kind="stable")]
    equal = np.flatnonzero(ordered[1:, 0] == ordered[:-1, 0])
    return ((int(ordered[i, 1]), int(ordered[i + 1, 1])) for i in equal)


def _near_pairs(
    store: Store, keys: Keys, threshold: float, on_progress: Callable[[int], object]
) -> Iterator[tuple[int, int, float]]:
    """Pairs of a block of entries and their neighbors whose scores reach the threshold."""
    for part in in_parts(keys, _QUERIES):
        on_progress(0)
        scores, found = store.search(store.vectors(part), NEAREST + 1)
        for own, row, values in zip(part.tolist(), found.tolist(), scores.tolist(), strict=True):
            for other, score in zip(row, values, strict=True):
                if other >= 0 and other != own and score >= threshold:
                    yield own, other, min(score, 1.0)


def _verified(
    store: Store,
    pairs: Iterable[tuple[int, int, float]],
    groups: "_Groups",
    reranker: "Reranker | None",
    on_progress: Callable[[int], object],
) -> Iterator[tuple[int, int, float]]:
    """The pairs whose photos agree in geometry; a pair that is joined already is not compared."""
    if reranker is None:
        yield from pairs
        return
    from listwise.local.rerank import MINIMUM
    from listwise.local.verification import verify

    # Each pair is found from both of its photos.
    wanted = {(min(one, other), max(one, other)): score for one, other, score in pairs}
    for part in in_parts(list(wanted.items()), _BLOCK):
        entries = store.get(sorted({key for pair, _ in part for key in pair}))
        for (one, other), score in part:
            on_progress(0)
            if groups.root(one) == groups.root(other) or not {one, other} <= set(entries):
                continue
            try:
                first, second = reranker.features(entries[one]), reranker.features(entries[other])
            except ImageError:
                yield one, other, score  # the score alone decides
                continue
            if verify(first, second).inliers >= MINIMUM:
                yield one, other, score


def _group(entries: Sequence[Entry], score: float) -> DuplicateGroup:
    entries = sorted(entries, key=lambda entry: (-entry.width * entry.height, entry.id))
    exact = len({entry.digest for entry in entries}) == 1 and bool(entries[0].digest)
    return DuplicateGroup(tuple(entries), exact, score)


class _Groups:
    """Sets of keys that grow together (union-find); only keys of duplicates are held."""

    def __init__(self) -> None:
        self._above: dict[int, int] = {}
        self._scores: dict[int, float] = {}

    def root(self, key: int) -> int:
        while key in self._above:
            above = self._above[key]
            if above in self._above:
                self._above[key] = self._above[above]
            key = above
        return key

    def join(self, one: int, other: int, score: float) -> None:
        first, second = self.root(one), self.root(other)
        if first == second:
            return
        self._above[second] = first
        lowest = min(self._scores.pop(second, 1.0), self._scores.get(first, 1.0), score)
        self._scores[first] = lowest

    def sets(self) -> list[tuple[list[int], float]]:
        members: dict[int, list[int]] = defaultdict(list)
        for key in self._above:
            members[self.root(key)].append(key)
        return [([root, *keys], self._scores[root]) for root, keys in members.items()]
