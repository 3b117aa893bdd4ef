"""Choose a search method for an intent, by measurement, and save it.

The method is a setting of the database of an index, and a compressed search has a file, which can
be built again from the descriptors at any time. The setting is written after the file and has its
checksum, so a damaged or unfinished file is never used.
"""

import hashlib
import logging
import os
import threading
from collections.abc import Mapping
from math import inf, isqrt
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np

from listwise.errors import InputError
from listwise.files import publish
from listwise.search.entries import Keys
from listwise.search.exact import ExactNeighbors, median_milliseconds
from listwise.search.folder.compressed import (
    CompressedSearch,
    compressed_memory,
    trained_index,
    training_size,
)
from listwise.search.folder.database import PATIENCE, BusyError, write_settings
from listwise.search.folder.descriptors import Descriptors, exact_memory
from listwise.search.folder.table import Table
from listwise.search.methods import MethodState, Note, SearchIntent, SearchMethod, TuningResult

_EXACT_MILLISECONDS = 100.0  # latency up to which exact search is used by default
_RECALL = 0.95  # of compressed search, by default
_MEMORY_SHARE = 0.5  # of the machine's memory, by default
_USUAL_MEMORY = 8 << 30  # of a machine that does not tell its own
_CANDIDATES = (16, 32, 64, 128, 256, 512)
_SAMPLE = 200  # entries that are used as queries for measurements
_SLOWEST = 5e9  # bytes that exact search reads per second on any machine
_PROBES = sorted({round(2 ** (step / 4)) for step in range(49)})  # four per doubling, up to 4096

_log = logging.getLogger(__name__)


class SearchState(MethodState):
    """The search method of a store in a folder.

    Attributes:
        entries: the number of entries when it was measured.
        probes: the number of lists that a compressed search searches; 0 for exact search.
        candidates: the number of candidates of a compressed search.
        codes: the name of the file with its codes.
        digest: the checksum of that file.
        descriptors: the name of the file of descriptors that the codes are of.
        added: the number of positions that have codes.
    """

    entries: int = 0
    probes: int = 0
    candidates: int = 0
    codes: str = ""
    digest: str = ""
    descriptors: str = ""
    added: int = 0


def read_state(settings: Mapping[str, str]) -> SearchState:
    """The search method that the settings of a database have."""
    return SearchState.model_validate_json(settings.get("search", "{}"))


