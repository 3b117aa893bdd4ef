"""Check an index for damage, and repair it from the photos."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from listwise.search.entries import EntryCheck, NewEntries
from listwise.search.filling import describe_entries, file_of, file_unchanged, local_encoder
from listwise.search.generation import Generation


@dataclass
class CheckResult:
    """What `Index.check` found. Entries are named by id, with their path if the id is damaged.

    Attributes:
        entries: the number of entries that were read.
        damaged: damaged files, relative to the folder of the index; damaged marks; and entries
            with a damaged descriptor, value, thumbnail or damaged local features.
        missing: entries whose photo does not exist any more. Search does not need it.
        changed: entries whose photo has other content than when it was added.
        repaired: files and entries that were repaired, and damaged marks that were removed.
        removed: entries that were removed because their id or path is damaged; add their photos
            again.
        lost: entries that cannot be repaired because their photo is missing, changed or
            unreadable.
    """

    entries: int = 0
    damaged: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the index can be used: nothing is damaged, or everything was repaired."""
        return set(self.damaged) <= {*self.repaired, *self.removed}


def check_store(
    generation: Generation,
    *,
    photos: bool = False,
    repair: bool = False,
    on_progress: Callable[[int], object] = lambda count: None,
) -> CheckResult:
    """Read everything that a store holds and compare it with its checksums.

    Args:
        generation: the store, and the model, which is loaded if photos are encoded again.
        photos: read the photos too and compare them with their digests.
        repair: repair what is damaged, as `Index.check` describes.
        on_progress: is called with the number of entries that were just checked.
    """
    store = generation.store
    files, marks = store.generations.check_files(store.uri, repair), store.mark_log.damaged()
    if repair and marks:
        store.mark_log.drop(marks)
    result = CheckResult(damaged=files + marks, repaired=files + marks if repair else [])
    damaged: list[EntryCheck] = []
    with ThreadPoolExecutor() as pool:
        for part in store.examine():
            result.entries += len(part)
            damaged += [found for found in part if not found.sound]
            known = [found.entry for found in part if found.entry and found.entry.path]
            gone = pool.map(lambda entry: not Path(entry.path).exists(), known)
            other = pool.map(lambda entry: photos and not file_unchanged(entry), known)
            for entry, missing, changed in zip(known, gone, other, strict=True):
                if missing:
                    result.missing.append(entry.id)
                elif changed:
                    result.changed.append(entry.id)
            on_progress(len(part))
    result.damaged += [found.name for found in damaged]
    if repair:
        _repair_entries(generation, damaged, result)
    return result


def _repair_entries(
    generation: Generation, damaged: Sequence[EntryCheck], result: CheckResult
) -> None:
    """Encode the photos of damaged entries again; remove entries whose values are damaged."""
    store = generation.store
    unknown = [found for found in damaged if found.entry is None]
    if unknown:
        store.discard([found.place for found in unknown])
        result.removed += [found.name for found in unknown]
    entries = [found.entry for found in damaged if found.entry is not None]
    usable = [entry for entry in entries if file_unchanged(entry)]
    if usable:
        store.header.check(generation.model.fingerprint, store.uri)
    photos = ((entry, file_of(entry)) for entry in usable)
    options = {"thumbnails": True, "local": local_encoder(store)}
    with closing(describe_entries(generation, photos, **options)) as parts:
        for kept, _, found in parts:
            store.put(NewEntries(kept, found.descriptors, found.thumbnails, found.local))
            result.repaired += [entry.id for entry in kept]
    repaired = set(result.repaired)
    result.lost = [entry.id for entry in entries if entry.id not in repaired]
