"""Bring an index up to date with the folders of its photos, once or whenever they change."""

import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue

from listwise.data.catalog import photos_of
from listwise.errors import InputError
from listwise.optional import requires
from listwise.progress import counting
from listwise.search.entries import Entry
from listwise.search.filling import (
    Added,
    add_images,
    current_copies,
    move_entries,
    preview_photos,
)
from listwise.search.generation import Generation
from listwise.search.store import Store

_QUIET = 1.0  # seconds without a change after which changes are reported
_MOST = 1000  # changed files that are reported together
_DELETED = "if photos were deleted, give their ids to listwise index remove"
_READING = ("opened", "closed_no_write")  # events of programs that only read a file


@dataclass
class Synced(Added):
    """What happened to the photos of folders: lists of ids, and those of `Added`.

    Attributes:
        missing: entries whose photo is not in its folder any more, and that were kept.
        removed: entries whose photo is not in its folder any more, and that were removed.
    """

    missing: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        """Whether anything but unchanged photos was found."""
        return any(names for kind, names in vars(self).items() if kind != "unchanged")


def followed_folders(store: Store, folders: str | Path | Sequence[str | Path] | None) -> list[str]:
    """The absolute paths of folders; by default of those that were added to an index."""
    given = [folders] if isinstance(folders, str | Path) else folders or store.header.folders
    if not given:
        raise InputError(
            f"no folder was added to {store.uri}: give the folder of its photos as `folders`"
        )
    found = []
    for folder in given:
        path = os.path.abspath(Path(folder).expanduser())
        known = path in store.header.folders
        if os.path.isdir(path) or (known and missing_entries(store, path)):
            found.append(path)  # a disk that is not connected is reported by the sync
        elif folders:
            raise InputError(f"{folder}: no such folder; nothing was changed")
    if found and not any(map(os.path.isdir, found)):
        raise InputError(f"{found[0]}: no such folder; nothing was changed; {_DELETED}")
    return found


def missing_entries(store: Store, folder: str, copies: Collection[str] = ()) -> list[Entry]:
    """The entries whose photo was in a folder and does not exist any more.

    `copies` are paths of files that have the content of another entry now.
    """
    below = os.path.join(folder, "")
    keys = [
        row["key"]
        for part in store.rows(["path", "box"])
        for row in part
        if row["path"].startswith(below)
        and (not os.path.exists(row["path"]) or (row["path"] in copies and not row["box"]))
    ]
    return sorted(store.get(keys).values(), key=lambda entry: entry.id)


def sync_folder(
    generation: Generation,
    folder: str,
    *,
    prune: bool = False,
    dry_run: bool = False,
    only: Collection[str] | None = None,
    exif: bool = False,
    workers: int | None = None,
    progress: bool | None = None,
) -> Synced:
    """Bring a generation of an index up to date with a folder, as `Index.sync` does."""
    store = generation.store
    try:
        if not os.path.isdir(folder):
            raise InputError(f"{folder}: no such folder")
        images = photos_of(folder)
    except InputError as error:
        if folder not in store.header.folders:
            raise
        # The other folders are synced.
        ids = [entry.id for entry in missing_entries(store, folder)]
        return Synced(missing=ids, errors=[f"{error}; nothing was changed; {_DELETED}"])
    there = _per_folder(folder, images.paths)
    if only is not None:
        changed = set(map(os.path.abspath, only))
        images = images.subset([i for i, path in enumerate(images.paths) if path in changed])
    with counting("reading", len(images), progress) as advance:
        if dry_run:
            added = preview_photos(store, images, exif, advance)
        else:
            options = {"exif": exif, "workers": workers, "on_progress": advance}
            added = add_images(generation, images, **options)
    done = Synced(**vars(added))
    moved = {name for name, _ in added.moved}
    missing = missing_entries(store, folder, {path for path, _ in added.copies})
    gone = [entry for entry in missing if entry.id not in moved]
    if not prune:
        done.missing += [entry.id for entry in gone]
        return done
    found = [replace(entry, copies=current_copies(entry)) for entry in gone]
    kept, lost = ([entry for entry in found if bool(entry.copies) is has] for has in (True, False))
    copied = [_at_first_copy(store, entry, folder) for entry in kept]
    done.moved += [(old.id, new.id) for old, new in zip(kept, copied, strict=True)]
    for part, count in sorted(_per_folder(folder, [entry.path for entry in lost]).items()):
        # Perhaps a disk that is not connected; of a folder that was deleted, nothing is left.
        if count > there[part] and (part == folder or os.path.lexists(part)):
            numbers = f"{count} photos are missing and {there[part]} were found"
            done.errors.append(f"{part}: {numbers}; none was removed; {_DELETED}")
            done.missing += [entry.id for entry in lost]
            lost = []
            break
    done.removed += [entry.id for entry in lost]
    if not dry_run:
        move_entries(store, list(zip(kept, copied, strict=True)))
        store.remove([entry.key for entry in lost])
    return done


def _at_first_copy(store: Store, entry: Entry, folder: str) -> Entry:
    """The entry with the path of a copy, and with its name, so that the earlier name is free."""
    path, *others = entry.copies
    moved = replace(entry, path=path, copies=tuple(others))
    named = replace(moved, id=path.removeprefix(os.path.join(folder, "")))
    given = entry.path != os.path.join(folder, entry.id)  # an id that is not the name in the folder
    return moved if given or store.get([named.key]) else named


def _per_folder(folder: str, paths: Sequence[str]) -> Counter[str]:
    """How many photos are in a folder and in each folder below it."""
    found: Counter[str] = Counter()
    for inner, count in Counter(map(os.path.dirname, paths)).items():
        while len(inner) > len(folder):
            found[inner] += count
            inner = os.path.dirname(inner)
        found[folder] += count
    return found


def watch_folders(folders: Sequence[str]) -> Iterator[set[str] | None]:
    """Yield None at once, then the paths of changed files whenever folders have changed.

    Changes are reported after a second without another one. None stands for all files: changes
    before the watch began are not known.
    """
    with requires("watch", "watching a folder"):
        from watchdog.events import FileSystemEvent, FileSystemEventHandler
        from watchdog.observers import Observer
    changed: SimpleQueue[str] = SimpleQueue()

    class Handler(FileSystemEventHandler):
        def on_any_event(self, event: FileSystemEvent) -> None:
            if event.event_type not in _READING:
                changed.put(os.fsdecode(event.src_path))
                changed.put(os.fsdecode(event.dest_path))

    observer, handler = Observer(), Handler()
    for folder in filter(os.path.isdir, folders):
        observer.schedule(handler, folder, recursive=True)
    observer.start()
    try:
        yield None
        while True:
            paths = {changed.get()}
            with suppress(Empty):
                while len(paths) < _MOST:
                    paths.add(changed.get(timeout=_QUIET))
            yield paths
    finally:
        observer.stop()
        observer.join()