class FolderMethod(SearchMethod):
    """Exact or compressed search through the descriptors of a table.

    The method is read or chosen when something is searched.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._choosing = threading.RLock()
        # The descriptors that it was chosen for, and the compressed search if there is one.
        self._chosen: tuple[Descriptors | None, CompressedSearch | None] = None, None

    @property
    def state(self) -> SearchState:
        """What is remembered now."""
        return read_state(self._table.settings())

    def of(self, rows: Descriptors) -> CompressedSearch | Descriptors:
        """The search through descriptors."""
        chosen, search = self._chosen
        if chosen is not rows:
            with self._choosing:
                if self._chosen[0] is not rows:  # no other thread was faster
                    self._choose(rows)
                search = self._chosen[1]
        return search or rows

    def tune(self, intent: SearchIntent, on_note: Note = lambda note: None) -> TuningResult:
        """Choose a search method that meets the intent, measure it, and save the choice.

        A compressed search that was chosen for the same intent and about as many entries is kept.
        """
        with self._table.snapshot() as (_, rows):
            pass
        with self._choosing:
            return self._tune(rows, intent, on_note)

    def facts(self) -> dict[str, Any]:
        """Size on disk, search method and measurements."""
        sizes = (path.stat().st_size for path in self._table.root.iterdir() if path.is_file())
        return {"bytes": sum(sizes), **super().facts()}

    def _tune(
        self,
        rows: Descriptors,
        intent: SearchIntent,
        on_note: Note,
        usual: float = _EXACT_MILLISECONDS,
    ) -> TuningResult:
        before, entries = self.state, len(rows)
        search, tuned = None, exact_result(intent, rows, usual)
        if tuned is None:
            search = self._kept(before, rows)
            same = before.intent == intent and entries < 2 * before.entries
            if search is not None and before.tuned is not None and same:
                self._chosen = rows, search
                return before.tuned
            if search is None:
                on_note(
                    f"exact search through {entries} descriptors needs more memory or time than "
                    "the limits allow: building a compressed search"
                )
            search, tuned = _tuned(search, intent, rows)
        self._chosen = rows, search
        self._save(SearchState(intent=intent, tuned=tuned, entries=entries), search)
        lacking = shortcomings(intent, tuned)
        if lacking:
            on_note(f"no search method meets all limits; the best one has {', '.join(lacking)}")
        return tuned

    def _choose(self, rows: Descriptors) -> None:
        """Read or build the search method."""
        state = self.state
        search = self._kept(state, rows)
        if search is not None:
            missed = search.update()
            self._chosen = rows, search
            if missed > max(1000, len(rows) // 100):
                self._save(state, search, patience=0)
        elif not state.codes and exact_is_known_to_do(state, rows):
            self._chosen = rows, None
        else:
            uri = self._table.uri
            if state.codes:
                _log.warning("%s: the search cache is missing or damaged: rebuilding it", uri)
            # A compressed search takes minutes to build: not for a small excess.
            usual = 2 * _EXACT_MILLISECONDS
            self._tune(rows, state.intent, lambda note: _log.warning("%s: %s", uri, note), usual)

    def _kept(self, state: SearchState, rows: Descriptors) -> CompressedSearch | None:
        """The compressed search of a state; None if its file is missing or damaged."""
        if self._chosen[0] is rows and self._chosen[1] is not None:
            return self._chosen[1]
        index = read_codes(self._table.root, state) if state.codes else None
        if index is None:
            return None
        added = state.added
        if state.descriptors != rows.path.name:  # other positions, but the centroids still fit
            index.reset()
            added = 0
        search = CompressedSearch(index, rows, added)
        search.probes, search.candidates = state.probes, state.candidates
        return search

    def _save(
        self, state: SearchState, search: CompressedSearch | None, patience: float = PATIENCE
    ) -> None:
        """Save the search method; if it cannot be written, it is chosen again next time."""
        root, number = self._table.root, self._table.number
        try:
            with self._table.database.writing(patience) as connection:
                if search is not None:
                    name, digest = save_codes(root, number, search.index)
                    follows = {"descriptors": search.rows.path.name, "added": search.added}
                    follows |= {"probes": search.probes, "candidates": search.candidates}
                    follows |= {"codes": name, "digest": digest}
                    state = state.model_copy(update=follows)
                write_settings(connection, {"search": state.model_dump_json()})
                for path in root.glob(f"codes-{number}-*"):
                    if path.name != state.codes:
                        path.unlink(missing_ok=True)
        except BusyError:
            return  # the saved state is older, but valid
        except (OSError, RuntimeError, InputError) as error:  # FAISS raises RuntimeError
            _log.warning("%s: the search method is not saved: %s", self._table.uri, error)


def _tuned(
    kept: CompressedSearch | None, intent: SearchIntent, rows: Descriptors
) -> tuple[CompressedSearch, TuningResult]:
    """A compressed search that meets an intent: the one that was kept if its lists still fit."""
    sample = _sample(rows, _SAMPLE)
    exact = ExactNeighbors(sample, rows.read(sample), rows.search)
    if kept is not None and isqrt(len(rows)) <= 2 * kept.lists:
        search = kept
    else:
        training = rows.read(_sample(rows, training_size(len(rows))))
        search = CompressedSearch(trained_index(training, len(rows)), rows)
    search.update()
    set_probes(search, exact, intent.recall)
    measured = exact.measure(search.search)
    lists = f"{search.probes} of {search.lists} lists, {search.candidates} candidates"
    method = f"compressed: 1 bit per dimension, {lists}"
    memory = compressed_memory(len(search), rows.dim)
    return search, TuningResult(method, *measured, memory)


def _sample(rows: Descriptors, count: int) -> Keys:
    """Random positions in use, sorted."""
    used = np.flatnonzero(rows.alive)
    chosen = np.random.default_rng(0).choice(used, min(count, len(used)), replace=False)
    return np.sort(chosen)


def exact_result(intent: SearchIntent, rows: Descriptors, usual: float) -> TuningResult | None:
    """Exact search as it was measured; None if it does not meet the intent.

    Without an intent, `usual` is the maximum latency in milliseconds.
    """
    if not fits_into_memory(intent, rows):
        return None
    spent = median_milliseconds(rows.search, rows.read(_sample(rows, _SAMPLE)))
    if spent > _most_milliseconds(intent, usual):
        return None
    return TuningResult("exact", 1.0, spent, exact_memory(len(rows.keys), rows.dim))


def exact_is_known_to_do(state: SearchState, rows: Descriptors) -> bool:
    """Whether exact search meets the intent of a state, as far as is known without measuring it."""
    spent = 1000 * len(rows) * 4 * rows.dim / _SLOWEST
    if state.tuned is not None:
        spent = min(spent, state.tuned.milliseconds * len(rows) / max(1, state.entries))
    most = _most_milliseconds(state.intent, 2 * _EXACT_MILLISECONDS)
    return spent <= most and fits_into_memory(state.intent, rows)


def fits_into_memory(intent: SearchIntent, rows: Descriptors) -> bool:
    """Whether exact search has the memory that it needs."""
    memory = intent.memory or _MEMORY_SHARE * machine_memory()
    return exact_memory(len(rows.keys), rows.dim) <= memory


def _most_milliseconds(intent: SearchIntent, usual: float) -> float:
    return intent.milliseconds or (inf if intent.recall == 1 else usual)


def machine_memory() -> int:
    """Memory that this process may use, of the machine or of its container, in bytes."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):  # not on Windows
        total = _USUAL_MEMORY
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")
        return min(total, int(limit))
    except (OSError, ValueError):  # no container, or one without a limit
        return total


