"""Compare photos round by round until those that show the same thing are connected."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from listwise.data import Images, LabelledImages
from listwise.descriptors import Model
from listwise.errors import InputError
from listwise.labeling.candidates import (
    Numbers,
    Vectors,
    class_rounds,
    describe_photos,
    few_classes,
    nearest,
    nearest_of_class,
    neighbor_rounds,
    similar_looks,
)
from listwise.labeling.comparisons import MatchRecord, Pairs, unique_pairs
from listwise.labeling.result import Progress
from listwise.labeling.store import PhotoStore, extract_photos
from listwise.local.workers import Workers
from listwise.settings import LabelSettings

LARGE = 3  # photos of a group that a single weak match may not join to another such group
_NEAREST = 6  # partners of the same class that are chosen by descriptors, if there is a model
_AROUND = 6  # matches of each photo of a doubtful match that are compared across it
_COPY = 0.5  # share of the features of near-duplicates that are inliers
_HUBS = 3  # photos with most matches that stand for a class
_SIMILAR = 10  # photos of other classes that each class is compared with, if there is a model


@dataclass(frozen=True, eq=False)
class PhotoMatches:
    """Everything that was measured about N photos.

    Attributes:
        store: local features.
        record: number of inliers of the pairs that were compared.
        labels: class of each photo: [N]; all zero without labels.
        groups: name of the group of each photo: [N].
        copies: sets of photos that are the same or almost the same.
    """

    store: PhotoStore
    record: MatchRecord
    labels: Numbers
    groups: Numbers
    copies: tuple[tuple[int, ...], ...]

    def links(self, least: int) -> tuple[Pairs, Numbers]:
        """Return matches between photos of the same class: pairs [m, 2] and inliers [m]."""
        pairs, inliers = self.record.links(least)
        same = self.labels[pairs[:, 0]] == self.labels[pairs[:, 1]]
        return pairs[same], inliers[same]


class Groups:
    """Groups of N photos, from the matches between them.

    A match with `strong` or more inliers joins the groups of its two photos. A weaker match adds
    a photo, or a pair of photos, to a group. It joins two groups of three or more photos only
    together with a second match between them: a single weak match may be chance, and joining two
    large groups by mistake would do the most harm.

    Args:
        count: N.
        links: numbers of two photos that match: [m, 2].
        inliers: number of inliers of each match: [m].
        strong: number of inliers from which one match alone joins any groups.
    """

    def __init__(self, count: int, links: Pairs, inliers: Numbers, strong: int) -> None:
        self._above = list(range(count))
        self._size = [1] * count
        certain = inliers >= strong
        for one, two in links[certain].tolist():
            self._join(one, two)
        self.doubtful = self._join_weak(
            links[~certain][np.argsort(-inliers[~certain], kind="stable")]
        )

    def _join_weak(self, links: Pairs) -> Pairs:
        """Join groups by weak matches until nothing changes; return those that stay unused."""
        waiting = links.tolist()
        changed = True
        while changed:
            changed = False
            roots = [(self.root(one), self.root(two)) for one, two in waiting]
            number = Counter((min(pair), max(pair)) for pair in roots)
            left = []
            for (one, two), (first, second) in zip(waiting, roots, strict=True):
                a, b = self.root(one), self.root(two)
                if a == b:
                    continue
                small = min(self._size[a], self._size[b]) < LARGE
                if small or number[min(first, second), max(first, second)] > 1:
                    self._join(a, b)
                    changed = True
                else:
                    left.append([one, two])
            waiting = left
        return np.array(waiting, np.int64).reshape(-1, 2)

    def root(self, photo: int) -> int:
        """Return the photo that stands for the group of a photo."""
        above = self._above
        while above[photo] != photo:
            above[photo] = above[above[photo]]
            photo = above[photo]
        return photo

    def _join(self, one: int, two: int) -> None:
        a, b = sorted((self.root(one), self.root(two)))
        if a != b:
            self._above[b] = a
            self._size[a] += self._size[b]

    def roots(self) -> Numbers:
        """Return the group of each photo, named by its first photo: [N]."""
        return np.array([self.root(photo) for photo in range(len(self._above))], np.int64)


def match_photos(
    images: Images,
    work: Path,
    settings: LabelSettings,
    model: Model | None,
    workers: Workers,
    on_progress: Progress,
    on_note: Callable[[str], object],
) -> PhotoMatches:
    """Compare the photos, and group those of the same class that match.

    Args:
        images: N photos, compared within their classes if they have labels.
        work: folder of intermediate files.
        settings: thresholds.
        model: chooses which photos are compared first.
        workers: worker processes.
        on_progress: called with a stage, the number of steps done and in total.
        on_note: called with sentences for the user.
    """
    store = extract_photos(images, work, settings.features, workers, on_progress)
    if not len(store.usable):
        errors = store.errors()
        raise InputError(f"none of the {len(errors)} photos can be read; the first: {errors[0]}")
    labelled = isinstance(images, LabelledImages)
    labels = images.labels if isinstance(images, LabelledImages) else np.zeros(len(images), int)
    vectors = None if model is None else describe_photos(model, images, work, on_progress)
    record = MatchRecord(work / "matches.sqlite", store, workers, on_progress)
    looks = similar_looks(store.looks, store.usable)
    same = _same_content(store.digests, store.usable)
    record.compare("comparing look-alikes", np.concatenate([looks, same]))
    alone = np.arange(len(images))
    found = PhotoMatches(store, record, labels, alone, _copies(store, record, looks, same))
    found = _connect(found, _rounds(labels, store.usable, vectors, labelled, settings), settings)
    if labelled and not _compare_classes(found, vectors, settings):
        on_note(
            "classes were not compared with each other, because there are too many to compare all "
            "of them: give `model` to find the classes that show the same thing"
        )
    return found


def _rounds(
    labels: Numbers,
    usable: Numbers,
    vectors: Vectors | None,
    labelled: bool,
    settings: LabelSettings,
) -> Iterator[Pairs]:
    """Yield the rounds of pairs to compare: the nearest photos, then random ones of a class."""
    near = 0
    if vectors is not None:
        near = min(_NEAREST, settings.partners // 2) if labelled else settings.partners
        yield from neighbor_rounds(usable, nearest_of_class(vectors, labels, usable, near))
    if labelled:
        yield from class_rounds(labels, usable, settings.partners - near, settings.seed)


def _connect(found: PhotoMatches, rounds: Iterator[Pairs], settings: LabelSettings) -> PhotoMatches:
    """Compare pairs round by round, without those that are connected already, and find groups."""

    def grouped() -> Groups:
        return Groups(len(found.labels), *found.links(settings.inliers), settings.strong)

    groups = grouped()
    for number, pairs in enumerate(rounds, 1):
        roots = groups.roots()
        apart = roots[pairs[:, 0]] != roots[pairs[:, 1]]
        found.record.compare(f"comparing photos, round {number}", pairs[apart])
        groups = grouped()
    if len(groups.doubtful):
        links, inliers = found.record.links(settings.inliers)
        more = _around(groups.doubtful, links, inliers)
        found.record.compare("checking weak matches", more)
        groups = grouped()
    return replace(found, groups=groups.roots())


def _around(doubtful: Pairs, links: Pairs, inliers: Numbers) -> Pairs:
    """Return pairs of each photo of a doubtful match and the photos that match the other one."""
    near: dict[int, list[int]] = {photo: [] for photo in doubtful.ravel().tolist()}
    for row in np.argsort(-inliers, kind="stable").tolist():
        one, two = links[row].tolist()
        for photo, other in ((one, two), (two, one)):
            if photo in near and len(near[photo]) < _AROUND:
                near[photo].append(other)
    pairs = [
        (photo, friend)
        for one, two in doubtful.tolist()
        for photo, other in ((one, two), (two, one))
        for friend in near[other]
        if friend != photo
    ]
    return np.array(pairs, np.int64).reshape(-1, 2)


def _same_content(digests: NDArray[np.bytes_], usable: Numbers) -> Pairs:
    order = usable[np.argsort(digests[usable], kind="stable")]
    equal = digests[order[1:]] == digests[order[:-1]]
    return np.stack([order[:-1][equal], order[1:][equal]], 1)


def _copies(
    store: PhotoStore, record: MatchRecord, looks: Pairs, same: Pairs
) -> tuple[tuple[int, ...], ...]:
    """Return sets of photos that are the same or almost the same, the largest photo first."""
    looks = unique_pairs(looks)
    needed = np.maximum(_COPY * store.counts[looks].min(axis=1), 8)
    pairs = np.concatenate([looks[record.inliers(looks) >= needed], same])
    strong = np.full(len(pairs), 1)
    roots = Groups(store.count, pairs, strong, strong=1).roots()
    members: dict[int, list[int]] = {}
    for photo in np.unique(pairs).tolist():
        members.setdefault(int(roots[photo]), []).append(photo)
    pixels = store.sizes.prod(axis=1)
    return tuple(
        tuple(sorted(numbers, key=lambda i: (-int(pixels[i]), i))) for numbers in members.values()
    )


def class_groups(found: PhotoMatches, settings: LabelSettings) -> dict[int, list[list[int]]]:
    """Return the groups of two or more photos of each class, the largest first.

    The photos of a group with most matches come first.
    """
    links, inliers = found.links(settings.inliers)
    inside = found.groups[links[:, 0]] == found.groups[links[:, 1]]
    links, inliers = links[inside], inliers[inside]
    matches = np.bincount(links.ravel(), minlength=len(found.groups))
    total = np.bincount(links.ravel(), np.repeat(inliers, 2), minlength=len(found.groups))
    usable = found.store.usable
    members: dict[tuple[int, int], list[int]] = {}
    for photo in usable[np.lexsort((usable, -total[usable], -matches[usable]))].tolist():
        key = int(found.labels[photo]), int(found.groups[photo])
        members.setdefault(key, []).append(photo)
    groups: dict[int, list[list[int]]] = {}
    for (kind, _), photos in sorted(members.items(), key=lambda each: (-len(each[1]), each[0])):
        if len(photos) > 1:
            groups.setdefault(kind, []).append(photos)
    return dict(sorted(groups.items()))


def _compare_classes(found: PhotoMatches, vectors: Vectors | None, settings: LabelSettings) -> bool:
    """Compare classes with each other, to find those that show the same thing.

    Returns:
        Whether they were compared: without a model, only `few_classes` are.
    """
    largest = [groups[0] for groups in class_groups(found, settings).values()]
    groups = [photos for photos in largest if len(photos) >= settings.min_photos]
    first = np.array([photos[0] for photos in groups], np.int64)
    if vectors is not None and len(groups) > 1:
        near = nearest(vectors, first, found.store.usable, 4 * _SIMILAR)
        pairs = np.concatenate([*neighbor_rounds(first, near)])
        inside = np.isin(pairs[:, 1], [photo for photos in groups for photo in photos])
        pairs = pairs[inside & (found.labels[pairs[:, 0]] != found.labels[pairs[:, 1]])]
    elif few_classes(len(groups), len(found.labels)):
        pairs = first[np.stack(np.triu_indices(len(first), 1), 1)]
    else:
        return False
    found.record.compare("comparing classes", pairs)
    hit = unique_pairs(pairs)
    hit = hit[found.record.inliers(hit) >= settings.inliers]
    members = {int(found.labels[photos[0]]): photos[:_HUBS] for photos in groups}
    more = [
        (one, two)
        for a, b in found.labels[hit].tolist()
        for one in members[a]
        for two in members[b]
    ]
    found.record.compare("comparing classes that match", np.array(more, np.int64).reshape(-1, 2))
    return True
