"""Add photos to an index part by part, and skip those that it already holds."""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from PIL import Image

from listwise.data import Decoding, ImageError, Images, PhotoFile
from listwise.data.catalog import image_files, is_one_photo, photos_of
from listwise.data.memory import Table, is_one_in_memory, is_table
from listwise.data.photos import THUMBNAIL_SIDE
from listwise.errors import InputError
from listwise.machine import core_count, drain
from listwise.search.entries import (
    ENTRY,
    LABEL,
    Entry,
    NewEntries,
    entry_key,
    in_parts,
    read_entry,
)
from listwise.search.generation import Generation
from listwise.search.store import Store, with_contents

if TYPE_CHECKING:
    from listwise.descriptors import DescriptorFile, Model
    from listwise.models.embed import Described

# Files that are read together and held in memory: at most READ, and no more after READ_BYTES.
READ, READ_BYTES = 64, 2**26
# Photos that are committed together: those of a few seconds, and no more than these.
COMMITTED = {"cpu": 64, "cuda": 2048}
COMMIT_SECONDS = 3.0
LOCAL_PART = 256  # entries whose local features are written in one step
LARGE = 1024  # a JPEG file is decoded at a fraction of its size if its sides stay this long

Item = TypeVar("Item")
NewPhoto = tuple[Entry, PhotoFile]
"""A new entry, and its file with the content."""
Moves = list[tuple[Entry, Entry]]
"""Entries, and what replaces them with the same descriptors and thumbnails."""

Source: TypeAlias = "str | Path | Images | DescriptorFile"
Sources: TypeAlias = "Source | Sequence[Source] | Table"
"""A folder, a table, a text list, an image file, a descriptor file, the name of a data set, or a
list of these; or a DataFrame or a list of dictionaries."""


@dataclass
class Added:
    """What happened to the photos that were added: lists of ids.

    Attributes:
        added: new entries.
        replaced: entries whose file has new content.
        moved: entries whose file has moved: the earlier id and the new one.
        updated: entries whose attributes have changed, or that got local features.
        unchanged: entries that were already in the index.
        copies: photos that were not added: the path, and the id of the entry with this content.
        errors: one line for each photo that could not be added.
    """

    added: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    moved: list[tuple[str, str]] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    copies: list[tuple[str, str]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def open_sources(given: Sources) -> "list[Images | DescriptorFile]":
    """Open photos and descriptor files in the given order; consecutive image files are joined."""
    from listwise.descriptors import DescriptorFile
    from listwise.descriptors.storage import is_descriptor_file

    if is_table(given):
        return [photos_of(given)]  # type: ignore[arg-type]
    sources: list[Any] = [given]
    if isinstance(given, Iterable) and not (isinstance(given, str) or is_one_in_memory(given)):
        sources = list(given)
    found: list[Images | DescriptorFile] = []
    files: list[str | Path] = []
    for source in sources:
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
    model: "Model",
    images: Images,
    *,
    thumbnails: bool = True,
    exif: bool = False,
    workers: int | None = None,
    on_progress: Callable[[int], object] = lambda count: None,
) -> Added:
    """Add new and changed photos to a store.

    Photos are committed every few seconds, so the same call resumes after an interruption. A photo
    is identified by its content: a photo that is in the index is not described again, and is one
    entry under whatever names. If the file of that entry does not exist any more, the photo has
    moved, and its entry gets the new path. An entry keeps its attributes unless the photo comes
    with new ones.

    Args:
        store: the store of an index.
        model: the model of the index.
        images: the photos.
        thumbnails: store a thumbnail of each photo.
        exif: add the attributes of `PhotoFile.exif`, unless the photo comes with them.
        workers: the number of processes that decode; chosen from the cores by default.
        on_progress: called with the number of photos that were just processed.
    """
    options: dict[str, Any] = {"thumbnails": thumbnails, "workers": workers}
    return _add(Generation(store, model), images, exif, on_progress, **options)


def _add(
    generation: Generation,
    images: Images,
    exif: bool = False,
    on_progress: Callable[[int], object] = lambda count: None,
    **options: Any,
) -> Added:
    """Add photos as `add_photos` does; the model is loaded when one has to be described."""
    store, result = generation.store, Added()
    store.refresh()  # another process may store local features since

    def move(moves: Moves) -> None:
        move_entries(store, moves)

    photos = _new_photos(store, images, result, move, exif, on_progress)
    given = {"local": local_encoder(store), "on_progress": on_progress}
    options = {"thumbnails": True, **given, **options}
    with closing(describe_entries(generation, photos, **options)) as parts:
        for entries, _, found in parts:
            known = store.get([entry.key for entry in entries])
            if entries:
                store.put(NewEntries(entries, found.descriptors, found.thumbnails, found.local))
            result.errors += found.errors
            for entry in entries:
                (result.replaced if entry.key in known else result.added).append(entry.id)
    return result


