"""What a run takes from an index: its labelled and marked photos, and their descriptors.

It is written into the folder of the run, which does not need the index any more.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from listwise.data import read_labelled
from listwise.data.images import Box
from listwise.data.labelled import Images, LabelledImages
from listwise.errors import InputError
from listwise.files import write_csv, write_tensors, write_text
from listwise.models.storage import read_tensors
from listwise.search.entries import Entry, Float32, entry_key, spread
from listwise.search.generation import Generation
from listwise.search.index import Index
from listwise.search.marks import Marks
from listwise.settings import ExtractSettings
from listwise.training.run import INDEX_FILE, TABLE_FILE

DESCRIPTOR_FILE, LAYER_FILE = "descriptors.safetensors", "layer.safetensors"
OTHERS = 10_000
"""Maximum number of entries without label or mark that photos are ranked among."""
WHITENING_PHOTOS = 5000
"""Maximum number of photos of the index that a whitening is learned from."""

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
    marks = index.marks.read()
    classes = marks.class_names
    if not classes:
        raise InputError(
            f"{index.uri} has neither labels nor marks to train on: mark results of searches, or "
            "add photos with the attribute label"
        )
    files = {photo: marks.photos[photo] for photo in classes}
    missing = sorted(photo for photo, file in files.items() if not Path(file.path).is_file())
    if missing:
        raise InputError(
            f"{len(missing)} of {len(files)} labelled or marked photos of {index.uri} do not exist "
            f"on the disk, the first is {missing[0]}: restore them, or remove their entries"
        )
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
    return IndexPhotos(named, queries, len(marks.left_out))


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
    pairs = [(each.query, photo) for each in queries for photo in each.different]
    alone = {photo for _, photo in pairs if sizes[classes[photo]] == 1}
    return chosen | (alone - {photo for query, photo in pairs if query not in chosen})


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


class IndexRun(BaseModel):
    """What a run took from an index.

    Attributes:
        index: the folder or address of the index.
        model: the folder or the timm name of its model.
        fingerprint: the fingerprint of the model.
        settings: how the index describes photos.
        ids: the ids of the photos in the table of the run, row by row.
        queries: the queries of marks.
        others: ids and paths of entries without a label or mark, among which photos are ranked.
        whitening: paths and boxes of photos to learn the whitening of a new network from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    index: str
    model: str
    fingerprint: str
    settings: ExtractSettings
    ids: tuple[str, ...]
    queries: tuple[MarkedPhotos, ...]
    others: tuple[tuple[str, str], ...] = ()
    whitening: tuple[tuple[str, Box | None], ...] = ()


def write_index_run(
    run: Path, index: str, current: Generation, photos: IndexPhotos, *, others: bool
) -> IndexRun:
    """Write the photos and the origin of a run into its folder.

    Args:
        run: the folder of the run.
        index: the folder or address of the index.
        current: its generation.
        photos: its labelled and marked photos.
        others: also write the descriptors of all these photos, and of other entries. Otherwise
            a new network is trained, which needs photos for its whitening if the model has one.
    """
    header, images = current.header, photos.images
    store, unlabelled, sample = current.store, dict[int, Entry](), dict[int, Entry]()
    if others:
        known = [entry_key(photo) for photo in images.ids]
        unlabelled = store.get(spread(np.setdiff1d(store.keys(), known), OTHERS).tolist())
    elif header.whitened:
        sample = store.get(spread(np.sort(store.keys()), WHITENING_PHOTOS).tolist())
    whitening = ((entry.path, entry.box) for entry in sample.values())
    record = IndexRun(
        index=index,
        model=header.model_folder or header.model_name,
        fingerprint=header.model,
        settings=header.settings,
        ids=images.ids,
        queries=photos.queries,
        others=tuple((entry.id, entry.path) for entry in unlabelled.values()),
        whitening=tuple(photo for photo in whitening if photo[0] and Path(photo[0]).is_file()),
    )
    assert images.splits is not None
    table = [["path", "label", "split", "box"]]
    for i, path in enumerate(images.paths):
        box = ",".join(map(repr, images.box(i) or ()))
        table.append([path, images.class_names[images.labels[i]], images.splits[i], box])
    try:
        run.mkdir(parents=True, exist_ok=True)
        if others:
            rows = _known_descriptors(current, images)
            rows = np.concatenate([rows, store.vectors(list(unlabelled))])
            write_tensors(run / DESCRIPTOR_FILE, {"descriptors": torch.from_numpy(rows)})
        write_csv(run / TABLE_FILE, table)
        write_text(run / INDEX_FILE, record.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise InputError(
            f"cannot write the run folder {run} ({error.strerror}): choose another `run_folder`"
        ) from error
    return record


def read_index_run(run: Path) -> tuple[IndexRun, LabelledImages]:
    """Read what `write_index_run` wrote: the record, and the photos with their ids."""
    path = run / INDEX_FILE
    try:
        record = IndexRun.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise InputError(f"{path} is missing or damaged: restore it, or start a new run") from error
    images = read_labelled(run / TABLE_FILE)
    if len(images) != len(record.ids):
        raise InputError(
            f"{run / TABLE_FILE} was changed: it has {len(images)} photos instead of "
            f"{len(record.ids)}; start a new run"
        )
    return record, replace(images, ids=record.ids)


def _known_descriptors(current: Generation, images: LabelledImages) -> Float32:
    """The descriptors [N, C] that an index has of photos; query photos are described."""
    keys = [entry_key(photo) for photo in images.ids]
    present = current.store.get(keys)
    stored = [i for i, key in enumerate(keys) if key in present]
    rows = np.empty((len(images), current.header.dim), np.float32)
    rows[stored] = current.store.vectors([keys[i] for i in stored])
    for i in sorted(set(range(len(keys))) - set(stored)):
        rows[i] = current.describe_given([images.paths[i]], [images.box(i)])[0]
    return rows


def read_tensor(run: Path, file: str, name: str) -> Float32:
    """Read one of the arrays of a run."""
    found: Float32 = read_tensors(run / file)[0][name].numpy()
    return found
