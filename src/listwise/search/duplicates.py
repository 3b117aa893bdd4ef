"""Find photos that are in an index more than once: exact copies and near-duplicates."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from listwise.data.images import ImageError
from listwise.errors import InputError
from listwise.search.entries import Entry, Keys, entry_key, in_parts
from listwise.search.hits import nearest_others
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
    for part in in_parts(store.keys().tolist(), _BLOCK):
        entries = list(store.get(part).values())
        digests = [(entry_key(entry.digest), entry.key) for entry in entries if entry.digest]
        known.append(np.array(digests, np.int64).reshape(-1, 2))
        keys = np.array([entry.key for entry in entries], np.int64)
        near = _near_pairs(store, keys, threshold, on_progress)
        for one, other, score in _verified(store, near, groups, reranker, on_progress):
            groups.join(one, other, score)
        on_progress(len(entries))
    for one, other in _same_content(np.concatenate(known)):
        groups.join(one, other, 1.0)
    members: dict[int, Entry] = {}
    for part in in_parts(list(groups), _BLOCK):
        members.update(store.get(part))
        on_progress(0)
    found = [
        _group([members[key] for key in group.keys if key in members], group.score)
        for group in set(groups.values())
    ]
    kept = [group for group in found if len(group.entries) > 1]
    return sorted(kept, key=lambda group: (-len(group.entries), -group.score, group.entries[0].id))


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
        for own, found in zip(part.tolist(), nearest_others(store, part, NEAREST), strict=True):
            for other, score in found:
                if score >= threshold:
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
            joined = one in groups and groups[one] is groups.get(other)
            if joined or not {one, other} <= entries.keys():
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


@dataclass(eq=False)
class _Joined:
    """Keys of entries that are duplicates of each other, and the lowest score that joins them."""

    keys: list[int]
    score: float = 1.0


class _Groups(dict[int, _Joined]):
    """The group of each entry that has duplicates, by its key."""

    def join(self, one: int, other: int, score: float) -> None:
        """Put the groups of two entries together."""
        found = [self.setdefault(key, _Joined([key])) for key in (one, other)]
        small, large = sorted(found, key=lambda group: len(group.keys))
        if small is not large:
            large.keys += small.keys
            large.score = min(large.score, small.score, score)
            self.update(dict.fromkeys(small.keys, large))
