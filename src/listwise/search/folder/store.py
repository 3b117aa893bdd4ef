"""An index in a folder: LanceDB holds the entries, FAISS searches their descriptors."""

import logging
import shlex
import shutil
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from math import isqrt
from pathlib import Path
from secrets import randbits
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import ArrayLike

from listwise.errors import InputError
from listwise.files import sync_folder, write_text
from listwise.search.checksums import (
    LOCAL_SUM,
    DamagedIndexError,
    EntryCheck,
    damage,
    examine_rows,
    new_sums,
    sound_descriptors,
)
from listwise.search.entries import Entry, Float32, Keys, NewEntries, in_parts, possible_keys
from listwise.search.filters import Filter, attribute_names, unknown_attribute
from listwise.search.folder import guards
from listwise.search.folder.attributes import matching_rows
from listwise.search.folder.compressed import CompressedSearch, trained_index, training_size
from listwise.search.folder.descriptor_file import (
    DescriptorFile,
    DescriptorWriter,
    SavedDescriptors,
)
from listwise.search.folder.flat import FlatSearch
from listwise.search.folder.generations import (
    RECORDS,
    damaged_records,
    drop_unused,
    generation_folder,
    has_record,
    read_record,
    sound_record,
    write_record,
)
from listwise.search.folder.keymap import KeyMap
from listwise.search.folder.mark_file import MarkFile
from listwise.search.folder.mirror import DescriptorSearch, Mirror
from listwise.search.folder.search_cache import (
    SearchState,
    damaged_caches,
    read_files,
    read_state,
    save_files,
    save_state,
)
from listwise.search.folder.table import EntryTable, RawRows, Rows, as_rows, disk_bytes, sums_of
from listwise.search.folder.tuning import (
    compression_note,
    exact_will_do,
    set_probes,
    shortcomings,
)
from listwise.search.generations import GenerationRecord
from listwise.search.measuring import ExactNeighbors, measure, median_milliseconds
from listwise.search.store import IndexHeader, Note, SearchIntent, Store, TuningResult

_HEADER = "index.json"
_LOCK = "lock"
_UPGRADE_LOCK = "upgrade.lock"
_OURS = {_LOCK, "entries.lance", "guards", f"{_HEADER}.tmp"}  # files of an unfinished index
_SUMMED = 4096  # entries whose checksums are added in one commit
_FILTERS = 8  # filters whose results are kept in memory
_SAMPLE = 200  # entries that are used as queries for measurements
_COPIED = 64 << 20  # bytes: a copy of the descriptors is kept if they are larger
_MOSTLY = 0.9  # share of the entries that a copy must have to be used again

_log = logging.getLogger(__name__)