def add_images(generation: Generation, images: Images, **options: Any) -> Added:
    """Add photos as `add_photos` does, and remember their copies and their folder."""
    store = generation.store
    added = _add(generation, images, **options)
    remember_copies(store, added.copies)
    if images.folder and images.folder not in store.header.folders:
        store.refresh()  # another process may have added a folder since
        folders = dict.fromkeys((*store.header.folders, images.folder))
        store.change_header(folders=tuple(folders))
    return added


def preview_photos(
    store: Store, images: Images, exif: bool, on_progress: Callable[[int], object]
) -> Added:
    """What `add_photos` would do; nothing is changed."""
    store.refresh()
    result = Added()
    for entry, _ in _new_photos(store, images, result, lambda moves: None, exif, on_progress):
        stays = store.get([entry.key]) and entry.id not in dict(result.moved)
        (result.replaced if stays else result.added).append(entry.id)
        on_progress(1)
    return result


def remember_copies(store: Store, copies: Iterable[tuple[str, str]]) -> None:
    """Write the paths of photos that were not added to the entries with their content.

    `copies` is that of `Added`.
    """
    paths: dict[int, list[str]] = {}
    for path, name in copies:
        paths.setdefault(entry_key(name), []).append(path)
    for part in in_parts([*paths], LOCAL_PART):
        moves: Moves = []
        for key, entry in store.get(part).items():
            others = tuple(path for path in paths[key] if path not in (entry.path, *entry.copies))
            if others:
                moves.append((entry, replace(entry, copies=entry.copies + others)))
        move_entries(store, moves)


def forget_copies(store: Store, copies: Mapping[int, Collection[str]]) -> int:
    """Remove copies, given by key and path, from their entries, and return their number."""
    moves: Moves = []
    for key, entry in store.get([*copies]).items():
        left = tuple(path for path in entry.copies if path not in copies[key])
        moves.append((entry, replace(entry, copies=left)))
    move_entries(store, moves)
    return sum(map(len, copies.values()))


def current_copies(entry: Entry) -> tuple[str, ...]:
    """The copies of an entry whose files still have its content."""
    moved = (replace(entry, path=path) for path in entry.copies)
    return tuple(each.path for each in moved if file_unchanged(each))


def describe_entries(
    generation: Generation, photos: Iterator[NewPhoto], **options: Any
) -> "Generator[tuple[list[Entry], list[Entry], Described], None, None]":
    """Describe new entries part by part: those that were described, the others, and the result.

    The model is loaded when the first photo is there. The options are those of
    `Model.describe_parts`.
    """
    first = deque(islice(photos, 1))
    if not first:
        return
    waiting: deque[Entry] = deque()  # of the photos that are being decoded, without their content

    def files() -> Iterator[PhotoFile]:
        for entry, file in chain(drain(first), photos):
            waiting.append(entry)
            yield file

    model = generation.model  # a student of the index's model may only search
    generation.store.header.check(model.fingerprint, generation.store.uri)
    sizes = part_sizes(COMMITTED["cuda" if model.device.type == "cuda" else "cpu"])
    parts = model.describe_parts(files(), sizes, generation.settings, **options)
    with closing(parts):
        for found in parts:
            part = [waiting.popleft() for _ in range(len(found.kept) + len(found.errors))]
            left_out = sorted(set(range(len(part))) - set(found.kept))
            yield [part[place] for place in found.kept], [part[place] for place in left_out], found


