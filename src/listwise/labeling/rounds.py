"""Compare photos round by round until those that show the same thing are connected."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from listwise.data import Images, LabelledImages
from listwise.descriptors import Model
from listwise.errors import InputError
from listwise.labeling.candidates import (
    Numbers,
    class_rounds,
    neighbor_rounds,
    similar_looks,
)
from listwise.labeling.comparisons import MatchRecord, Pairs, unique_pairs
from listwise.labeling.descriptors import Vectors, describe_photos, nearest, nearest_of_class
from listwise.labeling.groups import Groups
from listwise.labeling.settings import LabelSettings
from listwise.labeling.store import FeatureStore
from listwise.labeling.workers import Workers

Progress = Callable[[str, int, int], object]
_NEAREST = 6  # partners of the same class that are chosen by descriptors, if there is a model
_AROUND = 6  # matches of each photo of a doubtful match that are compared across it
_COPY = 0.5  # share of the features of near-duplicates that are inliers
_HUBS = 3  # photos with most matches that stand for a class
_SIMILAR = 10  # photos of other classes that each class is compared with, if there is a model
_MERGE_PAIRS = 20  # maximum number of pairs of classes compared without a model, per photo
_HEADER, _FEATURE = 18, 42  # bytes of encoded features


@dataclass(frozen=True, eq=False)
class PhotoMatches:
    """Everything that was measured about N photos.

    Attributes:
        store: local features.
        record: number of inliers of the pairs that were compared.
        labels: class of each photo: [N]; all zero without labels.
        usable: numbers of the photos that can be read.
        groups: name of the group of each photo: [N].
        copies: sets of photos that are the same or almost the same.
    """

    store: FeatureStore
    record: MatchRecord
    labels: Numbers
    usable: Numbers
    groups: Numbers
    copies: tuple[tuple[int, ...], ...]

    def links(self, least: int) -> tuple[Pairs, Numbers]:
        """Return matches between photos of the same class: pairs [m, 2] and inliers [m]."""
        pairs, inliers = self.record.links(least)
        same = self.labels[pairs[:, 0]] == self.labels[pairs[:, 1]]
        return pairs[same], inliers[same]


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
    store = FeatureStore(work, len(images))
    count = _Counter("extracting local features", len(images), on_progress)
    store.fill(images, settings.features, workers, count)
    table = store.table()
    usable = np.flatnonzero(table["width"] > 0)
    if not len(usable):
        errors = store.errors()
        raise InputError(f"none of the {len(errors)} photos can be read; the first: {errors[0]}")
    labelled = isinstance(images, LabelledImages)
    labels = images.labels if isinstance(images, LabelledImages) else np.zeros(len(images), int)
    vectors = None
    if model is not None:
        count = _Counter("computing descriptors", len(images), on_progress)
        vectors = describe_photos(model, images, work, count)
    record = MatchRecord(work / "matches.bin")
    compare = partial(_compare, record, store, workers, on_progress)
    looks = similar_looks(table["look"], usable)
    same = _same_content(table["digest"], usable)
    compare("comparing look-alikes", np.concatenate([looks, same]))
    rounds = _rounds(labels, usable, vectors, labelled, settings)
    groups = _connect(record, labels, rounds, settings, compare)
    found = PhotoMatches(
        store, record, labels, usable, groups.roots(), _copies(table, record, looks, same)
    )
    if labelled and not _compare_classes(found, vectors, settings, compare):
        on_note(
            "classes were not compared with each other, because there are too many to compare all "
            "of them: give `model` to find the classes that show the same thing"
        )
    return found


Compare = Callable[[str, Pairs], None]


def _compare(
    record: MatchRecord,
    store: FeatureStore,
    workers: Workers,
    on_progress: Progress,
    stage: str,
    pairs: Pairs,
) -> None:
    pairs = unique_pairs(pairs)
    record.compare(store, pairs, workers, _Counter(stage, len(pairs), on_progress))


def _rounds(
    labels: Numbers,
    usable: Numbers,
    vectors: Vectors | None,
    labelled: bool,
    settings: LabelSettings,
) -> Iterator[Pairs]:
    """Return the rounds of pairs to compare."""
    if not labelled:
        assert vectors is not None
        readable = np.zeros(len(labels), bool)
        readable[usable] = True
        return neighbor_rounds(usable, nearest(vectors, usable, settings.partners, readable))
    within: Iterator[Pairs] = iter(())
    partners = settings.partners
    if vectors is not None:
        close = min(_NEAREST, partners // 2)
        within = neighbor_rounds(usable, nearest_of_class(vectors, labels, usable, close))
        partners -= close
    return chain(within, class_rounds(labels, usable, partners, settings.seed))


def _connect(
    record: MatchRecord,
    labels: Numbers,
    rounds: Iterator[Pairs],
    settings: LabelSettings,
    compare: Compare,
) -> Groups:
    """Compare pairs round by round, without those that are connected already."""
    groups = _grouped(record, labels, settings)
    for number, pairs in enumerate(rounds, 1):
        roots = groups.roots()
        compare(
            f"comparing photos, round {number}", pairs[roots[pairs[:, 0]] != roots[pairs[:, 1]]]
        )
        groups = _grouped(record, labels, settings)
    if len(groups.doubtful):
        links, inliers = record.links(settings.inliers)
        compare("checking weak matches", _around(groups.doubtful, links, inliers))
        groups = _grouped(record, labels, settings)
    return groups


def _grouped(record: MatchRecord, labels: Numbers, settings: LabelSettings) -> Groups:
    links, inliers = record.links(settings.inliers)
    same = labels[links[:, 0]] == labels[links[:, 1]]
    return Groups(len(labels), links[same], inliers[same], settings.strong)


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
    table: NDArray[np.void], record: MatchRecord, looks: Pairs, same: Pairs
) -> tuple[tuple[int, ...], ...]:
    """Return sets of photos that are the same or almost the same, the largest photo first."""
    features = (table["size"].astype(np.int64) - _HEADER) // _FEATURE
    looks = unique_pairs(looks)
    needed = np.maximum(_COPY * features[looks].min(axis=1), 8)
    pairs = np.concatenate([looks[record.inliers(looks) >= needed], same])
    strong = np.full(len(pairs), 1)
    roots = Groups(len(table), pairs, strong, strong=1).roots()
    members: dict[int, list[int]] = {}
    for photo in np.unique(pairs).tolist():
        members.setdefault(int(roots[photo]), []).append(photo)
    pixels = table["width"].astype(np.int64) * table["height"]
    return tuple(
        tuple(sorted(numbers, key=lambda i: (-int(pixels[i]), i))) for numbers in members.values()
    )


def hubs(found: PhotoMatches, settings: LabelSettings) -> dict[int, list[int]]:
    """Return the photos of each group of two or more, those with most matches first."""
    links, inliers = found.links(settings.inliers)
    inside = found.groups[links[:, 0]] == found.groups[links[:, 1]]
    links, inliers = links[inside], inliers[inside]
    matches = np.bincount(links.ravel(), minlength=len(found.groups))
    total = np.bincount(links.ravel(), np.repeat(inliers, 2), minlength=len(found.groups))
    order = found.usable[np.lexsort((found.usable, -total[found.usable], -matches[found.usable]))]
    members: dict[int, list[int]] = {}
    for photo in order.tolist():
        members.setdefault(int(found.groups[photo]), []).append(photo)
    return {root: photos for root, photos in sorted(members.items()) if len(photos) > 1}


def largest_groups(found: PhotoMatches, settings: LabelSettings) -> list[list[int]]:
    """Return the largest group of each class, its photos with most matches first."""
    best: dict[int, list[int]] = {}
    for photos in hubs(found, settings).values():
        kind = int(found.labels[photos[0]])
        if len(photos) >= settings.min_photos and len(photos) > len(best.get(kind, ())):
            best[kind] = photos
    return [best[kind] for kind in sorted(best)]


def few_classes(classes: int, photos: int) -> bool:
    """Return whether all classes can be compared with each other, without a model."""
    return classes * (classes - 1) // 2 <= _MERGE_PAIRS * photos


def _compare_classes(
    found: PhotoMatches, vectors: Vectors | None, settings: LabelSettings, compare: Compare
) -> bool:
    """Compare classes with each other, to find those that show the same thing.

    Returns:
        Whether they were compared: without a model, only `few_classes` are.
    """
    groups = largest_groups(found, settings)
    first = np.array([photos[0] for photos in groups], np.int64)
    if vectors is not None and len(groups) > 1:
        in_group = np.zeros(len(found.labels), bool)
        in_group[[photo for photos in groups for photo in photos]] = True
        near = nearest(vectors, first, 4 * _SIMILAR, in_group)
        pairs = np.concatenate([*neighbor_rounds(first, near)])
        pairs = pairs[found.labels[pairs[:, 0]] != found.labels[pairs[:, 1]]]
    elif few_classes(len(groups), len(found.labels)):
        pairs = first[np.stack(np.triu_indices(len(first), 1), 1)]
    else:
        return False
    compare("comparing classes", pairs)
    hit = unique_pairs(pairs)
    hit = hit[found.record.inliers(hit) >= settings.inliers]
    members = {int(found.labels[photos[0]]): photos[:_HUBS] for photos in groups}
    more = [
        (one, two)
        for a, b in found.labels[hit].tolist()
        for one in members[a]
        for two in members[b]
    ]
    compare("comparing classes that match", np.array(more, np.int64).reshape(-1, 2))
    return True


class _Counter:
    """Adds up steps of a stage and reports them."""

    def __init__(self, stage: str, total: int, on_progress: Progress) -> None:
        self._stage, self._total, self._report = stage, total, on_progress
        self._done = 0

    def __call__(self, count: int) -> None:
        self._done += count
        self._report(self._stage, self._done, self._total)
