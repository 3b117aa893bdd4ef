"""Upgrade an index to another model while it is searched, roll it back, and compare the results.

Both fill another generation of the index from the current one, part by part, until the two have the
same entries. Then changes are held back for a moment, the last differences are copied, and one
record is replaced. A process that is killed leaves the current generation as it is, and the next
call continues with what the other generation has.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.filesize import decimal

from listwise.data import ImageError, PhotoFile
from listwise.errors import InputError
from listwise.progress import counting, readable_time
from listwise.search.entries import Entry, Keys, as_row, in_parts, spread
from listwise.search.filling import NewPhoto, describe_entries, file_of, read_groups
from listwise.search.generation import Generation, header_of
from listwise.search.hits import Hit, nearest_others
from listwise.search.methods import Note
from listwise.search.store import IndexHeader, Store, with_contents

if TYPE_CHECKING:
    from listwise.descriptors import Model

_FEW = 32  # entries that may be described while changes are held back
_LOOKED_UP = 1000  # entries that are read together
_SAMPLE = 8  # photos that are described to estimate the time
_SEARCHED = 64  # queries whose results are compared together


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
class UpgradeOptions:
    """How an upgrade or a rollback runs; `Index.upgrade` explains the values."""

    skip_missing: bool = False
    workers: int | None = None
    progress: bool | None = None
    on_note: Note = lambda note: None


def upgrade_generation(
    current: Generation, model: "Model", options: UpgradeOptions
) -> UpgradeResult:
    """Describe all entries with another model, and search the new descriptors from then on."""
    store = current.store
    if model.folder is None and (model.whitening or not model.name):
        raise InputError("save the model first: servers and later commands load it from its folder")
    store.refresh()
    settings = {} if model.tuned else store.header.settings.arguments()
    settings.pop("precision", None)
    header = header_of(model, **settings)
    with store.generations.upgrading():
        if _same_descriptors(store.header, header):
            return UpgradeResult(store.generation, len(store))
        with _begin(store, header, options) as target:
            return _Copy(store, Generation(target, model), options).run()


def roll_back(current: Generation, model: "Model | None", options: UpgradeOptions) -> UpgradeResult:
    """Search the previous generation again, after the photos that were added since are in it.

    `model` is the model of that generation; by default it is loaded from where it was.
    """
    store = current.store
    generations = store.generations
    with generations.upgrading():
        number = generations.record().previous
        if number is None:
            raise InputError(
                f"{store.uri} has no earlier generation to return to: it was not upgraded, or the "
                "earlier one was discarded"
            )
        with generations.open(number, aside=True) as target:
            if model is not None:  # a student computes other descriptors than its teacher
                target.header.check(model.fingerprint, target.uri)
            # Loaded in any case: an index without its model cannot be searched.
            earlier = Generation(target, model or Generation(target, None, current.device).model)
            return _Copy(store, earlier, options).run()


def discard_generations(store: Store) -> None:
    """Delete all generations but the current one."""
    # Changes wait, because removals also change the previous generation.
    generations = store.generations
    with generations.upgrading(), generations.pausing():
        generations.save_record(generations.record().alone())
        generations.drop_unused()


def _begin(store: Store, header: IndexHeader, options: UpgradeOptions) -> Store:
    """The generation to fill."""
    generations = store.generations
    record = generations.record()
    for number in record.numbers - {record.current}:
        unfinished = number == record.building
        # A process that was killed may have left only the number of an unfinished one.
        target = (
            generations.create(number, header)
            if unfinished
            else generations.open(number, aside=True)
        )
        if _same_descriptors(target.header, header):
            return target
        target.close()
        _refuse(store, [*store.versions()], header.dim, options)  # before it is deleted
        if unfinished:
            options.on_note(f"discarding an unfinished upgrade to the model {_name(target.header)}")
    building = record.latest + 1
    with generations.pausing():  # removals also change the previous generation
        generations.save_record(record.begun(building))
        generations.drop_unused()
    return generations.create(building, header)


class _Copy:
    """Fills a generation from the current one, and switches to it."""

    def __init__(self, source: Store, generation: Generation, options: UpgradeOptions) -> None:
        self._source, self._target = source, generation.store
        self._generation = generation
        self._options = options
        self._described = 0
        self._versions: dict[int, int] = {}  # of the entries, when they were compared
        # By key, the version of an entry that cannot be copied, and why.
        self._failed: dict[int, tuple[int, str]] = {}
        # Entries of an earlier generation that the current one left out. Removals are in both.
        self._left_out: set[int] = set()
        if source.generations.record().previous == self._target.generation:
            self._left_out = set(self._target.keys().tolist()) - set(source.keys().tolist())

    def run(self) -> UpgradeResult:
        """Copy until nothing differs, then switch."""
        source, target = self._source, self._target
        changed, _ = self._differences()
        needed = _refuse(source, changed, target.header.dim, self._options)
        seconds = self._seconds(changed)
        spent = "" if seconds is None else f", about {readable_time(seconds)}"
        self._options.on_note(
            f"changing {source.uri} from the model {_name(source.header)} to "
            f"{_name(target.header)}: {len(changed)} entries to describe or copy{spent}, about "
            f"{decimal(needed)} of disk space; searches use the earlier model until then"
        )
        for _ in range(2):  # the second time what has changed meanwhile
            self._apply(*self._differences())
        self._refuse_failed()
        self._tune()
        while not self._switch():
            self._apply(*self._differences())
        skipped = sorted(reason for _, reason in self._failed.values())
        return UpgradeResult(target.generation, len(target), self._described, skipped)

    def _seconds(self, changed: Sequence[int]) -> float | None:
        """Estimate the time by describing a few photos."""
        sample = _sample(self._source, changed).values()
        files = [file_of(entry) for entry in sample if Path(entry.path).exists()]
        count = min(_SAMPLE, len(changed) // 8, len(files) - 1)
        if count < 1:
            return None
        model, settings = self._generation.model, self._generation.settings
        # The first photo prepares the network.
        parts = model.describe_parts(files[: count + 1], [1, count], settings, workers=0)
        with closing(parts):
            next(parts)
            started = time.perf_counter()
            next(parts)
        return (time.perf_counter() - started) / count * len(changed)

    def _differences(self) -> tuple[list[int], set[int]]:
        """Keys of entries to copy, and of entries to remove from the other generation."""
        self._source.refresh()
        header = self._source.header
        self._target.change_header(local=header.local, folders=header.folders)
        self._versions = ours = self._source.versions()
        theirs = self._target.versions()
        # Without entries that were removed or replaced, or added again.
        self._failed = {key: each for key, each in self._failed.items() if ours.get(key) == each[0]}
        self._left_out -= ours.keys()
        same = {key for key, version in ours.items() if theirs.get(key) == version}
        changed = sorted(ours.keys() - same - self._failed.keys())
        return changed, theirs.keys() - ours.keys() - self._left_out

    def _apply(self, changed: Sequence[int], removed: Iterable[int]) -> None:
        """Copy entries, and describe those whose photo is new to the other generation."""
        self._target.remove(sorted(removed))
        label, show = "describing", self._options.progress
        with counting(label, len(changed), show) as advance, ThreadPoolExecutor() as pool:
            photos = self._new_photos(changed, pool, advance)
            options = {"workers": self._options.workers, "on_progress": advance}
            with closing(describe_entries(self._generation, photos, **options)) as parts:
                for entries, unread, found in parts:
                    self._put(entries, found.descriptors)
                    self._described += len(entries)
                    for entry, reason in zip(unread, found.errors, strict=True):
                        self._fail(entry, reason)

    def _new_photos(
        self,
        keys: Sequence[int],
        pool: ThreadPoolExecutor,
        advance: Callable[[int], object],
    ) -> Iterator[NewPhoto]:
        """Yield the photos to describe, and copy the entries whose photo is described already."""
        for part in in_parts(keys, _LOOKED_UP):
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
            for some in read_groups(wanted, file_of):
                for entry, file in zip(some, pool.map(_read, some), strict=True):
                    if isinstance(file, str):
                        self._fail(entry, file)
                        advance(1)
                    else:
                        yield entry, file

    def _put(self, entries: Sequence[Entry], descriptors: np.ndarray) -> None:
        """Write entries with their thumbnails and local features, unless they were removed."""
        keys = [entry.key for entry in entries]
        self._target.put(with_contents(self._source, keys, entries, descriptors))
        self._target.remove(sorted(set(keys) - set(self._source.get(keys))))

    def _fail(self, entry: Entry, reason: str) -> None:
        """Leave an entry out, in the version that was compared."""
        self._target.remove([entry.key])
        self._failed[entry.key] = self._versions[entry.key], f"{entry.id}: {reason}"

    def _refuse_failed(self) -> None:
        if self._failed and not self._options.skip_missing:
            _, first = next(iter(self._failed.values()))
            raise InputError(
                f"{len(self._failed)} photos of {self._source.uri} cannot be described ({first}): "
                "add the changed ones again with listwise index add, remove their entries, or "
                "leave them out of the result with `skip_missing`; what was described is kept"
            )

    def _tune(self) -> None:
        """Choose the search method of the other generation for the limits of the current one."""
        ours, theirs = self._source.method, self._target.method
        if ours.state.tuned is not None and theirs.state.tuned is None:
            theirs.tune(ours.state.intent, self._options.on_note)

    def _switch(self) -> bool:
        """Copy the last differences while changes are held back, and switch; False if too many."""
        with self._source.generations.pausing():
            changed, removed = self._differences()
            if len(changed) > _FEW:
                return False
            self._apply(changed, removed)
            self._refuse_failed()
            self._source.generations.switch(self._target.generation)
        return True


def _refuse(source: Store, changed: Sequence[int], dim: int, options: UpgradeOptions) -> int:
    """Refuse to begin if photos are missing or the disk is too small, before hours of work.

    Returns:
        An estimate of the bytes that copies of the entries take.
    """
    if not options.skip_missing:
        _refuse_missing(source, changed)
    sample = _sample(source, changed)
    size = 0.0
    if sample:
        kinds = (source.contents(kind, list(sample)) for kind in ("thumbnail", "local"))
        parts = [content for found in kinds for content in found.values()]
        rows = sum(len(str(as_row(entry))) for entry in sample.values())
        size = (sum(map(len, parts)) + rows) / len(sample) + 4 * dim
    needed, free = round(size * len(changed)), source.generations.free_bytes()
    if free is not None and needed > free:
        earlier = source.generations.record().previous is not None
        room = ", for example with listwise index discard" if earlier else ""
        raise InputError(
            f"an upgrade of {source.uri} needs about {decimal(needed)} of disk space, and "
            f"{decimal(free)} are free: make room first{room}"
        )
    return needed


def _sample(store: Store, keys: Sequence[int]) -> dict[int, Entry]:
    """A few of the entries, evenly spread."""
    return store.get(spread(np.array(keys, np.int64), 4 * _SAMPLE).tolist())


def _refuse_missing(source: Store, changed: Sequence[int]) -> None:
    missing: list[str] = []
    with ThreadPoolExecutor() as pool:
        for part in in_parts(changed, _LOOKED_UP):
            paths = [entry.path for entry in source.get(part).values()]
            found = pool.map(lambda path: bool(path) and Path(path).exists(), paths)
            missing += [path for path, there in zip(paths, found, strict=True) if not there]
    if missing:
        raise InputError(
            f"{len(missing)} of the {len(source)} photos of {source.uri} do not exist any more "
            f"(first: {missing[0] or 'no path is stored'}): restore them, remove their entries, "
            "or leave them out of the result with `skip_missing`"
        )


def _read(entry: Entry) -> PhotoFile | str:
    """The photo of an entry with its content, or why it cannot be used."""
    try:
        file = file_of(entry).read()
        if entry.digest and file.digest() != entry.digest:
            return f"{entry.path} has changed since it was added"
    except ImageError as error:
        return str(error)
    return file


def _same_descriptors(one: IndexHeader, other: IndexHeader) -> bool:
    settings = one.settings.without_precision() == other.settings.without_precision()
    return one.model == other.model and settings


def _name(header: IndexHeader) -> str:
    return header.model_folder or header.model_name or header.model[:12]


@dataclass(frozen=True, eq=False)
class ResultChange:
    """The results of one query before and after an upgrade.

    Attributes:
        query: the entry that was used as query; it is not among its results.
        before: the first results of the earlier generation, best first.
        after: the first results of the current generation, best first.
    """

    query: Entry
    before: Sequence[Hit]
    after: Sequence[Hit]

    @property
    def kept(self) -> int:
        """The number of results that are in both lists."""
        return len({hit.id for hit in self.before} & {hit.id for hit in self.after})


@dataclass(frozen=True, eq=False)
class UpgradeChanges:
    """How the results of some queries changed with the last upgrade or rollback.

    Attributes:
        k: the number of results that were compared.
        queries: one change per query, those with the fewest results in common first.
    """

    k: int
    queries: list[ResultChange] = field(default_factory=list)

    @property
    def kept(self) -> float:
        """The share of the results before that are among the results after, from 0 to 1."""
        before = sum(len(change.before) for change in self.queries)
        return sum(change.kept for change in self.queries) / before if before else 1.0

    @property
    def same_first(self) -> float:
        """The share of queries whose first result is the same, from 0 to 1."""
        same = [
            [hit.id for hit in change.before[:1]] == [hit.id for hit in change.after[:1]]
            for change in self.queries
        ]
        return sum(same) / len(same) if same else 1.0


def find_changes(store: Store, queries: int, k: int) -> UpgradeChanges:
    """Search by some entries in the current and the previous generation, and compare the results.

    The descriptors of the entries are in both, so no photo is read and no model is loaded.

    Args:
        store: the store of the current generation.
        queries: the number of entries to search by, drawn evenly from the entries of both.
        k: the number of results to compare.
    """
    if queries < 1 or k < 1:
        raise InputError("`queries` and `k` must be 1 or more")
    generations = store.generations
    number = generations.record().previous
    if number is None:
        raise InputError(
            f"{store.uri} has no earlier generation to compare with: it was not upgraded, or the "
            "earlier one was discarded"
        )
    with generations.open(number, aside=True) as earlier:
        common = np.intersect1d(store.keys(), earlier.keys())
        found = []
        for part in in_parts(spread(common, queries), _SEARCHED):
            entries = store.get(part.tolist())
            rows = zip(part, _results(earlier, part, k), _results(store, part, k), strict=True)
            for key, before, after in rows:
                if int(key) in entries:  # another process may have just removed it
                    found.append(ResultChange(entries[int(key)], before, after))
    return UpgradeChanges(k, sorted(found, key=lambda change: (change.kept, change.query.id)))


def _results(store: Store, keys: Keys, k: int) -> Iterator[list[Hit]]:
    """The nearest entries of each of these entries, without itself."""
    found = list(nearest_others(store, keys, k))
    entries = store.get(sorted({key for row in found for key, _ in row}))
    for row in found:
        yield [Hit(entries[key], score) for key, score in row if key in entries]