def part_sizes(most: int) -> Iterator[int]:
    """Yield how many photos to commit together, by the time that the photos before took."""
    size = max(1, most // 32)
    while True:
        started = time.monotonic()
        yield size
        rate = size / max(time.monotonic() - started, 1e-6)
        size = max(1, min(most, 2 * size, int(rate * COMMIT_SECONDS)))


def read_groups(photos: Iterable[Item], file: Callable[[Item], PhotoFile]) -> Iterator[list[Item]]:
    """Group photos whose files are read together and held in memory."""
    from listwise.data.pipeline import file_bytes, in_groups

    return in_groups(photos, READ, READ_BYTES, lambda photo: file_bytes(file(photo)))


def _new_photos(
    store: Store,
    images: Images,
    result: Added,
    move: Callable[[Moves], object],
    exif: bool,
    on_progress: Callable[[int], object],
) -> Iterator[NewPhoto]:
    """Find the photos to describe, with their content, and update the entries of the others.

    Photos with the name of an entry of other content come last: this content may have moved.
    """
    taken: dict[str, str] = {}
    later: dict[int, str] = {}  # digests of these photos by position

    @cache
    def keys_of_paths() -> dict[str, int]:
        wanted = set(images.paths)
        rows = chain.from_iterable(store.rows(["path", "box"]) if images.folder else ())
        return {row["path"]: row["key"] for row in rows if row["path"] in wanted and not row["box"]}

    with ThreadPoolExecutor() as pool:
        for last in (False, True):
            for positions in read_groups([*later] if last else range(len(images)), images.file):
                read = dict(
                    zip(positions, pool.map(partial(_read_photo, images), positions), strict=True)
                )
                wanted = deque(
                    _find_new(store, read, taken, result, move, exif, later, last, keys_of_paths)
                )
                on_progress(len(read.keys() - later) - len(wanted))
                del read
                yield from drain(wanted)


def add_descriptors(
    store: Store,
    file: "DescriptorFile",
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
            "extract the photos again with "
            f"listwise extract {store.header.model_folder or 'MODEL'} PHOTOS {file.path} {ours}"
        )
    name, rows_of_it = Counter(file.ids).most_common(1)[0] if len(file) else ("", 1)
    if rows_of_it > 1:
        raise InputError(
            f"{file.path} has {rows_of_it} rows for {name}, but an index has one entry per id: "
            "add the photos themselves, or their table"
        )
    base = None if root is None else Path(root).absolute()
    how = Decoding(None, THUMBNAIL_SIDE, thumbnail=thumbnails)
    if store.header.local:
        how = Decoding(THUMBNAIL_SIDE, LARGE, thumbnail=thumbnails, local=local_encoder(store))
    result = Added(errors=list(file.header.unreadable))
    start = 0
    with ThreadPoolExecutor() as pool:
        for rows in file.batches():
            stop = start + len(rows)
            names, sizes = file.ids[start:stop], file.sizes[start:stop].tolist()
            known = store.get(list(map(entry_key, names)))
            entries = []
            for name, size in zip(names, sizes, strict=True):
                new = Entry(name, str(base / name) if base else "", *size)
                old = known.get(new.key, new)
                entries.append(replace(new, attributes=old.attributes))
            contents = pool.map(partial(_photo_content, how), entries)
            store.put(NewEntries(entries, rows, *zip(*contents, strict=True)))
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
    from listwise.data import decode_photos

    enable_local_features(store)
    result = Added()
    if workers is None:
        workers = core_count()
    missing = [key for key, size in store.local_sizes().items() if not size]
    for keys in in_parts(missing, LOCAL_PART):
        done: list[tuple[Entry, bytes]] = []
        how = Decoding(THUMBNAIL_SIDE, LARGE, local=local_encoder(store))
        known = list(store.get(keys).values())
        changed = [entry for entry in known if not file_unchanged(entry)]
        result.errors += [
            f"{entry.path}: missing or changed since it was added" for entry in changed
        ]
        on_progress(len(changed))
        entries = [entry for entry in known if entry not in changed]
        with closing(decode_photos(map(file_of, entries), how, workers)) as photos:
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

    store.change_header(local=True)


def _photo_content(how: Decoding, entry: Entry) -> tuple[bytes, bytes]:
    """The thumbnail and the local features of an entry; empty if its photo cannot be read."""
    if not how.thumbnail and not how.local:
        return b"", b""
    try:
        photo = file_of(entry).decode(how)
    except ImageError:
        return b"", b""
    return photo.thumbnail, photo.local


def file_of(entry: Entry) -> PhotoFile:
    """The file of the photo of an entry, with its box."""
    return PhotoFile(entry.path, entry.box)


def local_encoder(store: Store) -> Callable[[Image.Image, tuple[int, int], float], bytes] | None:
    """The function that encodes local features; None for an index without them."""
    if not store.header.local:
        return None
    from listwise.local.compact import compact_features

    return compact_features


def thumbnail_from_photo(entry: Entry) -> bytes:
    """Make a thumbnail of the photo of an entry; empty if the photo cannot be read."""
    return _photo_content(Decoding(None, THUMBNAIL_SIDE, thumbnail=True), entry)[0]


def _find_new(
    store: Store,
    window: Mapping[int, NewPhoto | ImageError],
    taken: dict[str, str],
    result: Added,
    move: Callable[[Moves], object],
    exif: bool,
    later: dict[int, str],
    last: bool,
    keys_of_paths: Callable[[], Mapping[str, int]],
) -> list[NewPhoto]:
    """Find the photos to describe, and update the entries of those that are in the index.

    `taken` has the digests and ids of photos that are being added, `later` the digests by position
    of photos that wait for the `last` windows. `keys_of_paths` returns the keys of whole photos.
    """
    result.errors += [str(each) for each in window.values() if isinstance(each, ImageError)]
    photos = {at: each for at, each in window.items() if not isinstance(each, ImageError)}
    by_key = store.get([entry.key for entry, _ in photos.values()])
    by_digest = _entries_by_digest(store, [entry.digest for entry, _ in photos.values()])
    moving = set(later.values()) if last else set()
    if last:
        for position in window:
            del later[position]
    wanted: list[NewPhoto] = []
    moves: Moves = []
    overwritten: list[Entry] = []
    for position, (entry, file) in photos.items():
        named, twins = by_key.get(entry.key), by_digest.get(entry.digest, [])
        same = min(twins, key=partial(_distance, entry), default=None)
        if named is None or named.path != entry.path:
            listed = same
            if (same is None or same.path != entry.path) and entry.box is None:
                found = store.get([keys_of_paths().get(entry.path, -1)])
                listed = next(iter(found.values()), None)
            if listed is not None and listed.path == entry.path:  # under another id
                entry, named = replace(entry, id=listed.id), listed
        other = named if named is not None and named.digest != entry.digest else None
        elsewhere = named is not None and _elsewhere(named, entry)
        if other is not None and other.digest and not elsewhere and not last:
            later[position] = entry.digest
            continue
        present = same or (None if other is not None and other.digest in moving else other)
        kept = {} if present is None else _kept_attributes(present, entry)
        new = file.exif() if exif else {}
        attributes = {**kept, **new} if same is None else {**new, **kept}
        entry = replace(entry, attributes=attributes | dict(entry.attributes))
        if same is not None:
            others = tuple(path for path in same.copies if path != entry.path)
            entry = replace(entry, copies=others)
        # Those that a kill during a move left.
        stale = [each for each in twins if each is not same and not file_unchanged(each)]
        if same == entry and not stale:
            result.unchanged.append(entry.id)
        elif entry.digest in taken:
            result.copies.append((entry.path, taken[entry.digest]))
        elif other is not None and elsewhere:
            result.errors.append(
                f"{entry.path}: another photo is in {store.uri} with the id {entry.id} "
                f"({other.path}): rename one of them"
            )
        elif same is not None and (other or named is None or elsewhere) and file_unchanged(same):
            result.copies.append((entry.path, same.id))
        else:
            taken[entry.digest] = entry.id
            overwritten += [other] if other is not None else []
            if same is None:
                wanted.append((entry, file))
            moves += [(each, entry) for each in (same, *stale) if each not in (None, entry)]
    for old, entry in moves:
        if (old.id, old.path) == (entry.id, entry.path):
            result.updated.append(entry.id)
        else:
            result.moved.append((old.id.removesuffix(f"@{old.digest}"), entry.id))
    # The content of these is at the name of a photo in a later window: keep them until then.
    waiting = set(later.values()) - {old.digest for old, _ in moves}
    asides = [each for each in overwritten if each.digest in waiting]
    move([*moves, *((each, replace(each, id=f"{each.id}@{each.digest}")) for each in asides)])
    return wanted


def _entries_by_digest(store: Store, digests: Sequence[str]) -> dict[str, list[Entry]]:
    """All entries with these digests: several of one digest after a kill during a move."""
    found: dict[str, list[Entry]] = {}
    rows = store.rows(ENTRY, sorted({digest for digest in digests if digest}), "digest")
    for row in chain.from_iterable(rows):
        found.setdefault(row["digest"], []).append(read_entry(store.uri, row))
    return found


def _distance(entry: Entry, other: Entry) -> tuple[bool, bool, bool]:
    """How far an entry with the same content is from a photo; the nearest is its own."""
    return other.key != entry.key, other.path != entry.path, not Path(other.path).exists()


def _kept_attributes(present: Entry, entry: Entry) -> Mapping[str, str]:
    """The attributes of a photo that is added again: the new ones, and the label it was given."""
    if not entry.attributes:
        return present.attributes
    label = {name: text for name, text in present.attributes.items() if name == LABEL}
    return label | dict(entry.attributes)


def _elsewhere(present: Entry, entry: Entry) -> bool:
    """Whether an entry belongs to another file, which still exists."""
    return present.path not in ("", entry.path) and Path(present.path).exists()


def file_unchanged(entry: Entry) -> bool:
    """Whether the file of an entry still has the same content."""
    try:
        return entry.digest in ("", file_of(entry).digest())
    except ImageError:
        return False


def move_entries(store: Store, moves: Moves) -> None:
    """Write entries with other values, with the same descriptors and thumbnails."""
    if not moves:
        return
    keys, new = [old.key for old, _ in moves], [entry for _, entry in moves]
    moved = with_contents(store, keys, new, store.vectors(np.array(keys, np.int64)))
    # Remove last: after a kill in between, the next run removes the entries that are left.
    store.put(moved)
    store.remove(sorted(set(keys) - {entry.key for entry in new}))


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
