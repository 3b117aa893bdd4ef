"""Photos into an index, part by part: what is there already is left alone."""

import hashlib
import io
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from listwise.data import ImageError, Images, image_size, load_image
from listwise.data.images import Box
from listwise.descriptors import DescriptorFile, Model
from listwise.descriptors.settings import ExtractSettings
from listwise.errors import InputError
from listwise.search.entries import Entry, NewEntries
from listwise.search.store import IndexHeader, Store

# Photos in a commit, which is what a kill can cost: some seconds on a GPU, a minute without.
PART = {"cpu": 64, "cuda": 2048}
LOOK = 8192  # photos looked up at a time
THUMBNAIL_SIDE = 320
THUMBNAIL_BYTES = 45_000  # what every engine can hold


@dataclass
class Added:
    """What became of photos, by id; `errors` has a line for each that could not be added.

    Replaced ones had other content before; updated ones were there, but in another place or with
    other attributes; a copy has the content of another photo, which is in the index in its place.
    """

    added: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def header_of(
    model: Model,
    folder: str | Path,
    *,
    max_side: int | None = None,
    scales: Sequence[float] = (1.0,),
    power: float = 3.0,
) -> IndexHeader:
    """The header of a new index of a model's descriptors; the settings are those of `extract`.

    In which precision a network computes is a matter of the machine, not of the index.
    """
    return IndexHeader(
        model=model.fingerprint,
        model_folder=str(Path(folder).absolute()),
        whitened=model.whitening is not None,
        dim=model.dim,
        settings=model.settings(max_side, scales, power, "float32"),
    )


def settings_here(header: IndexHeader, model: Model) -> ExtractSettings:
    """How this machine makes descriptors for an index."""
    settings = header.settings
    return model.settings(settings.max_side, settings.scales, settings.power, None)


def add_photos(
    index: Store,
    model: Model,
    images: Images,
    *,
    thumbnails: bool = True,
    workers: int | None = None,
    on_progress: Callable[[int], object] = lambda count: None,
) -> Added:
    """Put photos into an index that are not in it yet, and those that have changed.

    Each part of them is committed when it is done, so that a second run goes on after a kill. A
    photo is known by its content: what is in the index already is not described again, and is one
    entry whatever its names. If the file of that entry is gone, the photo has moved, and the entry
    moves with it.

    Args:
        index: an index of this model's descriptors.
        model: the network and its whitening.
        images: photos; each one's box is cut out first, if it has one.
        thumbnails: keep a small picture of each.
        workers: processes that decode; from the cores by default.
        on_progress: called with the number of photos just done.
    """
    index.header.check(model.fingerprint, index.uri)
    settings = settings_here(index.header, model)
    size = PART["cuda" if model.device.type == "cuda" else "cpu"]
    result = Added()
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(images), LOOK):
            part = images.subset(range(start, min(start + LOOK, len(images))))
            asked = list(pool.map(partial(_entry_or_error, part), range(len(part))))
            wanted = _not_there(index, asked, result)
            on_progress(len(part) - len(wanted))
            entries = [entry for entry in asked if isinstance(entry, Entry)]
            known = index.get([entry.key for entry in entries])
            commits = [range(i, min(i + size, len(wanted))) for i in range(0, len(wanted), size)]
            described = model.describe_parts(
                part.subset(wanted), commits, settings, workers, on_progress
            )
            with closing(described):
                for found in described:
                    rows = [asked[wanted[i]] for i in found.kept]
                    new = [entry for entry in rows if isinstance(entry, Entry)]
                    result.errors += found.errors
                    if new:
                        make = thumbnail_from_photo if thumbnails else _no_thumbnail
                        index.put(NewEntries(new, found.descriptors, list(pool.map(make, new))))
                    for entry in new:
                        (result.replaced if entry.key in known else result.added).append(entry.id)
    return result


def add_descriptors(
    index: Store,
    file: DescriptorFile,
    root: str | Path | None = None,
    *,
    thumbnails: bool = True,
    on_progress: Callable[[int], object] = lambda count: None,
) -> Added:
    """Put a descriptor file's rows into an index, in place of those with the same ids.

    Args:
        index: an index of the same model's descriptors, made with the same settings.
        file: descriptors that `extract` wrote.
        root: the folder that the photos' ids are relative to; gives them paths and thumbnails.
        thumbnails: keep a small picture of each, where its photo is readable.
        on_progress: called with the number of rows just done.
    """
    index.header.check(file.model, index.uri)
    theirs, ours = (_comparable(each) for each in (file.settings, index.header.settings))
    if theirs != ours:
        raise InputError(
            f"{file.path} was made with {theirs}, the index {index.uri} with {ours}: "
            "extract the photos in the same way"
        )
    name, rows_of_it = Counter(file.ids).most_common(1)[0] if len(file) else ("", 1)
    if rows_of_it > 1:
        raise InputError(
            f"{file.path} has {rows_of_it} rows for {name}, and an index one entry for an id: "
            "give the index the photos themselves, or their table"
        )
    base = None if root is None else Path(root).absolute()
    result = Added(errors=list(file.header.unreadable))
    start = 0
    with ThreadPoolExecutor() as pool:
        for rows in file.batches():
            stop = start + len(rows)
            entries = [
                Entry(name, str(base / name) if base else "", int(width), int(height))
                for name, (width, height) in zip(
                    file.ids[start:stop], file.sizes[start:stop], strict=True
                )
            ]
            known = index.get([entry.key for entry in entries])
            make = thumbnail_from_photo if thumbnails else _no_thumbnail
            index.put(NewEntries(entries, rows, list(pool.map(make, entries))))
            for entry in entries:
                (result.replaced if entry.key in known else result.added).append(entry.id)
            on_progress(len(rows))
            start = stop
    return result