class FolderStore(Store):
    """A store of entries in LanceDB, searched with FAISS. Several threads may use it."""

    engine = "embedded"

    def __init__(
        self, root: Path, header: IndexHeader, table: EntryTable, number: int, aside: bool = False
    ) -> None:
        self.uri = str(root)
        self.generation = number
        self._root = root
        self._folder = generation_folder(root, number)
        self._aside = aside  # may be changed although it is not the current generation
        self._earlier: FolderStore | None = None  # the previous generation, to remove entries from
        self._table = table
        self.header = self._with_local(header)
        self._changes = threading.RLock()  # guards changes of the table and the mirror
        self._making = threading.RLock()  # guards the creation of a mirror; acquired first
        self._mirror: Mirror[DescriptorSearch] | None = None  # read when it is first needed
        self._matching: dict[Filter, tuple[int, Keys]] = {}  # recent filters, by version
        self._examined = -1  # the version that `examine` read

    @staticmethod
    def exists(place: str) -> bool:
        """Whether a folder holds an index."""
        folder = Path(place)
        # Without the header of generation 0, a record shows that the index was upgraded.
        return (folder / _HEADER).is_file() or has_record(folder)

    @classmethod
    def open(cls, place: str) -> "FolderStore":
        """Open the index in a folder."""
        root = Path(place)
        return cls._open(root, read_record(root).current)

    @classmethod
    def _open(cls, root: Path, number: int, aside: bool = False) -> "FolderStore":
        folder = generation_folder(root, number)
        header = _read_header(folder, root)
        # Before LanceDB reads them: a wrong number in its files can end the process.
        damaged = guards.damaged_files(folder)
        if damaged and aside:
            files = ", ".join(str((folder / file).relative_to(root)) for file in damaged[:3])
            raise DamagedIndexError(
                f"{files} of {root} changed after it was written. It belongs to an earlier or "
                "unfinished generation, which listwise index check does not repair: delete it with "
                f"listwise index discard {shlex.quote(str(root))}"
            )
        if damaged:
            raise damage(str(root), f"{', '.join(damaged[:3])} changed after it was written")
        return cls(root, header, EntryTable.open(folder, str(root)), number, aside)

    @classmethod
    def create(cls, place: str, header: IndexHeader) -> "FolderStore":
        """Create an empty index in a new or empty folder."""
        folder = Path(place)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            foreign = {path.name for path in folder.iterdir()} - _OURS
            if foreign and not cls.exists(place):
                raise InputError(
                    f"{folder} holds other files ({min(foreign)}): give another folder"
                )
            return cls._create(folder, header, 0)
        except OSError as error:
            raise InputError(f"cannot create an index at {folder}: {error.strerror}") from error

    @classmethod
    def _create(
        cls, root: Path, header: IndexHeader, number: int, aside: bool = False
    ) -> "FolderStore":
        folder = generation_folder(root, number)
        with FileLock(folder / _LOCK):
            if (folder / _HEADER).exists():
                raise InputError(f"an index at {root} exists already")
            table = EntryTable.create(folder, header.dim, str(root))
            guards.sync(folder)
            # Written last: a folder without it is not an index, and the next attempt restarts.
            write_text(folder / _HEADER, header.model_dump_json(indent=2))
            guards.update(folder)
        return cls(root, header, table, number, aside)

    def __len__(self) -> int:
        return self._table.count()

    def put(self, new: NewEntries) -> None:
        """Write entries in one commit; they replace entries with the same keys."""
        if not len(new.entries):
            return
        with self._commit():
            self.check_new(new)
            new = _distinct(new)
            keys = np.array([entry.key for entry in new.entries], np.int64)
            stamp = randbits(63)
            self._table.put(new, stamp, replacing=self._table.has_any(keys))
            if self._mirror is not None:
                self._mirror.put(Rows(keys, np.full(len(keys), stamp), new.descriptors))

    def remove(self, keys: Sequence[int]) -> int:
        """Remove entries in one commit and return their number."""
        keys = possible_keys(keys)
        if not keys:
            return 0
        with self._commit():
            # First from the generation that a rollback would return to: after a kill in between,
            # the entries are still there to be removed again.
            self._remove_earlier(keys)
            count = self._table.remove(keys)
            if self._mirror is not None:
                self._mirror.remove(np.array(keys, np.int64))
        return count

    def set_attribute(self, keys: Sequence[int], name: str, value: str) -> int:
        """Set an attribute of entries in one commit, or remove it if the value is empty."""
        keys = possible_keys(keys)
        if not keys:
            return 0
        with self._commit():
            return self._table.set_attribute(keys, name, value)

    @property
    def mark_log(self) -> MarkFile:
        """The log of the marks, which all generations share."""
        return MarkFile(self._root)

    def get(self, keys: Sequence[int]) -> dict[int, Entry]:
        """Return the entries with these keys; unknown keys are left out."""
        return {entry.key: entry for entry in self._table.get(possible_keys(keys))}

    def with_digests(self, digests: Sequence[str]) -> dict[str, Entry]:
        """Return entries by digest; unknown digests are left out."""
        return {entry.digest: entry for entry in self._table.with_digests(digests)}

    def page(self, start: int, count: int, where: Filter | None = None) -> list[Entry]:
        """Return `count` entries from position `start`, in the order of the table."""
        if where is None:
            return self._table.page(start, count)
        keys = self.matching(where)[start : start + count].tolist()
        found = self.get(keys)
        return [found[key] for key in keys if key in found]

    def matching(self, where: Filter) -> Keys:
        """Return the keys of all entries that match a filter, in the order of the table."""
        version = self._table.version
        kept = self._matching.get(where)
        if kept is not None and kept[0] == version:
            return kept[1]
        found: list[Keys] = [np.zeros(0, np.int64)]
        unknown = set(where.names)
        for keys, texts in self._table.attributes():
            mask, missing = matching_rows(where, texts)
            found.append(keys[mask])
            unknown &= set(missing)
        if unknown:
            raise unknown_attribute(min(unknown), attribute_names(self.attribute_texts()))
        matching = np.concatenate(found)
        with self._changes:
            while len(self._matching) >= _FILTERS:
                self._matching.pop(next(iter(self._matching)))
            self._matching[where] = version, matching
        return matching

    def attribute_texts(self) -> Iterator[list[str]]:
        """Read the attributes of all entries as JSON texts, part by part."""
        return (texts.to_pylist() for _, texts in self._table.attributes())

    def thumbnails(self, keys: Sequence[int]) -> dict[int, bytes]:
        """Return the thumbnails of entries by key; entries without one are left out."""
        return self._table.thumbnails(possible_keys(keys))

    def store_local(self) -> None:
        """Store local features of photos from now on; the header says so."""
        if self.header.local:
            return
        with self._commit():
            self._table.add_local_columns()
        self.header = self._with_local(self.header)

    def local(self, keys: Sequence[int]) -> dict[int, bytes]:
        """Return the encoded local features of entries; entries without them are left out."""
        return self._table.local(possible_keys(keys))

    def put_local(self, entries: Sequence[Entry], local: Sequence[bytes]) -> None:
        """Write the local features of n entries in one commit."""
        keys = [entry.key for entry in entries]
        digests = {entry.key: entry.digest for entry in entries}
        if keys:
            with self._commit():
                self._table.put_local(digests, dict(zip(keys, local, strict=True)))

    def without_local(self) -> list[int]:
        """Return the keys of the entries without local features."""
        return self._table.without_local()

    def count_local(self) -> tuple[int, int]:
        """Return the number of entries with local features, and the bytes of all of them."""
        sums = self._table.local_sums()
        return len(sums), int((sums >> 32).sum())

    def search(
        self, queries: ArrayLike, k: int, /, where: Filter | None = None
    ) -> tuple[Float32, Keys]:
        """Find the k nearest entries, best first: [Q, C] -> scores and keys, both [Q, k']."""
        vectors = self.check_queries(queries, k)
        among = None if where is None else self.matching(where)
        return self._searched().search.search(vectors, k, among)

    def descriptors(self, keys: Keys) -> Iterator[tuple[Keys, Float32]]:
        """Read descriptors by key, from memory if possible, otherwise from the table."""
        mirror = self._mirror
        if mirror is not None and isinstance(mirror.search, FlatSearch):
            known, rows = mirror.search.vectors(keys)
            yield keys[known], rows
            keys = keys[~known]
        search = None if mirror is None else mirror.search
        read = search.rows if isinstance(search, CompressedSearch) else self._table.rows
        for part in read(keys):
            yield part.keys, part.descriptors

    def tune(self, intent: SearchIntent, on_note: Note = lambda note: None) -> TuningResult:
        """Choose a search method that meets the intent, measure it, and save the choice.

        A compressed search that was chosen for the same intent and about as many entries is kept.
        """
        with self._making:
            before = read_state(self._folder)
            entries, dim = len(self), self.header.dim
            was_exact = before is not None and not before.compressed
            if exact_will_do(intent, entries, dim, is_exact=was_exact):
                tuned = self._tune_exact(intent, before)
            else:
                kept = None if before is None else self._kept(before)
                if before and kept and before.intent == intent and entries < 2 * before.entries:
                    self._take(kept)
                    if not self._needs_copy(kept.search):
                        return before.tuned
                if kept is None:
                    on_note(compression_note(entries, dim))
                tuned = self._tune_compressed(intent, before, kept)
            lacking = shortcomings(intent, tuned)
            if lacking:
                on_note(f"no search method meets all limits; the best one has {', '.join(lacking)}")
            return tuned

    def facts(self) -> dict[str, Any]:
        """Size on disk, search method and measurements."""
        state = read_state(self._folder)
        return {
            "bytes": disk_bytes(self._root),
            "intent": (state.intent if state else SearchIntent()).model_dump(mode="json"),
            "method": state.tuned.method if state else "exact, not measured",
            "recall": state.tuned.recall if state else None,
            "milliseconds": state.tuned.milliseconds if state else None,
            "memory": state.tuned.memory if state else None,
        }

    def examine(self) -> Iterator[list[EntryCheck]]:
        """Read every entry and compare it with its checksums, part by part."""
        self._examined = self._table.version
        for raw in self._table.raw():
            yield _examine(raw)

    def discard(self, places: Sequence[int]) -> None:
        """Remove damaged entries by the `place` of their `EntryCheck`."""
        with self._commit():
            if self._table.version != self._examined:  # rows may have other numbers now
                raise InputError(f"{self.uri} was changed during the check: check it again")
            self._table.remove_rows(places)

    def add_checksums(self) -> None:
        """Store the checksums of entries that an earlier version wrote without them."""
        with self._commit():
            self._table.add_sum_columns()
        for keys in in_parts(self._table.stamps()[0].tolist(), _SUMMED):
            entries = list(self.get(keys).values())
            some = [entry.key for entry in entries]
            known = self.thumbnails(some)
            small = [known.get(key, b"") for key in some]
            new = NewEntries(entries, self.vectors(np.array(some, np.int64)), small)
            with self._commit():
                self._table.set_sums(some, new_sums(new))

    @staticmethod
    def damaged_files(place: str) -> list[str]:
        """Names of the damaged files of an index, relative to its folder."""
        root = Path(place)
        records, record = damaged_records(root), sound_record(root)
        if record is None:
            return records
        folder = generation_folder(root, record.current)
        files = guards.damaged_files(folder) + guards.damaged_copies(folder)
        files += damaged_caches(folder) + _lost_changes(folder)
        return records + [str((folder / file).relative_to(root)) for file in files]

    @classmethod
    def repair_files(cls, place: str) -> list[str]:
        """Repair the damaged files of an index and return their names.

        Raises:
            DamagedIndexError: a file cannot be repaired.
        """
        root = Path(place)
        record = sound_record(root)
        if record is None:
            raise _not_repaired(root, RECORDS)
        folder = generation_folder(root, record.current)
        with FileLock(folder / _LOCK):
            damaged = cls.damaged_files(place)
            if damaged_records(root):
                write_record(root, record)
            left = guards.restore(folder)
            for file in _lost_changes(folder):
                (folder / file).unlink()
            lost = [file for file in left if not guards.is_index_file(file)]
            if lost:
                raise _not_repaired(root, lost)
            if left:
                EntryTable.open(folder).rebuild_indices()
            # The new version uses none of these, or makes them again.
            for file in left + guards.damaged_copies(folder) + damaged_caches(folder):
                (folder / file).unlink()
            guards.sync(folder)
            guards.update(folder)
        return damaged

    def stamp(self) -> Hashable:
        """Return a value that changes when entries change; `refresh` reads those of others."""
        return self.generation, self._table.version

    def versions(self) -> tuple[Keys, Keys]:
        """Keys of all entries, and checksums of what does not depend on a model: [N], [N, 3]."""
        return self._table.versions()

    def record(self) -> GenerationRecord:
        """Read which generations the index has now."""
        return read_record(self._root)

    def save_record(self, record: GenerationRecord) -> None:
        """Replace the record of the generations in one step."""
        write_record(self._root, record)

    def open_generation(self, number: int, *, aside: bool = False) -> "FolderStore":
        """Open another generation of the index."""
        return self._open(self._root, number, aside)

    def create_generation(self, number: int, header: IndexHeader) -> "FolderStore":
        """Create an empty generation; it replaces an unfinished one."""
        folder = generation_folder(self._root, number)
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
        if (folder / _HEADER).exists():
            return self._open(self._root, number, aside=True)
        return self._create(self._root, header, number, aside=True)

    def drop_generations(self) -> None:
        """Delete the data of the generations that the record does not name."""
        drop_unused(self._root, self.record())

    def free_bytes(self) -> int:
        """Free space on the disk of the folder."""
        return shutil.disk_usage(self._root).free

    @contextmanager
    def upgrading(self) -> Iterator[None]:
        """Allow one upgrade at a time."""
        try:
            with FileLock(self._root / _UPGRADE_LOCK, timeout=0):
                yield
        except Timeout:
            raise InputError(
                f"another process upgrades {self.uri}, or rolls it back: wait until it is done"
            ) from None

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Hold back changes of the entries by all processes, for the moment of a switch."""
        with self._locked():
            if not self.is_current():
                raise self.upgraded()
            yield

    def refresh(self) -> None:
        """Read the changes of other processes."""
        mirror = self._mirror
        if mirror is not None and self._table.version != mirror.seen:
            with self._changes:
                mirror.catch_up(self._table)
        self.header = self._with_local(self.header)

    def close(self) -> None:
        """Release memory."""
        with self._changes:
            self._mirror = None

    def _with_local(self, header: IndexHeader) -> IndexHeader:
        """The header, where `local` is whether the table has columns for local features.

        They are added in one commit, whereas a change of the header in its file would be another.
        """
        return header.model_copy(update={"local": self._table.has_local()})

    @contextmanager
    def _commit(self) -> Iterator[None]:
        """Hold the locks for a change of the table: one thread of one process at a time."""
        with (
            self._locked(),
            self._changes,
        ):  # in this order, so that a waiting writer blocks no reader
            # A switch needs the lock too, so the generation stays the current one meanwhile.
            if not self._aside and not self.is_current():
                raise self.upgraded()
            mirror = self._mirror
            nothing_missed = mirror is not None and self._table.version == mirror.seen
            yield
            with self._warning():
                self._table.tidy()
            try:
                guards.sync(self._folder)
            except OSError as error:
                raise InputError(f"cannot write to {self._folder}: {error.strerror}") from error
            with self._warning():
                guards.update(self._folder)
            if mirror is not None and nothing_missed:
                mirror.seen = self._table.version

    def _remove_earlier(self, keys: Sequence[int]) -> None:
        """Remove entries from the previous generation too, if there is one."""
        number = None if self._aside else self.record().previous
        if number is None:
            self._earlier = None
            return
        if self._earlier is None or self._earlier.generation != number:
            self._earlier = self._open(self._root, number, aside=True)
        self._earlier.remove(keys)

    @contextmanager
    def _warning(self) -> Iterator[None]:
        """Log errors of what may fail after a change is committed."""
        try:
            yield
        except (InputError, OSError) as error:
            _log.warning("%s: old files are not removed: %s", self.uri, error)

    @contextmanager
    def _locked(self, patience: float = -1) -> Iterator[None]:
        """Hold the lock of the folder; wait for it, at most `patience` seconds if not negative."""
        lock = FileLock(self._folder / _LOCK)
        try:
            lock.acquire(timeout=patience)
        except Timeout:
            raise
        except OSError as error:
            raise InputError(f"cannot write to {self._folder}: {error.strerror}") from error
        try:
            yield
        finally:
            lock.release()

    def _searched(self) -> Mirror[DescriptorSearch]:
        """The mirror, which is read or built when it is first needed."""
        mirror = self._mirror
        if mirror is None:
            with self._making:
                mirror = self._mirror or self._load()
        return mirror

    def _load(self) -> Mirror[DescriptorSearch]:
        state = read_state(self._folder)
        intent = SearchIntent() if state is None else state.intent
        kept = None if state is None else self._kept(state)
        if state is not None and kept is not None:
            mirror = self._take(kept)
            if mirror.unsaved > max(1000, len(mirror.stamps) // 100):
                self._save(state, mirror, patience=0)
            return mirror
        compressed = state is not None and state.compressed
        if not compressed and exact_will_do(intent, len(self), self.header.dim, is_exact=True):
            mirror = self._take(self._exact_mirror(state))
            if self._is_large() and mirror.unsaved > len(mirror.stamps) // 10:
                self._tune_exact(intent, state, patience=0)  # saves a copy of the descriptors
            return mirror
        if compressed:
            _log.warning("%s: the search cache is missing or damaged: rebuilding it", self.uri)
        self.tune(intent, lambda note: _log.warning("%s: %s", self.uri, note))
        assert self._mirror is not None
        return self._mirror

    def _take(self, mirror: Mirror[DescriptorSearch]) -> Mirror[DescriptorSearch]:
        """Bring a mirror up to date and use it from now on."""
        mirror.catch_up(self._table)  # reads most rows while others may still write
        with self._changes:
            mirror.catch_up(self._table)
            self._mirror = mirror
        return mirror

    def _kept(self, state: SearchState) -> Mirror[CompressedSearch] | None:
        """Load the compressed search of a state; None if its files are missing or damaged."""
        if state.files is None:
            return None
        found = read_files(self._folder, state.files)
        if found is None:
            return None
        search = CompressedSearch(found[0], self._table.rows)
        search.probes, search.candidates = state.probes, state.candidates
        mirror = Mirror(search, found[1])
        self._use_copy(mirror, state.descriptors)
        return mirror

    def _use_copy(self, mirror: Mirror[CompressedSearch], saved: SavedDescriptors | None) -> None:
        """Let a compressed search read descriptors from a copy, if it can be opened."""
        copy = None if saved is None else DescriptorFile.open(self._folder, saved)
        if copy is not None:
            copy.use(mirror.stamps)
            mirror.copy, mirror.search.copy = saved, copy

    def _exact_mirror(self, state: SearchState | None) -> Mirror[DescriptorSearch]:
        """A mirror for exact search, with the saved copy of the descriptors if it is sound."""
        saved = None if state is None else state.descriptors
        copy = None if saved is None else DescriptorFile.open(self._folder, saved)
        if copy is None or copy.saved.dim != self.header.dim or not copy.sound():
            return Mirror(FlatSearch(self.header.dim))
        if len(np.unique(copy.keys)) < len(copy.keys):
            # A compressed search has written it: rows that changed meanwhile are in it twice.
            return Mirror(FlatSearch(self.header.dim))
        stamps = KeyMap()
        stamps.put(copy.keys, copy.stamps)
        mirror: Mirror[DescriptorSearch]
        mirror = Mirror(FlatSearch(self.header.dim, copy.rows, copy.keys), stamps)
        mirror.copy = saved
        return mirror

    def _sound_copy(self, state: SearchState) -> SavedDescriptors | None:
        """The copy of the descriptors of a state, if it is sound and has most of the entries."""
        saved = state.descriptors
        copy = None if saved is None else DescriptorFile.open(self._folder, saved)
        if copy is None or copy.saved.dim != self.header.dim:
            return None
        stamps = KeyMap()
        stamps.put(*self._table.stamps())
        copy.use(stamps)
        return saved if len(copy) >= _MOSTLY * len(stamps) and copy.sound() else None

    def _is_large(self) -> bool:
        """Whether a copy of the descriptors saves much time."""
        return 4 * len(self) * self.header.dim > _COPIED

    def _needs_copy(self, search: CompressedSearch) -> bool:
        """Whether many descriptors are not in the copy that a search reads."""
        copied = 0 if search.copy is None else len(search.copy)
        return self._is_large() and copied < _MOSTLY * len(search)

    def _tune_exact(
        self, intent: SearchIntent, before: SearchState | None, patience: float = -1
    ) -> TuningResult:
        mirror = self._mirror
        if mirror is None or not isinstance(mirror.search, FlatSearch):
            mirror = self._take(self._exact_mirror(before))
        spent = median_milliseconds(mirror.search.search, self._sample(_SAMPLE).descriptors)
        tuned = TuningResult("exact", 1.0, spent, mirror.search.memory)
        state = SearchState(intent=intent, tuned=tuned, entries=len(mirror.stamps))
        self._save(state, mirror, patience)
        return tuned

    def _tune_compressed(
        self,
        intent: SearchIntent,
        before: SearchState | None,
        kept: Mirror[CompressedSearch] | None,
    ) -> TuningResult:
        sample = self._sample(_SAMPLE)
        exact = ExactNeighbors(sample.keys, sample.descriptors)
        entries = len(self)
        saved = None if before is None else self._sound_copy(before)
        writer = None
        if saved is None and self._is_large():
            writer = DescriptorWriter(self._folder, self.header.dim)

        def on_rows(rows: Rows) -> None:
            exact.add(rows.keys, rows.descriptors)
            if writer is not None:
                writer.add(rows)

        if kept is not None and isqrt(entries) <= 2 * kept.search.lists:
            mirror, search = kept, kept.search
            for rows in self._table.rows():
                on_rows(rows)
            mirror.catch_up(self._table)
        else:
            rows = self._sample(training_size(entries))
            search = CompressedSearch(trained_index(rows.descriptors, entries), self._table.rows)
            mirror = Mirror(search)
            mirror.catch_up(self._table, on_rows)
        with self._saving():
            self._use_copy(mirror, saved if writer is None else writer.save())
        set_probes(search, exact, intent.recall)
        self._take(mirror)
        measured = measure(search.search, exact)
        probes, candidates = search.probes, search.candidates
        method = f"compressed: 1 bit per dimension, {probes} of {search.lists} lists, "
        tuned = TuningResult(f"{method}{candidates} candidates", *measured, search.memory)
        state = SearchState(
            intent=intent, tuned=tuned, entries=entries, probes=probes, candidates=candidates
        )
        self._save(state, mirror)
        return tuned

    def _sample(self, count: int) -> Rows:
        """Read random entries."""
        keys, _ = self._table.stamps()
        chosen = np.random.default_rng(0).choice(keys, min(count, len(keys)), replace=False)
        none = Rows(keys[:0], keys[:0], np.zeros((0, self.header.dim), np.float32))
        return Rows(*map(np.concatenate, zip(none, *self._table.rows(chosen), strict=True)))

    def _save(
        self, state: SearchState, mirror: Mirror[DescriptorSearch], patience: float = -1
    ) -> None:
        """Save the search method; if it cannot be written, it is chosen again next time."""
        search = mirror.search
        with self._saving(), self._locked(patience), self._changes:
            files = None
            if isinstance(search, CompressedSearch):
                files = save_files(self._folder, search.index, mirror.stamps)
                mirror.unsaved = 0
            elif self._is_large() and (
                mirror.copy is None or mirror.unsaved > len(mirror.stamps) // 10
            ):
                with self._saving():
                    mirror.copy = self._copy_exact(search, mirror.stamps)
                    mirror.unsaved = 0
            named = {"files": files, "descriptors": mirror.copy}
            save_state(self._folder, state.model_copy(update=named))

    def _copy_exact(self, search: FlatSearch, stamps: KeyMap) -> SavedDescriptors:
        """Write a copy of the descriptors of an exact search."""
        writer = DescriptorWriter(self._folder, self.header.dim)
        for keys, rows in search.parts():
            writer.add(Rows(keys, stamps.find(keys)[1], rows))
        return writer.save()

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Log an error of saving the search method, which does not prevent a search."""
        try:
            yield
        except Timeout:
            return  # another process writes; the saved state is older but valid
        except (OSError, RuntimeError, InputError) as error:  # FAISS raises RuntimeError
            _log.warning("%s: the search method is not saved: %s", self.uri, error)


