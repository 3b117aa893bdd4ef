"""Photos into an index, part by part: what is there already is left alone."""

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from pathlib import Path

import numpy as np

from listwise.data import ImageError, Images, PhotoFile
from listwise.data.catalog import photos_of
from listwise.data.given import image_files, is_one_photo
from listwise.data.photos import THUMBNAIL_SIDE, thumbnail
from listwise.descriptors import DescriptorFile, Model
from listwise.descriptors.extract import PART
from listwise.descriptors.settings import ExtractSettings
from listwise.descriptors.storage import is_descriptor_file
from listwise.errors import InputError
from listwise.search.entries import Entry, NewEntries
from listwise.search.store import Store

# Photos looked up at a time: as many as this, or as have this many bytes, which are in memory.
WINDOW = 8192
WINDOW_BYTES = 2**28
READ = 64  # files read at a time

NewPhoto = tuple[Entry, PhotoFile]
"""What the index will know of a photo, and the photo's file with its content."""

Source = str | Path | Images | DescriptorFile
Sources = Source | Sequence[Source]
"""A folder, a table, a text list, an image file, a descriptor file, the name of a data set, or a
list of these."""


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


def open_sources(given: Sources) -> list[Images | DescriptorFile]:
    """Photos and descriptor files, in the order given; image files in a row come together."""
    if isinstance(given, str | Path | Images | DescriptorFile):
        given = [given]
    found: list[Images | DescriptorFile] = []
    files: list[str | Path] = []
    for source in given:
        if isinstance(source, Images | DescriptorFile):
            found.append(source)
            continue
        if not isinstance(source, str | Path):
            raise InputError(
                f"an index keeps the places of its photos: add files, not {type(source).__name__}"
            )
        if is_one_photo(source) and Path(source).expanduser().exists():
            files.append(source)
            continue
        if files:
            found.append(image_files(files))
            files = []
        if str(source).lower().endswith(".parquet") and is_descriptor_file(source):
            found.append(DescriptorFile.open(source))
        else:
            found.append(photos_of(source))
    return [*found, *([image_files(files)] if files else [])]


def add_photos(
    store: Store,
    model: Model,
    images: Images,
    *,
    thumbnails: bool = True,
    workers: int | None = None,
    max_side: int | None = None,
    on_progress: Callable[[int], object] = lambda count: None,
) -> Added:
    """Put photos into an index that are not in it yet, and those that have changed.

    Each part of them is committed when it is done, so that the same call resumes after a kill. A
    photo is known by its content: what is in the index already is not described again, and is one
    entry whatever its names. If the file of that entry is gone, the photo has moved, and the entry
    moves with it. `max_side` is the long side that larger photos are reduced to in an index that
    has no maximum. `on_progress` is called with the number of photos just done; the other arguments
    are those of `Index.add`.
    """
    store.header.check(model.fingerprint, store.uri)
    size = PART["cuda" if model.device.type == "cuda" else "cpu"]
    result = Added()
    waiting: deque[tuple[Entry, bool]] = deque()
    with (
        closing(_new_photos(store, images, result, waiting, on_progress)) as files,
        closing(
            model.describe_parts(
                files,
                repeat(size),
                settings_here(store, model, max_side),
                thumbnails=thumbnails,
                workers=workers,
                on_progress=on_progress,
            )
        ) as parts,
    ):
        for found in parts:
            part = [waiting.popleft() for _ in range(len(found.kept) + len(found.errors))]
            new = [part[position] for position in found.kept]
            if new:
                entries = [entry for entry, _ in new]
                store.put(NewEntries(entries, found.descriptors, found.thumbnails))
            result.errors += found.errors
            for entry, known in new:
                (result.replaced if known else result.added).append(entry.id)
    return result


def _new_photos(
    store: Store,
    images: Images,
    result: Added,
    waiting: deque[tuple[Entry, bool]],
    on_progress: Callable[[int], object],
) -> Generator[PhotoFile, None, None]:
    """The photos to be described, with their content; the others are brought up to date.

    The entry of each goes to `waiting`, with whether there is one of its name in the index.
    """
    taken: set[str] = set()
    for window in _windows(images):
        wanted = deque(_find_new(store, window, taken, result))
        on_progress(len(window) - len(wanted))
        known = store.get([entry.key for entry, _ in wanted])
        window.clear()  # of the content, only what is still to be described stays in memory
        while wanted:
            entry, file = wanted.popleft()
            waiting.append((entry, entry.key in known))
            yield file


def _windows(images: Images) -> Iterator[list[NewPhoto | ImageError]]:
    """Runs of photos; their files are read once, and stay in memory while they are needed."""
    window: list[NewPhoto | ImageError] = []
    content = 0
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(images), READ):
            positions = range(start, min(start + READ, len(images)))
            for found in pool.map(partial(_read_photo, images), positions):
                window.append(found)
                content += 0 if isinstance(found, ImageError) else len(found[1].content or b"")
            if content >= WINDOW_BYTES or len(window) >= WINDOW:
                yield window
                window, content = [], 0
    if window:
        yield window