def thumbnail(photo: Image.Image) -> bytes:
    """A small JPEG file of a photo, such as every engine can hold."""
    small = photo.copy()
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.LANCZOS)
    for quality in (82, 65, 45, 25):
        file = io.BytesIO()
        small.save(file, "JPEG", quality=quality)
        if file.tell() <= THUMBNAIL_BYTES:
            return file.getvalue()
    return b""


def thumbnail_from_photo(entry: Entry) -> bytes:
    """A thumbnail made anew from an entry's photo; empty if that cannot be read."""
    try:
        return thumbnail(load_image(entry.path, entry.box, min_side=THUMBNAIL_SIDE))
    except ImageError:
        return b""


def photo_digest(content: bytes, box: Box | None = None) -> str:
    """Names a photo by what is in its file, and by the part of it that is meant."""
    digest = hashlib.blake2b(content, digest_size=16)
    if box is not None:
        digest.update(repr(tuple(map(float, box))).encode())
    return digest.hexdigest()


def _not_there(index: Store, asked: Sequence[Entry | ImageError], result: Added) -> list[int]:
    """The positions of photos to be described; those that are there are brought up to date."""
    entries = [entry for entry in asked if isinstance(entry, Entry)]
    by_key = index.get([entry.key for entry in entries])
    by_digest = index.with_digests([entry.digest for entry in entries])
    wanted: list[int] = []
    moves: list[tuple[Entry, Entry]] = []
    taken: set[str] = set()
    for position, entry in enumerate(asked):
        if isinstance(entry, ImageError):
            result.errors.append(str(entry))
            continue
        named, same = by_key.get(entry.key), by_digest.get(entry.digest)
        if named is not None and named.digest == entry.digest:
            same = named
        if same == entry:
            result.unchanged.append(entry.id)
        elif entry.digest in taken:
            result.copies.append(entry.id)
        elif named is not None and named != same and _elsewhere(named, entry):
            result.errors.append(
                f"{entry.path}: another photo is in {index.uri} as {entry.id}, from {named.path}; "
                "give this one another name"
            )
        elif same is None:
            taken.add(entry.digest)
            wanted.append(position)
        elif same is named and not _elsewhere(named, entry):
            moves.append((same, entry))
        elif not _still_there(same):
            taken.add(entry.digest)
            moves.append((same, entry))
        else:
            result.copies.append(entry.id)
    _move(index, moves)
    result.updated += [entry.id for _, entry in moves]
    return wanted


def _elsewhere(present: Entry, entry: Entry) -> bool:
    """Whether an entry is of a file in another place, which is still there."""
    return present.path not in ("", entry.path) and Path(present.path).exists()


def _still_there(entry: Entry) -> bool:
    """Whether an entry's file holds what it held: names may have changed hands since."""
    try:
        return photo_digest(Path(entry.path).read_bytes(), entry.box) == entry.digest
    except OSError:
        return False


def _move(index: Store, moves: Sequence[tuple[Entry, Entry]]) -> None:
    """Write entries anew with the descriptors and thumbnails they have."""
    if not moves:
        return
    keys = [old.key for old, _ in moves]
    small = [index.thumbnail(key) or b"" for key in keys]
    new = [entry for _, entry in moves]
    moved = NewEntries(new, index.vectors(np.array(keys, np.int64)), small)
    # First: after a kill between the two, the next run finds new photos, and not two of each.
    index.remove(sorted(set(keys) - {entry.key for entry in new}))
    index.put(moved)


def _entry_or_error(images: Images, position: int) -> Entry | ImageError:
    path, box, name = images.paths[position], images.box(position), images.ids[position]
    if box is not None:
        name += "#" + ",".join(f"{edge:g}" for edge in box)
    try:
        (path + name).encode()
    except UnicodeEncodeError:
        shown = path.encode(errors="surrogateescape").decode(errors="replace")
        return ImageError(shown, "its name is not UTF-8: rename it")
    try:
        width, height = image_size(path)
        content = Path(path).read_bytes()
    except ImageError as error:
        return error
    except OSError as error:
        return ImageError(path, error.strerror or "cannot be read")
    attributes = {} if images.attributes is None else dict(images.attributes[position])
    return Entry(name, path, width, height, box, photo_digest(content, box), attributes)


def _no_thumbnail(entry: Entry) -> bytes:
    return b""


def _comparable(settings: ExtractSettings) -> str:
    return ", ".join(f"{k} {v}" for k, v in settings if k != "precision")
