"""An ASMK* index in a folder: an inverted file; photos can be added and removed.

The folder holds the codebook, inverted files that never change (`segment-…`), and `manifest.json`,
which lists the valid segments and the photos removed from them. A change writes new segments first
and then replaces the manifest atomically. If the process is killed, the index is as it was before
or after the change.
"""

import fcntl
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from listwise.errors import InputError
from listwise.files import write_text
from listwise.local.asmk.codebook import Codebook, check_descriptors
from listwise.local.asmk.kernel import ALPHA, ASSIGNMENTS, TAU, PhotoWords, aggregate, selectivity
from listwise.local.asmk.postings import invert, map_postings, merge, write_postings
from listwise.local.asmk.segments import (
    MANIFEST,
    IndexPart,
    Manifest,
    Segment,
    group_parts,
    ids_at,
    read_segments,
)
from listwise.local.storage import FeatureFile

CODEBOOK: Final = "codebook.safetensors"

_PART = 1 << 22  # postings per write


class AsmkIndex:
    """An index of photos by their local descriptors; use `create` or `open` to get one.

    Several threads may search at the same time. Several processes may use one index: changes wait
    for each other, and `refresh` loads the changes of other processes.
    """

    def __init__(self, folder: Path, codebook: Codebook, manifest: Manifest) -> None:
        self.folder = folder
        self.codebook = codebook
        self._manifest = manifest
        self._parts: tuple[IndexPart, ...] = ()

    @staticmethod
    def exists(folder: str | Path) -> bool:
        """Whether a folder holds an index."""
        return (Path(folder) / MANIFEST).is_file()

    @classmethod
    def create(cls, folder: str | Path, codebook: Codebook) -> "AsmkIndex":
        """Create an empty index with a copy of the codebook."""
        folder = Path(folder)
        if cls.exists(folder):
            raise InputError(f"{folder} already holds an index: add to it, or give another folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            codebook.save(folder / CODEBOOK)
            manifest = Manifest(codebook=codebook.fingerprint)
            write_text(folder / MANIFEST, manifest.model_dump_json())
        except OSError as error:
            raise InputError(f"cannot write {folder}: {error.strerror or error}") from error
        return cls(folder, codebook, manifest)

    @classmethod
    def open(cls, folder: str | Path, device: str = "auto") -> "AsmkIndex":
        """Open an index; postings are memory-mapped and read when they are used.

        Words are looked up on `device`: cpu, cuda, cuda:1 ...; auto uses a GPU if present.
        """
        folder = Path(folder)
        if not cls.exists(folder):
            raise InputError(f"no index at {folder}: create one with listwise local index")
        codebook = Codebook.load(folder / CODEBOOK, device)
        manifest, parts = read_segments(folder)
        index = cls(folder, codebook, manifest)
        index._parts = parts
        index.require(codebook)
        return index

    @classmethod
    def open_or_create(cls, folder: str | Path, codebook: Codebook) -> "AsmkIndex":
        """Open an index, which must have this codebook, or create one."""
        if not cls.exists(folder):
            return cls.create(folder, codebook)
        index = cls.open(folder, codebook.device)
        index.require(codebook)
        return index

    def require(self, codebook: Codebook) -> None:
        """Raise an error unless the photos were indexed with this codebook."""
        if codebook.fingerprint != self._manifest.codebook:
            raise InputError(
                f"{self.folder} was created with the codebook {self._manifest.codebook[:12]}, not "
                f"with {codebook.fingerprint[:12]}: give that codebook, or create another index"
            )

    def __len__(self) -> int:
        return sum(int(part.kept.sum()) for part in self._parts)

    def __contains__(self, name: str) -> bool:
        return any(
            name in part.postings.numbers and part.kept[part.postings.numbers[name]]
            for part in self._parts
        )

    @property
    def ids(self) -> list[str]:
        """The ids of all photos; results with equal scores come in this order."""
        return [
            part.postings.name(int(number))
            for part in self._parts
            for number in np.flatnonzero(part.kept)
        ]

    def add(
        self,
        ids: Sequence[str],
        descriptors: Iterable[NDArray[np.floating]],
        on_photo: Callable[[int], object] = lambda count: None,
    ) -> None:
        """Add photos, and replace those with the same ids, a few thousand at a time.

        If the process is killed, the index is intact and holds the first part of the photos.

        Args:
            ids: one per photo.
            descriptors: local descriptors [m, D] of each photo, read one by one.
            on_photo: called with 1 after each photo.
        """
        if len(set(ids)) < len(ids):
            raise InputError("`ids` contains an id twice: give every photo its own id")
        waiting: list[PhotoWords] = []
        done = postings = 0
        for rows in descriptors:
            if done + len(waiting) == len(ids):
                raise InputError(f"`descriptors` has more photos than the {len(ids)} `ids`")
            waiting.append(self._aggregate(rows, 1))
            postings += len(waiting[-1].words)
            on_photo(1)
            if postings >= _PART:
                self._write(ids[done : done + len(waiting)], waiting)
                done, postings, waiting = done + len(waiting), 0, []
        if done + len(waiting) < len(ids):
            raise InputError(f"`descriptors` has {done + len(waiting)} photos for {len(ids)} `ids`")
        if waiting:
            self._write(ids[done:], waiting)

    def add_file(
        self, file: FeatureFile, on_photo: Callable[[int], object] = lambda count: None
    ) -> None:
        """Add the photos of a feature file that are not in the index yet.

        `on_photo` is called with the number of photos just processed.
        """
        self.codebook.require(file.header.extractor)
        missing = [row for row, name in enumerate(file.ids) if name not in self]
        on_photo(len(file) - len(missing))
        descriptors = (file.read(row).descriptors for row in missing)
        self.add([file.ids[row] for row in missing], descriptors, on_photo)

    def _write(self, ids: Sequence[str], photos: Sequence[PhotoWords]) -> None:
        postings = invert(ids, photos, -(-self.codebook.dim // 64))
        fresh = IndexPart(None, postings, np.ones(len(ids), bool))
        with self._lock():
            self._commit([*(part.without(ids) for part in self._parts), fresh])

    def remove(self, ids: Sequence[str]) -> int:
        """Remove photos atomically; returns how many of them were in the index."""
        with self._lock():
            before = len(self)
            parts = [part.without(ids) for part in self._parts]
            after = sum(int(part.kept.sum()) for part in parts)
            if after < before:
                self._commit(parts)
            return before - after

    def search(
        self,
        descriptors: NDArray[np.floating],
        k: int,
        assignments: int = ASSIGNMENTS,
        alpha: float = ALPHA,
        tau: float = TAU,
    ) -> tuple[NDArray[np.float64], list[str]]:
        """Find the k photos that are most similar to a query: [n, D] -> scores [k'] and ids.

        k' = min(k, len(self)). Scores are ASMK* similarities from 0 to 1; photos with equal scores
        come in the order of `ids`.

        Args:
            descriptors: local descriptors of the query, [n, D].
            k: number of results.
            assignments: number of words per descriptor of the query.
            alpha: exponent of the selectivity function.
            tau: similarity threshold; a word counts if its bits are more similar than this.
        """
        if k < 1:
            raise InputError(f"`k` is {k}: give 1 or more")
        query = self._aggregate(descriptors, min(assignments, len(self.codebook)))
        weights = selectivity(self.codebook.dim, alpha, tau)
        parts = self._parts  # so that a concurrent change has no effect on this search
        found = [part.postings.scores(query, weights)[part.kept] for part in parts]
        scores = np.concatenate([np.zeros(0), *found]) / np.sqrt(max(1, len(query.words)))
        best = np.argsort(-scores, kind="stable")[:k]
        return scores[best], ids_at(parts, best)

    def _aggregate(self, descriptors: NDArray[np.floating], assignments: int) -> PhotoWords:
        rows = check_descriptors(descriptors, self.codebook.dim)
        words = self.codebook.assign(rows, assignments)
        return aggregate(rows, words, self.codebook.centroids)

    def info(self) -> dict[str, Any]:
        """Return a description of the index as JSON values."""
        count = len(self)
        size = sum(part.postings.nbytes for part in self._parts)
        return {
            "photos": count,
            "words_per_photo": sum(part.live_postings for part in self._parts) / max(1, count),
            "bytes": size,
            "bytes_per_photo": size / max(1, count),
            "segments": len(self._parts),
            "removed": sum(int((~part.kept).sum()) for part in self._parts),
            "words": len(self.codebook),
            "dim": self.codebook.dim,
            "codebook": self.codebook.fingerprint,
            "extractor": self.codebook.info.extractor,
        }

    def refresh(self) -> None:
        """Load the changes that other processes made."""
        known = {part.name: part.postings for part in self._parts}
        self._manifest, self._parts = read_segments(self.folder, known)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the lock for a change, with the newest state loaded."""
        try:
            with (self.folder / "lock").open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # the system releases it when the process ends
                self.refresh()
                yield
        except OSError as error:
            raise InputError(f"cannot write {self.folder}: {error.strerror or error}") from error

    def _commit(self, parts: Sequence[IndexPart]) -> None:
        """Write new segments, merged where that is worth it, and then the manifest."""
        self._sweep()
        written = self._manifest.written
        stored: list[IndexPart] = []
        for group in group_parts([part for part in parts if part.kept.any()]):
            if len(group) == 1 and group[0].name is not None and not group[0].needs_rewrite:
                stored.append(group[0])
                continue
            written += 1
            name = f"segment-{written:08d}.safetensors"
            postings = group[0].postings
            if len(group) > 1 or not group[0].kept.all():
                postings = merge([(part.postings, part.kept) for part in group])
            write_postings(postings, self.folder / name)
            mapped = map_postings(self.folder / name)
            stored.append(IndexPart(name, mapped, np.ones(len(mapped), bool)))
        segments = tuple(
            Segment(name=str(part.name), removed=tuple(np.flatnonzero(~part.kept).tolist()))
            for part in stored
        )
        manifest = self._manifest.model_copy(update={"written": written, "segments": segments})
        write_text(self.folder / MANIFEST, manifest.model_dump_json())
        self._manifest, self._parts = manifest, tuple(stored)
        self._sweep()

    def _sweep(self) -> None:
        """Delete segments that are not in the manifest: replaced or left by a killed process."""
        named = {segment.name for segment in self._manifest.segments}
        # safetensors first writes to a hidden file .tmp….
        for path in (*self.folder.glob("segment-*"), *self.folder.glob(".tmp*")):
            if path.name not in named:
                path.unlink()


def change_index(
    folder: str | Path,
    files: Sequence[FeatureFile] = (),
    codebook: str | Path | None = None,
    remove: Sequence[str] = (),
    device: str = "auto",
    on_photo: Callable[[int], object] = lambda count: None,
) -> AsmkIndex:
    """Create an index if necessary, remove photos by id, and add the photos of feature files.

    Photos that are already in the index are not changed.

    Args:
        folder: folder of the index.
        files: feature files to add.
        codebook: codebook file; required to create an index.
        remove: ids of photos to remove.
        device: where visual words are looked up: cpu, cuda, cuda:1 ...; auto uses a GPU if present.
        on_photo: called with the number of photos just processed.
    """
    words = None if codebook is None else Codebook.load(codebook, device)
    if words is None and not AsmkIndex.exists(folder):
        raise InputError(f"no index at {folder}: pass a `codebook` to create one")
    if words is not None:
        for file in files:  # check first: an empty index with the wrong words would be in the way
            words.require(file.header.extractor)
    index = AsmkIndex.open_or_create(folder, words) if words else AsmkIndex.open(folder, device)
    for file in files:
        index.codebook.require(file.header.extractor)
    for name in remove:
        if name not in index:
            raise InputError(f"{folder} has no photo {name}")
    index.remove(remove)
    for file in files:
        index.add_file(file, on_photo)
    return index