def add_descriptors(
    store: Store,
    file: DescriptorFile,
    root: str | Path | None = None,
    *,
    thumbnails: bool = True,
    on_progress: Callable[[int], object] = lambda count: None,
) -> Added:
    """Put a descriptor file's rows into an index, in place of those with the same ids.

    Model and settings must be the index's. `root` is the folder that the photos' ids are relative
    to: it gives them paths, and thumbnails where they are readable.
    """
    store.header.check(file.model, store.uri)
    theirs, ours = (_comparable(each) for each in (file.settings, store.header.settings))
    if theirs != ours:
        raise InputError(
            f"{file.path} was made with {theirs}, the index {store.uri} with {ours}: "
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
            known = store.get([entry.key for entry in entries])
            small = (
                list(pool.map(thumbnail_from_photo, entries)) if thumbnails else [b""] * len(rows)
            )
            store.put(NewEntries(entries, rows, small))
            for entry in entries:
                (result.replaced if entry.key in known else result.added).append(entry.id)
            on_progress(len(rows))
            start = stop
    return result


def settings_here(store: Store, model: Model, max_side: int | None = None) -> ExtractSettings:
    """How this machine makes descriptors for an index; `max_side` if the index has none."""
    settings = store.header.settings
    return model.settings(settings.max_side or max_side, settings.scales, settings.power, None)


def thumbnail_from_photo(entry: Entry) -> bytes:
    """A new thumbnail of an entry's photo; empty if the photo cannot be read."""
    try:
        return thumbnail(PhotoFile(entry.path, entry.box).image(THUMBNAIL_SIDE))
    except ImageError:
        return b""


def _find_new(
    store: Store, window: Sequence[NewPhoto | ImageError], taken: set[str], result: Added
) -> list[NewPhoto]:
    """The photos to be described; those that are in the index are brought up to date.

    `taken` are the digests of photos that are being added.
    """
    result.errors += [str(each) for each in window if isinstance(each, ImageError)]
    photos = [each for each in window if not isinstance(each, ImageError)]
    by_key = store.get([entry.key for entry, _ in photos])
    by_digest = store.with_digests([entry.digest for entry, _ in photos])
    wanted: list[NewPhoto] = []
    moves: list[tuple[Entry, Entry]] = []
    for entry, file in photos:
        named, same = by_key.get(entry.key), by_digest.get(entry.digest)
        if named is not None and named.digest == entry.digest:
            same = named
        if same == entry:
            result.unchanged.append(entry.id)
        elif entry.digest in taken:
            result.copies.append(entry.id)
        elif named is not None and named != same and _elsewhere(named, entry):
            result.errors.append(
                f"{entry.path}: another photo is in {store.uri} as {entry.id}, from {named.path}; "
                "give this one another name"
            )
        elif same is None:
            taken.add(entry.digest)
            wanted.append((entry, file))
        elif same is named and not _elsewhere(named, entry):
            moves.append((same, entry))
        elif not _file_unchanged(same):
            taken.add(entry.digest)
            moves.append((same, entry))
        else:
            result.copies.append(entry.id)
    _move(store, moves)
    result.updated += [entry.id for _, entry in moves]
    return wanted


def _elsewhere(present: Entry, entry: Entry) -> bool:
    """Whether an entry is of a file in another place, which is still there."""
    return present.path not in ("", entry.path) and Path(present.path).exists()


def _file_unchanged(entry: Entry) -> bool:
    """Whether an entry's file holds what it held: names may have changed hands since."""
    try:
        return PhotoFile(entry.path, entry.box).digest() == entry.digest
    except ImageError:
        return False


def _move(store: Store, moves: Sequence[tuple[Entry, Entry]]) -> None:
    """Rewrite entries with the descriptors and thumbnails they have."""
    if not moves:
        return
    keys = [old.key for old, _ in moves]
    small = [store.thumbnail(key) or b"" for key in keys]
    new = [entry for _, entry in moves]
    moved = NewEntries(new, store.vectors(np.array(keys, np.int64)), small)
    # First: after a kill between the two, the next run finds new photos, and not two of each.
    store.remove(sorted(set(keys) - {entry.key for entry in new}))
    store.put(moved)


def _read_photo(images: Images, position: int) -> NewPhoto | ImageError:
    file, name = images.file(position), images.ids[position]
    if file.box is not None:
        name += "#" + ",".join(f"{edge:g}" for edge in file.box)
    try:
        file = file.read()
        width, height = file.size()
    except ImageError as error:
        return error
    attributes = {} if images.attributes is None else dict(images.attributes[position])
    return Entry(name, file.path, width, height, file.box, file.digest(), attributes), file


def _comparable(settings: ExtractSettings) -> str:
    return ", ".join(f"{k} {v}" for k, v in settings if k != "precision")
