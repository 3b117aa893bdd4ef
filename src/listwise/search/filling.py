"""Add photos to an index part by part, and skip those that it already holds."""

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from pathlib import Path

import numpy as np
from PIL import Image

from listwise.data import Decoding, ImageError, Images, PhotoFile, decode_photos
from listwise.data.catalog import photos_of
from listwise.data.given import image_files, is_one_photo
from listwise.data.photos import THUMBNAIL_SIDE, thumbnail
from listwise.descriptors import DescriptorFile, Model
from listwise.descriptors.extract import PART
from listwise.descriptors.settings import ExtractSettings
from listwise.descriptors.storage import is_descriptor_file
from listwise.errors import InputError
from listwise.machine import core_count
from listwise.search.entries import LABEL, Entry, NewEntries, in_parts
from listwise.search.store import Store

# Photos looked up together: at most this many, and about this many bytes, held in memory.
WINDOW = 8192
WINDOW_BYTES = 2**28
READ = 64  # files read together
LOCAL_PART = 256  # entries whose local features are written in one step
LARGE = 1024  # a JPEG file is decoded at a fraction of its size if its sides stay this long

NewPhoto = tuple[Entry, PhotoFile]
"""A new entry, and its file with the content."""

Source = str | Path | Images | DescriptorFile
Sources = Source | Sequence[Source]
"""A folder, a table, a text list, an image file, a descriptor file, the name of a data set, or a
list of these."""