def _lost_changes(folder: Path) -> list[str]:
    """Names of the manifests of the last changes, if a power failure has lost a part of them.

    LanceDB commits a change before its files are on the disk. Without these manifests, it reads the
    version before.
    """
    unfinished = guards.unfinished(folder)
    return [] if not unfinished or EntryTable.can_read(folder) else unfinished


def _examine(raw: RawRows) -> list[EntryCheck]:
    sound = small = None
    if raw.descriptors is not None:
        rows = as_rows(raw.descriptors)
        sound = sound_descriptors(rows.keys, rows.descriptors, sums_of(raw.descriptors)).tolist()
    if raw.thumbnails is not None:
        small = [(row["thumbnail"], row.get("thumbnail_sum")) for row in raw.thumbnails.to_pylist()]
    local = None
    if raw.local is not None:
        rows_of = raw.local.to_pylist()
        local = [(row.get("local"), row.get(LOCAL_SUM)) for row in rows_of]
    return examine_rows(raw.numbers.tolist(), _values(raw.entries), sound, small, local)


def _values(found: Any) -> list[dict[str, Any]] | None:
    try:
        values: list[dict[str, Any]] | None = None if found is None else found.to_pylist()
    except ValueError:  # a text is not UTF-8
        return None
    return values


def _distinct(new: NewEntries) -> NewEntries:
    """Keep the last of the entries that share a key."""
    last = {entry.key: place for place, entry in enumerate(new.entries)}
    if len(last) == len(new.entries):
        return new
    places = list(last.values())
    return NewEntries(
        [new.entries[place] for place in places],
        new.descriptors[places],
        [new.thumbnails[place] for place in places],
        [new.local[place] for place in places] if new.local else (),
    )


def _not_repaired(root: Path, files: Sequence[str]) -> DamagedIndexError:
    return DamagedIndexError(
        f"{root} cannot be repaired: {', '.join(files[:3])} has no copy; restore a backup of it, "
        "or build the index again"
    )


def _read_header(folder: Path, root: Path) -> IndexHeader:
    path = folder / _HEADER
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    return IndexHeader.parse(content, path, f"run listwise index check {root} --repair")
