"""The files of a run that trains from an index; the run does not need the index any more."""

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open

from listwise.data import read_labelled
from listwise.data.images import Box, load_image
from listwise.data.labelled import LabelledImages
from listwise.descriptors.settings import ExtractSettings
from listwise.errors import InputError
from listwise.feedback.photos import IndexPhotos, MarkedPhotos
from listwise.files import write_tensors, write_text
from listwise.search.entries import Entry, Float32, Keys, entry_key
from listwise.search.generation import Generation
from listwise.search.store import Store
from listwise.training.run.folder import INDEX_FILE, TABLE_FILE

DESCRIPTOR_FILE, LAYER_FILE = "descriptors.safetensors", "layer.safetensors"
OTHERS = 10_000
"""Maximum number of entries without label or mark that photos are ranked among."""
WHITENING_PHOTOS = 5000
"""Maximum number of photos of the index that a whitening is learned from."""


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
    unlabelled = _others(current.store, images.ids) if others else []
    spread = [] if others or not header.whitened else _sample(current.store)
    record = IndexRun(
        index=index,
        model=header.model_folder or header.model_name,
        fingerprint=header.model,
        settings=header.settings,
        ids=images.ids,
        queries=photos.queries,
        others=tuple((entry.id, entry.path) for entry in unlabelled),
        whitening=tuple((entry.path, entry.box) for entry in spread),
    )
    assert images.splits is not None
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["path", "label", "split", "box"])
    for i, path in enumerate(images.paths):
        box = images.box(i)
        shown = "" if box is None else ",".join(map(repr, box))
        table.writerow([path, images.class_names[images.labels[i]], images.splits[i], shown])
    try:
        run.mkdir(parents=True, exist_ok=True)
        if others:
            keys = [entry.key for entry in unlabelled]
            known = _known_descriptors(current, images)
            rows = np.concatenate([known, current.store.vectors(keys)]) if keys else known
            write_tensors(run / DESCRIPTOR_FILE, {"descriptors": rows})
        write_text(run / TABLE_FILE, text.getvalue())
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
        rows[i] = current.describe([load_image(images.paths[i])], [images.box(i)])[0]
    return rows


def _others(store: Store, known: Sequence[str]) -> list[Entry]:
    """Entries that are not among the known ones."""
    left = np.setdiff1d(store.versions()[0], [entry_key(photo) for photo in known])
    return _spread(store, left, OTHERS)


def _sample(store: Store) -> list[Entry]:
    """Entries whose photos exist, for a whitening."""
    found = _spread(store, np.sort(store.versions()[0]), WHITENING_PHOTOS)
    return [entry for entry in found if entry.path and Path(entry.path).is_file()]


def _spread(store: Store, keys: Keys, most: int) -> list[Entry]:
    # Keys are hashes, so those at even distances are a random sample.
    places = np.linspace(0, len(keys) - 1, min(most, len(keys))).astype(np.int64)
    return list(store.get(keys[places].tolist()).values())


def write_layer(run: Path, layer: Float32) -> None:
    """Write the best layer [C, C] of a run so far."""
    write_tensors(run / LAYER_FILE, {"layer": layer})


def read_tensor(run: Path, file: str, name: str) -> Float32:
    """Read one of the arrays of a run."""
    try:
        with safe_open(run / file, framework="numpy") as opened:
            found: Float32 = opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{run / file} is missing or damaged: start a new run") from error
    return found