@dataclass
class Added:
    """What happened to the photos that were added: lists of ids.

    Attributes:
        added: new entries.
        replaced: entries whose file has new content.
        updated: entries whose path or attributes have changed, or that got local features.
        unchanged: entries that were already in the index.
        copies: photos with the content of another entry, which were not added.
        errors: one line for each photo that could not be added.
    """

    added: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def open_sources(given: Sources) -> list[Images | DescriptorFile]:
    """Open photos and descriptor files in the given order; consecutive image files are joined."""
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
                f"an index stores the paths of its photos: add files, not {type(source).__name__}"
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
    result: Added | None = None,
) -> Added:
    """Add new and changed photos to a store.

    Photos are committed part by part, so the same call resumes after an interruption. A photo is
    identified by its content: a photo that is in the index is not described again, and is one
    entry under whatever names. If the file of that entry does not exist any more, the photo has
    moved, and its entry gets the new path. An entry keeps its attributes unless the photo comes
    with new ones.

    Args:
        store: the store of an index.
        model: the model of the index.
        images: the photos.
        thumbnails: store a thumbnail of each photo.
        workers: the number of processes that decode; chosen from the cores by default.
        max_side: the long side that larger photos are reduced to, in an index without a maximum.
        on_progress: called with the number of photos that were just processed.
        result: what an earlier attempt has done, to be completed; photos that it has added count
            as added, not as unchanged.
    """
    store.refresh()  # another process may store local features since
    store.header.check(model.fingerprint, store.uri)
    size = PART["cuda" if model.device.type == "cuda" else "cpu"]
    result = Added() if result is None else result
    before = {*result.added, *result.replaced, *result.updated}
    result.unchanged, result.copies, result.errors = [], [], []
    waiting: deque[tuple[Entry, bool]] = deque()
    with (
        closing(_new_photos(store, images, result, waiting, on_progress)) as files,
        closing(
            model.describe_parts(
                files,
                repeat(size),
                settings_here(store, model, max_side),
                photos=len(images),
                thumbnails=thumbnails,
                local=_encoder(store),
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
                store.put(NewEntries(entries, found.descriptors, found.thumbnails, found.local))
            result.errors += found.errors
            for entry, known in new:
                (result.replaced if known else result.added).append(entry.id)
    result.unchanged = [name for name in result.unchanged if name not in before]
    return result


def _new_photos(
    store: Store,
    images: Images,
    result: Added,
    waiting: deque[tuple[Entry, bool]],
    on_progress: Callable[[int], object],
) -> Generator[PhotoFile, None, None]:
    """Yield the photos to describe with their content, and update the entries of the others.

    Appends to `waiting` the entry of each photo, and whether the index has an entry of its id.
    """
    taken: set[str] = set()
    for window in _windows(images):
        wanted = deque(_find_new(store, window, taken, result))
        on_progress(len(window) - len(wanted))
        known = store.get([entry.key for entry, _ in wanted])
        window.clear()  # only the photos that are still to be described stay in memory
        while wanted:
            entry, file = wanted.popleft()
            waiting.append((entry, entry.key in known))
            yield file


def _windows(images: Images) -> Iterator[list[NewPhoto | ImageError]]:
    """Read photos in groups; each file is read once and stays in memory while it is needed."""
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
    """Add the rows of a descriptor file to a store; they replace entries with the same ids.

    Args:
        store: the store of an index with the model and the settings of the file.
        file: a descriptor file; its rows [n, C] become n entries.
        root: the folder that the ids are relative to. It determines the paths of the entries,
            and thumbnails are made of the photos that are readable there.
        thumbnails: store a thumbnail of each photo.
        on_progress: called with the number of rows that were just processed.
    """
    store.refresh()  # another process may store local features since
    store.header.check(file.model, store.uri)
    theirs, ours = (each.without_precision() for each in (file.settings, store.header.settings))
    if theirs != ours:
        raise InputError(
            f"{file.path} was made with {theirs}, the index {store.uri} with {ours}: "
            "extract the photos with the settings of the index"
        )
    name, rows_of_it = Counter(file.ids).most_common(1)[0] if len(file) else ("", 1)
    if rows_of_it > 1:
        raise InputError(
            f"{file.path} has {rows_of_it} rows for {name}, but an index has one entry per id: "
            "add the photos themselves, or their table"
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
            entries = [
                replace(entry, attributes=known[entry.key].attributes)
                if entry.key in known
                else entry
                for entry in entries
            ]
            small = (
                list(pool.map(thumbnail_from_photo, entries)) if thumbnails else [b""] * len(rows)
            )
            local = list(pool.map(local_from_photo, entries)) if store.header.local else []
            store.put(NewEntries(entries, rows, small, local))
            for entry in entries:
                (result.replaced if entry.key in known else result.added).append(entry.id)
            on_progress(len(rows))
            start = stop
    return result


def add_local_features(
    store: Store,
    *,
    workers: int | None = None,
    on_progress: Callable[[int], object] = lambda count: None,
) -> Added:
    """Store the local features of all entries without them, and of photos that are added later.

    They are committed part by part, so the same call resumes after an interruption.

    Args:
        store: the store of an index.
        workers: the number of processes; one per core by default.
        on_progress: called with the number of entries that were just processed.
    """
    enable_local_features(store)
    result = Added()
    if workers is None:
        workers = core_count()
    for keys in in_parts(store.without_local(), LOCAL_PART):
        done: list[tuple[Entry, bytes]] = []
        how = Decoding(THUMBNAIL_SIDE, LARGE, local=_encoder(store))
        known = list(store.get(keys).values())
        changed = [entry for entry in known if not _file_unchanged(entry)]
        result.errors += [
            f"{entry.path}: missing or changed since it was added" for entry in changed
        ]
        on_progress(len(changed))
        entries = [entry for entry in known if entry not in changed]
        with closing(decode_photos(map(_file_of, entries), how, workers)) as photos:
            for entry, photo in zip(entries, photos, strict=True):
                if isinstance(photo, ImageError):
                    result.errors.append(str(photo))
                else:
                    done.append((entry, photo.local))
                on_progress(1)
        store.put_local([entry for entry, _ in done], [local for _, local in done])
        result.updated += [entry.id for entry, _ in done]
    return result


def enable_local_features(store: Store) -> None:
    """Store local features of photos from now on, if the extra that extracts them is installed."""
    # Imported first: without the extra, the index stays as it is.
    import listwise.local.compact  # noqa: F401

    store.store_local()


def local_from_photo(entry: Entry) -> bytes:
    """Encode the local features of the photo of an entry; empty if it cannot be read."""
    from listwise.local.compact import compact_features

    how = Decoding(THUMBNAIL_SIDE, LARGE, local=compact_features)
    try:
        return _file_of(entry).decode(how).local
    except ImageError:
        return b""


def _file_of(entry: Entry) -> PhotoFile:
    return PhotoFile(entry.path, entry.box)


def _encoder(store: Store) -> Callable[[Image.Image, tuple[int, int], float], bytes] | None:
    """The function that encodes local features; None for an index without them."""
    if not store.header.local:
        return None
    from listwise.local.compact import compact_features

    return compact_features


def settings_here(store: Store, model: Model, max_side: int | None = None) -> ExtractSettings:
    """The settings with which this machine computes descriptors for an index.

    `max_side` applies to an index without a maximum.
    """
    settings = store.header.settings
    # Those of the index, whatever the model was tuned to since.
    longest = settings.max_side or max_side or 0
    return model.settings(longest, settings.scales, settings.power)


def thumbnail_from_photo(entry: Entry) -> bytes:
    """Make a thumbnail of the photo of an entry; empty if the photo cannot be read."""
    try:
        return thumbnail(PhotoFile(entry.path, entry.box).image(THUMBNAIL_SIDE))
    except ImageError:
        return b""


def _find_new(
    store: Store, window: Sequence[NewPhoto | ImageError], taken: set[str], result: Added
) -> list[NewPhoto]:
    """Find the photos to describe, and update the entries of those that are in the index.

    `taken` has the digests of photos that are being added.
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
        present = named or same
        if present is not None:
            entry = replace(entry, attributes=_kept_attributes(present, entry))
        if same == entry:
            result.unchanged.append(entry.id)
        elif entry.digest in taken:
            result.copies.append(entry.id)
        elif named is not None and named != same and _elsewhere(named, entry):
            result.errors.append(
                f"{entry.path}: another photo is in {store.uri} with the id {entry.id} "
                f"({named.path}): rename one of them"
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


def _kept_attributes(present: Entry, entry: Entry) -> Mapping[str, str]:
    """The attributes of a photo that is added again: the new ones, and the label it was given."""
    if not entry.attributes:
        return present.attributes
    label = {name: text for name, text in present.attributes.items() if name == LABEL}
    return label | dict(entry.attributes)


def _elsewhere(present: Entry, entry: Entry) -> bool:
    """Whether an entry belongs to another file, which still exists."""
    return present.path not in ("", entry.path) and Path(present.path).exists()


def _file_unchanged(entry: Entry) -> bool:
    """Whether the file of an entry still has the same content."""
    try:
        return entry.digest in ("", PhotoFile(entry.path, entry.box).digest())
    except ImageError:
        return False


def _move(store: Store, moves: Sequence[tuple[Entry, Entry]]) -> None:
    """Write entries under new ids or paths, with the same descriptors and thumbnails."""
    if not moves:
        return
    keys = [old.key for old, _ in moves]
    thumbnails = store.thumbnails(keys)
    small = [thumbnails.get(key, b"") for key in keys]
    new = [entry for _, entry in moves]
    codes = store.local(keys)
    local = [codes.get(key, b"") for key in keys]
    moved = NewEntries(new, store.vectors(np.array(keys, np.int64)), small, local)
    # Remove first: after a kill in between, the next run finds new photos and no duplicates.
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
