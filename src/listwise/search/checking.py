"""Check an index for damage, and repair it from the photos."""

from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

import numpy as np

from listwise.data import ImageError, PhotoFile
from listwise.descriptors import Model
from listwise.descriptors.extract import PART
from listwise.search.checksums import EntryCheck
from listwise.search.entries import Entry, NewEntries, in_parts
from listwise.search.filling import local_from_photo, settings_here, thumbnail_from_photo
from listwise.search.store import Store

_PART = 256  # entries whose thumbnails or checksums are written in one step

Progress = Callable[[int], object]


@dataclass
class CheckResult:
    """What `Index.check` found. Entries are named by id, or by key if the id is damaged.

    Attributes:
        entries: the number of entries that were read.
        unverified: entries that an earlier version wrote without checksums. Only the norm of
            their descriptors was checked.
        files: damaged files, relative to the folder of the index.
        descriptors: entries with a damaged descriptor.
        values: entries whose id, path, size, box, digest or attributes are damaged.
        thumbnails: entries with a damaged thumbnail.
        local: entries with damaged local features.
        marks: damaged lines of the log of marks, which a repair removes.
        missing: entries whose photo does not exist any more. Search does not need it.
        changed: entries whose photo has other content than when it was added.
        repaired: files and entries that were repaired.
        removed: entries that were removed because their id or path is damaged; add their photos
            again.
        lost: entries that cannot be repaired because their photo is missing, changed or
            unreadable.
    """

    entries: int = 0
    unverified: int = 0
    files: list[str] = field(default_factory=list)
    descriptors: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    thumbnails: list[str] = field(default_factory=list)
    local: list[str] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    @property
    def damaged(self) -> int:
        """The number of damaged files and entries that were found."""
        return len(self._damage())

    @property
    def ok(self) -> bool:
        """Whether the index can be used: nothing is damaged, or everything was repaired."""
        return self._damage() <= {*self.repaired, *self.removed}

    def _damage(self) -> set[str]:
        """Names of damaged files, lines of the log of marks, and entries."""
        entries = {*self.descriptors, *self.values, *self.thumbnails, *self.local}
        return {*self.files, *self.marks, *entries}


def check_store(
    store: Store,
    open_model: Callable[[], Model],
    *,
    photos: bool = False,
    repair: bool = False,
    on_progress: Progress = lambda count: None,
) -> CheckResult:
    """Read everything that a store holds and compare it with its checksums.

    Args:
        store: the store of an index.
        open_model: returns the model of the index; it is called if descriptors are recomputed.
        photos: read the photos too and compare them with their digests.
        repair: repair what is damaged, as `Index.check` describes.
        on_progress: is called with the number of entries that were just checked.
    """
    result = CheckResult(files=store.damaged_files(store.uri))
    if repair and result.files:
        result.repaired += store.repair_files(store.uri)
    result.marks = store.mark_log.damaged()
    if repair and result.marks:
        store.mark_log.drop(result.marks)
        result.repaired += result.marks
    damaged: list[EntryCheck] = []
    with ThreadPoolExecutor() as pool:
        for part in store.examine():
            for found in part:
                _record(result, found)
            damaged += [found for found in part if not found.sound]
            known = [found.entry for found in part if found.entry and found.entry.path]
            states = pool.map(_photo_state if photos else _photo_exists, known)
            for entry, state in zip(known, states, strict=True):
                if state:
                    getattr(result, state).append(entry.id)
            on_progress(len(part))
    if repair:
        _repair_entries(store, open_model, damaged, result)
        if result.unverified and not result.lost:
            store.add_checksums()
    return result


def _record(result: CheckResult, found: EntryCheck) -> None:
    result.entries += 1
    result.unverified += found.sound and not found.verified
    if found.entry is None:
        result.values.append(found.name)
        return
    if not found.descriptor:
        result.descriptors.append(found.name)
    if not found.thumbnail:
        result.thumbnails.append(found.name)
    if not found.local:
        result.local.append(found.name)


def _photo_exists(entry: Entry) -> str:
    return "" if Path(entry.path).exists() else "missing"


def _photo_state(entry: Entry) -> str:
    """The field of `CheckResult` that an entry belongs to: "missing", "changed" or none."""
    if not Path(entry.path).exists():
        return "missing"
    return "" if _is_photo_of(entry) else "changed"


def _is_photo_of(entry: Entry) -> bool:
    """Whether an entry's file is readable and has the content that was described."""
    try:
        return not entry.digest or PhotoFile(entry.path, entry.box).digest() == entry.digest
    except ImageError:
        return False


def _repair_entries(
    store: Store,
    open_model: Callable[[], Model],
    damaged: Sequence[EntryCheck],
    result: CheckResult,
) -> None:
    nameless = [found for found in damaged if found.entry is None]
    if nameless:
        store.discard([found.place for found in nameless])
        result.removed += [found.name for found in nameless]
    broken = [found for found in damaged if found.entry and not found.descriptor]
    usable = [found for found in broken if found.entry and _is_photo_of(found.entry)]
    result.lost += [found.name for found in broken if found not in usable]
    if usable:
        for new in _described(store, open_model(), usable, result):
            store.put(new)
            result.repaired += [entry.id for entry in new.entries]
    others = [found for found in damaged if found.entry and found.descriptor]
    for part in in_parts(others, _PART):
        entries = [found.entry for found in part]
        changed = {entry.key for entry in entries if not _is_photo_of(entry)}
        rows = store.vectors(np.array([entry.key for entry in entries], np.int64))
        small = [
            (store.thumbnail(found.entry.key) or b"")
            if found.thumbnail
            else (b"" if found.entry.key in changed else thumbnail_from_photo(found.entry))
            for found in part
        ]
        store.put(NewEntries(entries, rows, small, _local_codes(store, part, changed)))
        for entry in entries:
            (result.lost if entry.key in changed else result.repaired).append(entry.id)


def _local_codes(
    store: Store, damaged: Sequence[EntryCheck], changed: Container[int] = ()
) -> list[bytes]:
    """The local features of entries, computed again where they are damaged.

    They are empty if they are damaged and the photo has changed; `changed` has the keys.
    """
    if not store.header.local:
        return []
    entries = [found.entry for found in damaged if found.entry]
    sound = [found.entry.key for found in damaged if found.entry and found.local]
    known = store.local(sound)
    return [
        known.get(entry.key, b"")
        if entry.key in sound or entry.key in changed
        else local_from_photo(entry)
        for entry in entries
    ]


def _described(
    store: Store, model: Model, damaged: Sequence[EntryCheck], result: CheckResult
) -> Iterator[NewEntries]:
    """Entries with new descriptors, part by part; those that fail are added to `result.lost`."""
    store.header.check(model.fingerprint, store.uri)
    size = PART["cuda" if model.device.type == "cuda" else "cpu"]
    files = (PhotoFile(found.entry.path, found.entry.box) for found in damaged if found.entry)
    settings = settings_here(store, model)
    start = 0
    with closing(model.describe_parts(files, repeat(size), settings, thumbnails=True)) as parts:
        for part in parts:
            count = len(part.kept) + len(part.errors)
            some = damaged[start : start + count]
            start += count
            done = [some[place] for place in part.kept]
            entries = [found.entry for found in done if found.entry]
            small = [
                (store.thumbnail(entry.key) or b"") if found.thumbnail else new
                for found, entry, new in zip(done, entries, part.thumbnails, strict=True)
            ]
            result.lost += [found.name for found in some if found not in done]
            yield NewEntries(entries, part.descriptors, small, _local_codes(store, done))
