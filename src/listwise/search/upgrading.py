"""Upgrade an index to another model while it is searched, and roll it back.

Both fill another generation of the index from the current one, part by part, until the two have the
same entries. Then changes are held back for a moment, the last differences are copied, and one
record is replaced. A process that is killed leaves the current generation as it is, and the next
call continues with what the other generation has.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path

import numpy as np
from rich.filesize import decimal

from listwise.data import ImageError, PhotoFile
from listwise.descriptors import Model
from listwise.descriptors.extract import PART
from listwise.errors import InputError
from listwise.progress import counting
from listwise.search.entries import Entry, Keys, NewEntries, as_row, in_parts
from listwise.search.filling import READ, settings_here
from listwise.search.generation import Generation, header_of
from listwise.search.store import IndexHeader, Note, SearchIntent, Store

_FEW = 32  # entries that may be described while changes are held back
_PASSES = 10  # after this many, more may be
_LOOKED_UP = 1000  # entries that are read together
_SAMPLE = 8  # photos that are described to estimate the time


@dataclass(frozen=True)
class UpgradeResult:
    """What an upgrade or a rollback did.

    Attributes:
        generation: the number of the generation that is searched now.
        entries: the number of its entries.
        described: the number of photos that were described.
        skipped: a line for each entry that was left out because its photo is missing, has changed
            or cannot be read.
    """

    generation: int
    entries: int
    described: int = 0
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class UpgradeEstimate:
    """What an upgrade takes.

    Attributes:
        photos: the number of photos to describe.
        seconds: the time on this machine; None for a few photos.
        bytes: the disk space of the new generation.
    """

    photos: int
    seconds: float | None
    bytes: int

    def __str__(self) -> str:
        spent = "" if self.seconds is None else f", about {_duration(self.seconds)}"
        return f"{self.photos} photos to describe{spent}, about {decimal(self.bytes)} of disk space"


@dataclass(frozen=True)
class UpgradeOptions:
    """How an upgrade or a rollback runs; `Index.upgrade` explains the values."""

    skip_missing: bool = False
    workers: int | None = None
    progress: bool | None = None
    on_note: Note = lambda note: None


def upgrade_generation(current: Generation, model: Model, options: UpgradeOptions) -> UpgradeResult:
    """Describe all entries with another model, and search the new descriptors from then on."""
    store = current.store
    if model.folder is None and (model.whitening or not model.name):
        raise InputError("save the model first: servers and later commands load it from its folder")
    store.refresh()
    settings = {} if model.tuned else store.header.settings.arguments()
    settings.pop("precision", None)
    header = header_of(model, **settings)
    with store.upgrading():
        if not store.is_current():
            raise store.upgraded()
        if _same_descriptors(store.header, header):
            return UpgradeResult(store.generation, len(store))
        target, exact = _begin(store, header, options)
        with target:
            copy = _Copy(store, Generation(target, model), exact, options)
            options.on_note(
                f"upgrading {store.uri} from the model {_name(store.header)} to {_name(header)}: "
                f"{copy.estimate()}; searches use the earlier model until all photos are described"
            )
            return copy.run()


def roll_back(current: Generation, model: Model | None, options: UpgradeOptions) -> UpgradeResult:
    """Search the previous generation again, after the photos that were added since are in it.

    `model` is the model of that generation; by default it is loaded from where it was.
    """
    store = current.store
    with store.upgrading():
        number = store.record().previous
        if not store.is_current():
            raise store.upgraded()
        if number is None:
            raise InputError(
                f"{store.uri} has no earlier generation to return to: it was not upgraded, or the "
                "earlier one was discarded"
            )
        with store.open_generation(number, aside=True) as target:
            if model is not None:  # a student computes other descriptors than its teacher
                target.header.check(model.fingerprint, target.uri)
            # Loaded in any case: an index without its model cannot be searched.
            earlier = Generation(target, model or Generation(target, None, current.device).model)
            return _Copy(store, earlier, False, options).run()


def discard_generations(store: Store) -> None:
    """Delete all generations but the current one."""
    # Changes wait, because removals also change the previous generation.
    with store.upgrading(), store.pausing():
        store.save_record(store.record().alone())
        store.drop_generations()


def _begin(store: Store, header: IndexHeader, options: UpgradeOptions) -> tuple[Store, bool]:
    """The generation to fill, and whether it may have no other entries than the current one."""
    record = store.record()
    if record.building is not None:
        target = store.create_generation(record.building, header)
        if _same_descriptors(target.header, header):
            return target, True
        target.close()
        _refuse(store, header, options)  # before it is deleted
        options.on_note(f"discarding an unfinished upgrade to the model {_name(target.header)}")
    if record.previous is not None:
        target = store.open_generation(record.previous, aside=True)
        if _same_descriptors(target.header, header):
            return target, False
        target.close()
        _refuse(store, header, options)  # before it is deleted
    record = record.begun()
    assert record.building is not None
    with store.pausing():  # removals also change the previous generation
        store.save_record(record)
        store.drop_generations()
    return store.create_generation(record.building, header), True


class _Copy:
    """Fills a generation from the current one, and switches to it."""

    def __init__(
        self, source: Store, generation: Generation, exact: bool, options: UpgradeOptions
    ) -> None:
        self._source = source
        self._target = generation.store
        self._generation = generation
        self._exact = exact
        self._options = options
        self._described = 0
        self._written: set[int] = set()  # keys, if not `exact`
        # By key: the version of the entry, and the reason.
        self._failed: dict[int, tuple[list[int] | None, str]] = {}
        self._versions: tuple[Keys, Keys] = np.zeros(0, np.int64), np.zeros((0, 3), np.int64)

    def run(self) -> UpgradeResult:
        """Copy until nothing differs, then switch."""
        _refuse_missing(self._source, self._differences()[0], self._options)
        for number in range(_PASSES):
            changed, removed = self._differences()
            self._apply(changed, removed)
            if number and len(changed) <= _FEW:
                break
        self._refuse_failed()
        self._tune()
        while not self._switch():
            self._apply(*self._differences())
        skipped = [reason for _, reason in self._failed.values()]
        return UpgradeResult(
            self._target.generation, len(self._target), self._described, sorted(skipped)
        )

    def estimate(self) -> UpgradeEstimate:
        """Estimate the time and the disk space, and refuse a disk that is too small."""
        changed, _ = self._differences()
        needed = _require_space(self._source, changed, self._target.header.dim)
        return UpgradeEstimate(len(changed), self._seconds(changed), needed)

    def _seconds(self, changed: Keys) -> float | None:
        sample = _sample(self._source, changed).values()
        files = [PhotoFile(entry.path, entry.box) for entry in sample if Path(entry.path).exists()]
        count = min(_SAMPLE, len(changed) // 8, len(files) - 1)
        if count < 1:
            return None
        model = self._generation.model
        settings = settings_here(self._target, model)
        # The first photo prepares the network.
        parts = model.describe_parts(files[: count + 1], [1, count], settings, workers=0)
        with closing(parts):
            next(parts)
            started = time.perf_counter()
            next(parts)
        return (time.perf_counter() - started) / count * len(changed)

    def _differences(self) -> tuple[Keys, Keys]:
        """Keys of entries to copy, and of entries to remove from the other generation."""
        self._source.refresh()
        if self._source.header.local and not self._target.header.local:
            self._target.store_local()
        keys, versions = _sorted(*self._source.versions())
        known, theirs = _sorted(*self._target.versions())
        self._versions = keys, versions
        places = np.searchsorted(known, keys)
        same = np.zeros(len(keys), bool)
        inside = places < len(known)
        same[inside] = known[places[inside]] == keys[inside]
        same[same] = (theirs[places[same]] == versions[same]).all(axis=1)
        for key, (version, _) in list(self._failed.items()):
            now = self._version(key)
            if now is None:
                del self._failed[key]  # it was removed
            elif now == version:
                same[np.searchsorted(keys, key)] = True
        gone = known[~np.isin(known, keys)]
        if not self._exact:
            # Others were left out of the current generation; removals are made in both.
            gone = gone[np.isin(gone, np.array(list(self._written), np.int64))]
        return keys[~same], gone

    def _version(self, key: int) -> list[int] | None:
        """The version of an entry at the last comparison; None if the index had no such entry."""
        keys, versions = self._versions
        place = int(np.searchsorted(keys, key))
        found: list[int] | None = None
        if place < len(keys) and keys[place] == key:
            found = versions[place].tolist()
        return found

    def _apply(self, changed: Keys, removed: Keys) -> None:
        """Copy entries, and describe those whose photo is new to the other generation."""
        self._target.remove(removed.tolist())
        waiting: deque[Entry] = deque()
        label, show = "describing", self._options.progress
        with counting(label, len(changed), show) as advance, ThreadPoolExecutor() as pool:
            files = self._new_photos(changed, waiting, pool, advance)
            with closing(files):
                first = next(files, None)
                if first is None:
                    return  # nothing to describe, so the model is not needed
                self._describe(_with_first(first, files), waiting, len(changed), advance)

    def _describe(
        self,
        files: Generator[PhotoFile, None, None],
        waiting: deque[Entry],
        photos: int,
        advance: Callable[[int], object],
    ) -> None:
        model = self._generation.model
        size = PART["cuda" if model.device.type == "cuda" else "cpu"]
        settings = settings_here(self._target, model)
        parts = model.describe_parts(
            files,
            repeat(size),
            settings,
            photos=photos,
            workers=self._options.workers,
            on_progress=advance,
        )
        with closing(files), closing(parts):
            for found in parts:
                part = [waiting.popleft() for _ in range(len(found.kept) + len(found.errors))]
                kept = set(found.kept)
                unread = [entry for place, entry in enumerate(part) if place not in kept]
                self._put([part[place] for place in found.kept], found.descriptors)
                self._described += len(kept)
                for entry, reason in zip(unread, found.errors, strict=True):
                    self._fail(entry, reason)

    def _new_photos(
        self,
        keys: Keys,
        waiting: deque[Entry],
        pool: ThreadPoolExecutor,
        advance: Callable[[int], object],
    ) -> Generator[PhotoFile, None, None]:
        """Yield the photos to describe, and copy the entries whose photo is described already."""
        for part in in_parts(keys.tolist(), _LOOKED_UP):
            entries, known = self._source.get(part), self._target.get(part)
            copied = [
                entry
                for key, entry in entries.items()
                if entry.digest and key in known and known[key].digest == entry.digest
            ]
            if copied:
                described = self._target.vectors([entry.key for entry in copied])
                self._put(copied, described)
                advance(len(copied))
            done = {entry.key for entry in copied}
            wanted = [entry for key, entry in entries.items() if key not in done]
            for some in in_parts(wanted, READ):
                for entry, file in zip(some, pool.map(_read, some), strict=True):
                    if isinstance(file, str):
                        self._fail(entry, file)
                        advance(1)
                    else:
                        waiting.append(entry)
                        yield file

    def _put(self, entries: Sequence[Entry], descriptors: np.ndarray) -> None:
        """Write entries with their thumbnails and local features, unless they were removed."""
        keys = [entry.key for entry in entries]
        small, local = self._source.thumbnails(keys), self._source.local(keys)
        new = NewEntries(
            entries,
            descriptors,
            [small.get(key, b"") for key in keys],
            [local.get(key, b"") for key in keys] if self._target.header.local else (),
        )
        if not self._exact:
            self._written.update(keys)
        for key in keys:
            self._failed.pop(key, None)
        self._target.put(new)
        self._target.remove(sorted(set(keys) - set(self._source.get(keys))))

    def _fail(self, entry: Entry, reason: str) -> None:
        """Leave an entry out, in the version that was compared."""
        self._target.remove([entry.key])
        self._failed[entry.key] = self._version(entry.key), f"{entry.id}: {reason}"

    def _refuse_failed(self) -> None:
        if self._failed and not self._options.skip_missing:
            first = next(iter(self._failed.values()))[1]
            raise InputError(
                f"{len(self._failed)} photos of {self._source.uri} cannot be described ({first}): "
                "add the changed ones again with listwise index add, remove their entries, or "
                "leave them out of the result with `skip_missing`; what was described is kept"
            )

    def _tune(self) -> None:
        """Choose the search method of the other generation for the limits of the current one."""
        ours, theirs = self._source.facts(), self._target.facts()
        if ours["recall"] is not None and theirs["recall"] is None:
            self._target.tune(SearchIntent.model_validate(ours["intent"]), self._options.on_note)

    def _switch(self) -> bool:
        """Copy the last differences while changes are held back, and switch; False if too many."""
        with self._source.pausing():
            for _ in range(_PASSES):
                changed, removed = self._differences()
                if len(changed) > _FEW:
                    return False
                if not len(changed) and not len(removed):
                    self._refuse_failed()
                    self._source.switch(self._target.generation)
                    return True
                self._apply(changed, removed)
        return False


def _refuse(store: Store, header: IndexHeader, options: UpgradeOptions) -> None:
    """Refuse an upgrade that cannot succeed, before another generation is deleted for it."""
    keys = store.versions()[0]
    _refuse_missing(store, keys, options)
    _require_space(store, keys, header.dim)


def _require_space(source: Store, changed: Keys, dim: int) -> int:
    """Estimate the bytes that copies of entries take, and refuse a disk that is too small."""
    sample = _sample(source, changed)
    size = 0.0
    if sample:
        small, local = source.thumbnails(list(sample)), source.local(list(sample))
        parts = [*small.values(), *local.values()]
        rows = sum(len(str(as_row(entry))) for entry in sample.values())
        size = (sum(map(len, parts)) + rows) / len(sample) + 4 * dim
    needed, free = round(size * len(changed)), source.free_bytes()
    if free is not None and needed > free:
        earlier = source.record().previous is not None
        room = ", for example with listwise index discard" if earlier else ""
        raise InputError(
            f"an upgrade of {source.uri} needs about {decimal(needed)} of disk space, and "
            f"{decimal(free)} are free: make room first{room}"
        )
    return needed


def _sample(store: Store, keys: Keys) -> dict[int, Entry]:
    """A few of the entries, evenly spread."""
    return store.get(_spread(keys, 4 * _SAMPLE).tolist())


def _refuse_missing(source: Store, changed: Keys, options: UpgradeOptions) -> None:
    """Refuse to begin if photos are missing, before hours of work."""
    if options.skip_missing:
        return
    missing: list[str] = []
    with ThreadPoolExecutor() as pool:
        for part in in_parts(changed.tolist(), _LOOKED_UP):
            paths = [entry.path for entry in source.get(part).values()]
            found = pool.map(lambda path: bool(path) and Path(path).exists(), paths)
            missing += [path for path, there in zip(paths, found, strict=True) if not there]
    if missing:
        raise InputError(
            f"{len(missing)} of the {len(source)} photos of {source.uri} do not exist any more "
            f"(first: {missing[0] or 'no path is stored'}): restore them, remove their entries, "
            "or leave them out of the result with `skip_missing`"
        )


def _with_first(
    first: PhotoFile, rest: Generator[PhotoFile, None, None]
) -> Generator[PhotoFile, None, None]:
    yield first
    yield from rest


def _read(entry: Entry) -> PhotoFile | str:
    """The photo of an entry with its content, or why it cannot be used."""
    try:
        file = PhotoFile(entry.path, entry.box).read()
        if entry.digest and file.digest() != entry.digest:
            return f"{entry.path} has changed since it was added"
    except ImageError as error:
        return str(error)
    return file


def _sorted(keys: Keys, versions: Keys) -> tuple[Keys, Keys]:
    order = np.argsort(keys)
    return keys[order], versions[order]


def _spread(keys: Keys, count: int) -> Keys:
    """At most `count` of the keys, evenly spread."""
    return keys[:: max(1, -(-len(keys) // count))]


def _same_descriptors(one: IndexHeader, other: IndexHeader) -> bool:
    settings = one.settings.without_precision() == other.settings.without_precision()
    return one.model == other.model and settings


def _name(header: IndexHeader) -> str:
    return header.model_folder or header.model_name or header.model[:12]


def _duration(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(1.0, seconds):.0f} s"