def set_probes(search: CompressedSearch, exact: ExactNeighbors, wanted: float | None) -> None:
    """Set the fastest numbers of lists and candidates that reach the recall, or else the highest.

    Candidates are re-scored exactly, so a neighbor among them is always found. The recall must be
    reached with a margin, because it is measured on a sample.
    """
    target = _RECALL if wanted is None else wanted
    best, fastest = inf, (search.lists, _CANDIDATES[-1])
    for probes in sorted({min(count, search.lists) for count in _PROBES}):
        search.probes = probes
        found = search.found(exact.queries, _CANDIDATES[-1])
        enough = [count for count in _CANDIDATES if exact.sure_recall(found[:, :count]) >= target]
        if enough:
            search.candidates = enough[0]
            spent = median_milliseconds(search.search, exact.queries)
            if spent < best:
                best, fastest = spent, (search.probes, search.candidates)
            # More lists take longer, and allow fewer candidates.
            if spent > 1.5 * best or search.candidates == _CANDIDATES[0]:
                break
    search.probes, search.candidates = fastest


def shortcomings(intent: SearchIntent, tuned: TuningResult) -> list[str]:
    """The requirements of an intent that are not met, in words."""
    lacking = []
    if intent.memory is not None and tuned.memory > intent.memory:
        lacking.append(f"{tuned.memory} bytes of memory instead of {intent.memory}")
    if intent.milliseconds is not None and tuned.milliseconds > intent.milliseconds:
        lacking.append(f"{tuned.milliseconds:.1f} ms per query instead of {intent.milliseconds:g}")
    if intent.recall is not None and tuned.recall < intent.recall:
        lacking.append(f"recall {tuned.recall:.3f} instead of {intent.recall:g}")
    return lacking


def save_codes(folder: Path, generation: int, index: Any) -> tuple[str, str]:
    """Write the codes of a compressed search: the name of the file, and its checksum."""
    import faiss

    name = f"codes-{generation}-{token_hex(8)}.faiss"
    partial = folder / f"{name}.tmp"
    try:
        faiss.write_index(index, str(partial))
        digest = _digest(partial)
        publish(partial, folder / name)
    finally:
        partial.unlink(missing_ok=True)
    return name, digest


def read_codes(folder: Path, state: SearchState) -> Any:
    """The FAISS index of a compressed search; None if its file is missing or damaged."""
    import faiss

    path = folder / state.codes
    try:
        return faiss.read_index(str(path)) if _digest(path) == state.digest else None
    except (OSError, RuntimeError):
        return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
