"""Find photos that are in an index more than once: files with the same content, and copies."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from listwise.errors import InputError
from listwise.search.alignment import (
    WINDOWS,
    Float32,
    Picture,
    compare_aligned,
    mirror_signatures,
    read_picture,
    signatures,
)
from listwise.search.entries import Entry, Keys, in_parts
from listwise.search.filling import current_copies, thumbnail_from_photo
from listwise.search.store import Store

THRESHOLD = 0.8
_CANDIDATE = 0.75  # minimum similarity of the signatures of two photos that are aligned
_BLOCK = 500  # photos whose signatures are computed together
_SCORES = 1 << 25  # similarities of signatures that are in memory
_TOGETHER = 256  # pairs that are aligned together

Pictures = dict[int, Picture]
"""Pictures by the keys of their entries."""


@dataclass(frozen=True)
class DuplicateGroup:
    """Entries that show the same photo, or one entry of several files with the same content.

    Attributes:
        entries: the entries, the best one first; their `copies` are further files.
        exact: whether all files have the same content.
        score: the lowest score of a pair that joins the group; 1 for the same content.
        reason: why the first entry is the best one.
    """

    entries: tuple[Entry, ...]
    exact: bool
    score: float
    reason: str

    @property
    def files(self) -> int:
        """The number of files."""
        return sum(1 + len(entry.copies) for entry in self.entries)


def find_duplicates(
    store: Store,
    threshold: float = THRESHOLD,
    mirrored: bool = False,
    on_progress: Callable[[int], object] = lambda count: None,
) -> list[DuplicateGroup]:
    """Find groups of duplicates, the largest group first.

    Thumbnails are compared, or the photos of entries without them. Two photos are duplicates if
    one of them, moved and scaled a little, has the details of the other. Duplicates of duplicates
    are in one group. Memory grows by about 1.5 kB per photo.

    Args:
        store: the store of an index of N entries.
        threshold: the minimum score of duplicates, above 0 and at most 1.
        mirrored: also find photos that were mirrored.
        on_progress: called with the number of photos that were just read, then again with the
            number that were just compared, 2 N in all, and with 0 in between; an exception that it
            raises stops the search.
    """
    if not 0 < threshold <= 1:
        raise InputError(f"`threshold` must be above 0 and at most 1, not {threshold:g}")
    groups = _Groups()
    with ThreadPoolExecutor() as pool:

        def pictures(keys: Sequence[int]) -> Pictures:
            on_progress(0)
            return _read_pictures(store, pool, keys)

        whole: Pictures = {}
        for part in in_parts(store.keys().tolist(), _BLOCK):
            for key, picture in pictures(part).items():
                whole[key] = signatures(picture.pixels[None], WINDOWS[0])[0]
            on_progress(len(part))
        keys, rows = np.array([*whole], np.int64), np.array([*whole.values()], np.float32)
        del whole
        ways = [(rows, False)] + [(mirror_signatures(rows), True)] * (mirrored and len(rows) > 0)
        for part in in_parts(keys.tolist(), max(1, min(_BLOCK, _SCORES // max(1, len(keys))))):
            own = pictures(part)
            for others, mirror in ways:
                for some in in_parts(_candidates(own, keys, others), _TOGETHER):
                    new = [pair for pair in some.tolist() if not groups.joined(*pair[:2])]
                    known = own | pictures([key for _, key, _ in new if key not in own])
                    for one, other, score in _compare(known, new, mirror):
                        if score >= threshold:
                            groups.join(one, other, score)
            on_progress(len(part))
    return _finished(store, groups)


def _read_pictures(store: Store, pool: ThreadPoolExecutor, keys: Sequence[int]) -> Pictures:
    """The pictures of entries; those without a thumbnail and a photo are left out."""
    photos = store.contents("thumbnail", keys)
    lacking = store.get([key for key in keys if key not in photos])
    photos |= dict(zip(lacking, pool.map(thumbnail_from_photo, lacking.values()), strict=True))
    photos = {key: photo for key, photo in photos.items() if photo}
    return dict(zip(photos, pool.map(read_picture, photos.values()), strict=True))


def _candidates(own: Pictures, keys: Keys, others: Float32) -> Keys:
    """The keys of pairs with similar signatures, and the number of the most similar window: [n, 3].

    Args:
        own: pictures of which any window may be similar.
        keys: the keys of all entries [N].
        others: the signatures of their whole pictures [N, d].
    """
    if not own:
        return np.zeros((0, 3), np.int64)
    pictures = np.stack([picture.pixels for picture in own.values()])
    best = np.full((len(own), len(keys)), -1, np.float32)
    number = np.zeros(best.shape, np.int8)
    for i, window in enumerate(WINDOWS):
        likeness = signatures(pictures, window) @ others.T
        better = likeness > best
        np.copyto(best, likeness, where=better)
        np.copyto(number, i, where=better)
    places = np.nonzero(best >= _CANDIDATE)
    ones = np.array([*own], np.int64)[places[0]]
    return np.stack([ones, keys[places[1]], number[places]], axis=1)


def _compare(
    pictures: Pictures, pairs: Sequence[Sequence[int]], mirror: bool
) -> list[tuple[int, int, float]]:
    """Align the pictures of pairs of keys from a window on: the keys with their scores."""
    pairs = [pair for pair in pairs if pictures.keys() >= {*pair[:2]}]  # none was removed meanwhile
    if not pairs:
        return []
    ones, others, windows = zip(*pairs, strict=True)
    first, second = (np.stack([pictures[key].pixels for key in keys]) for keys in (ones, others))
    second = second[..., ::-1] if mirror else second
    shapes = np.array([pictures[one].shape / pictures[other].shape for one, other, _ in pairs])
    scores = compare_aligned(first, second, WINDOWS[[*windows]], shapes).tolist()
    return [*zip(ones, others, scores, strict=True)]


def _finished(store: Store, groups: "_Groups") -> list[DuplicateGroup]:
    """The groups with their entries, and the entries of several files with the same content."""
    for row in chain.from_iterable(store.rows(["copies"])):
        if row["copies"] != "[]":
            groups.setdefault(row["key"], _Joined([row["key"]]))
    members: dict[int, Entry] = {}
    for part in in_parts(list(groups), _BLOCK):
        for key, entry in store.get(part).items():
            members[key] = replace(entry, copies=current_copies(entry))
    found = [
        _group([members[key] for key in group.keys if key in members], group.score)
        for group in set(groups.values())
    ]
    kept = [group for group in found if group.files > 1]
    return sorted(kept, key=lambda group: (-group.files, -group.score, group.entries[0].id))


def _group(entries: Sequence[Entry], score: float) -> DuplicateGroup:
    """A group of entries, the best one first."""
    ranked = sorted(entries, key=lambda entry: ([-value for value, _ in _merits(entry)], entry.id))
    reason = "same content"
    if len(ranked) > 1:
        first, second = map(_merits, ranked[:2])
        better = (name for (a, name), (b, _) in zip(first, second, strict=True) if a > b)
        reason = next(better, "first by name")
    exact = len({entry.digest for entry in entries}) == 1 and bool(entries[0].digest)
    return DuplicateGroup(tuple(ranked), exact, score, reason)


def _merits(entry: Entry) -> list[tuple[int, str]]:
    """What makes a photo the best one of a group: numbers, the most important first, and names."""
    path = Path(entry.path)
    size = path.stat().st_size if entry.path and path.exists() else 0
    return [
        (int(size > 0), "its file exists"),
        (entry.width * entry.height, "most pixels"),
        (size, "largest file"),
    ]


@dataclass(eq=False)
class _Joined:
    """Keys of entries that are duplicates of each other, and the lowest score that joins them."""

    keys: list[int]
    score: float = 1.0


class _Groups(dict[int, _Joined]):
    """The group of each entry that has duplicates, by its key."""

    def joined(self, one: int, other: int) -> bool:
        """Whether two entries are the same or in one group."""
        return one == other or (one in self and self[one] is self.get(other))

    def join(self, one: int, other: int, score: float) -> None:
        """Put the groups of two entries together."""
        found = [self.setdefault(key, _Joined([key])) for key in (one, other)]
        small, large = sorted(found, key=lambda group: len(group.keys))
        if small is not large:
            large.keys += small.keys
            large.score = min(large.score, small.score, score)
            self.update(dict.fromkeys(small.keys, large))
