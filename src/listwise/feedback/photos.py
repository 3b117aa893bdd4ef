"""The labelled and marked photos of an index, as training and validation photos."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

from listwise.data.labelled import Images, LabelledImages
from listwise.data.photos import PhotoFile
from listwise.errors import InputError
from listwise.search.classes import assign_classes, labels_of
from listwise.search.entries import entry_key
from listwise.search.index import Index
from listwise.search.marks import Marks

LEAST = 4
"""Minimum number of classes of two or more photos: two to train on, two to validate on."""


class MarkedPhotos(BaseModel):
    """A query of marks: ids of the query and of the photos that were marked for it."""

    model_config = ConfigDict(frozen=True)

    query: str
    same: tuple[str, ...]
    different: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class IndexPhotos:
    """The labelled and marked photos of an index.

    Attributes:
        images: N photos with their classes and splits; `ids` are those of the entries, or `query:`
            and a digest for query photos that are not entries.
        queries: the queries of marks.
        conflicting: the number of photos that were left out because marks contradict each other.
    """

    images: LabelledImages
    queries: tuple[MarkedPhotos, ...]
    conflicting: int


def read_index_photos(index: Index, val_fraction: float, seed: int) -> IndexPhotos:
    """Read the labelled and marked photos of an index, and hold out classes for validation.

    Args:
        index: the index.
        val_fraction: fraction of the classes of two or more photos to hold out.
        seed: seed of the random choice of these classes.

    Raises:
        InputError: there are too few classes, or photos are missing on the disk.
    """
    marks = index.marks()
    labels = labels_of(index.store)
    classes, left_out = assign_classes(marks.active, labels)
    if not classes:
        raise InputError(
            f"{index.uri} has neither labels nor marks to train on: mark results of searches, or "
            "add photos with the attribute label"
        )
    known = _files(index, marks, classes)
    classes = {photo: name for photo, name in classes.items() if photo in known}
    files = {photo: known[photo] for photo in classes}
    _refuse_missing(index, files)
    several = [name for name, count in Counter(classes.values()).items() if count > 1]
    if len(several) < LEAST:
        raise InputError(
            f"{index.uri} has labels or marks for {len(several)} classes of two or more photos, "
            f"but training needs {LEAST}, two of them for validation: label or mark more photos"
        )
    queries = marked_queries(marks, classes)
    held_out = hold_out_photos(classes, queries, val_fraction, seed)
    ids = sorted(classes)
    photos = [files[photo] for photo in ids]
    boxes = tuple(photo.box for photo in photos)
    images = Images(
        tuple(str(photo.path) for photo in photos), tuple(ids), boxes if any(boxes) else None
    )
    splits = ["val" if photo in held_out else "train" for photo in ids]
    named = LabelledImages.from_names(images, [classes[photo] for photo in ids], splits)
    return IndexPhotos(named, queries, len(left_out))


def marked_queries(marks: Marks, classes: Mapping[str, str]) -> tuple[MarkedPhotos, ...]:
    """Return the queries of marks with their marked photos, without photos that have no class."""
    found = []
    for query in dict.fromkeys(mark.query.id for mark in marks.active):
        if query in classes:
            same, different = (
                tuple(photo for photo in ids if photo in classes) for ids in marks.of(query)
            )
            found.append(MarkedPhotos(query=query, same=same, different=different))
    return tuple(found)


def hold_out_photos(
    classes: Mapping[str, str], queries: Sequence[MarkedPhotos], fraction: float, seed: int
) -> set[str]:
    """Choose the photos of the validation: whole classes, at random.

    Classes that "different" marks connect stay on one side where this leaves enough classes. A
    class of one photo is held out if all queries that it was marked for are.

    Args:
        classes: the class of each photo, by id.
        queries: the queries of marks.
        fraction: fraction of the classes of two or more photos to hold out.
        seed: seed of the random choice.

    Returns:
        The ids of the photos; two or more of the classes of two or more photos are on each side.
    """
    sizes = Counter(classes.values())
    several = sorted(name for name, count in sizes.items() if count > 1)
    count = min(max(round(fraction * len(several)), 2), len(several) - 2)
    generator = np.random.default_rng(seed)
    held_out: set[str] = set()
    connected = _connected(several, classes, queries)
    for place in generator.permutation(len(connected)):
        if len(held_out) + len(connected[place]) <= count:
            held_out |= connected[place]
    if len(held_out) < 2:  # marks connect nearly all classes
        held_out = {several[i] for i in generator.permutation(len(several))[:count]}
    chosen = {photo for photo, name in classes.items() if name in held_out}
    marked_for: dict[str, list[str]] = {}
    for each in queries:
        for photo in each.different:
            marked_for.setdefault(photo, []).append(each.query)
    alone = {photo for photo in marked_for if sizes[classes[photo]] == 1}
    return chosen | {
        photo for photo in alone if all(query in chosen for query in marked_for[photo])
    }


def _connected(
    names: Collection[str], classes: Mapping[str, str], queries: Sequence[MarkedPhotos]
) -> list[set[str]]:
    """Groups of classes whose photos are marked as different from each other, in a fixed order."""
    groups = {name: {name} for name in sorted(names)}
    for each in queries:
        for photo in each.different:
            one, other = classes[each.query], classes[photo]
            if one in groups and other in groups and groups[one] is not groups[other]:
                joined = groups[one] | groups[other]
                groups.update(dict.fromkeys(joined, joined))
    return list({id(group): group for group in groups.values()}.values())


def _files(index: Index, marks: Marks, classes: Mapping[str, str]) -> dict[str, PhotoFile]:
    """The files of the photos that are in the index, and of query photos, by id."""
    entries = index.store.get([entry_key(photo) for photo in classes])
    found = {entry.id: PhotoFile(entry.path, entry.box) for entry in entries.values()}
    kept = {photo: each for photo, each in marks.photos.items() if photo not in found}
    return found | {photo: PhotoFile(each.path, each.box) for photo, each in kept.items()}


def _refuse_missing(index: Index, files: Mapping[str, PhotoFile]) -> None:
    missing = sorted(photo for photo, file in files.items() if not Path(file.path).is_file())
    if missing:
        raise InputError(
            f"{len(missing)} of {len(files)} labelled or marked photos of {index.uri} do not exist "
            f"on the disk, the first is {missing[0]}: restore them, or remove their entries"
        )
