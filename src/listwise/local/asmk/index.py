"""An ASMK* index in a folder: an inverted file that photos are added to and removed from.

The folder holds the codebook, inverted files that are never changed once written (`segment-…`),
and `manifest.json`, which names those that count and the photos removed from them. Every change
writes new segments first and then, in one step, the manifest: a kill at any moment leaves the index
as it was before or after the change.
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
from listwise.local.asmk.codebook import Codebook, checked
from listwise.local.asmk.kernel import ALPHA, ASSIGNMENTS, TAU, Aggregated, aggregate, selectivity
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

_PART = 1 << 22  # postings written at a time


class AsmkIndex:
    """Photos searched by their local descriptors; `create` makes one, `open` opens it again.

    Searches may run in several threads. Several processes may use one index: changes wait for each
    other, and `refresh` shows those of others.
    """

    def __init__(self, folder: Path, codebook: Codebook, manifest: Manifest) -> None:
        self.folder = folder
        self.codebook = codebook
        self._manifest = manifest
        self._parts: tuple[IndexPart, ...] = ()

    @staticmethod
    def exists(folder: str | Path) -> bool:
        """Whether there is an index in a folder."""
        return (Path(folder) / MANIFEST).is_file()

    @classmethod
    def create(cls, folder: str | Path, codebook: Codebook) -> "AsmkIndex":
        """Make an empty index, which keeps a copy of the codebook."""
        folder = Path(folder)
        if cls.exists(folder):
            raise InputError(f"there is an index at {folder} already: add to it, or name another")
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
        """Open an index; postings are mapped into memory and read as far as they are used.

        Words are looked up on `device`: cpu, cuda, cuda:1 ...; auto takes a GPU if there is one.
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
        """Open an index, which must be of this codebook, or make one."""
        if not cls.exists(folder):
            return cls.create(folder, codebook)
        index = cls.open(folder, codebook.device)
        index.require(codebook)
        return index

    def require(self, codebook: Codebook) -> None:
        """Refuse a codebook other than the one the photos were indexed with."""
        if codebook.fingerprint != self._manifest.codebook:
            raise InputError(
                f"{self.folder} was made with the codebook {self._manifest.codebook[:12]}, not "
                f"with {codebook.fingerprint[:12]}: their words mean different things"
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
        """The ids of all photos, in the order in which equal scores come."""
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
        """Write photos in place of those with the same ids, some thousands at a time.

        What a kill leaves is whole: the photos before some place are in, the others are not. The
        local descriptors [m, D] of each may be read one by one; `on_photo` is called with 1.
        """
        if len(set(ids)) < len(ids):
            raise InputError("an id is given twice: every photo needs its own")
        waiting: list[Aggregated] = []
        done = postings = 0
        for rows in descriptors:
            if done + len(waiting) == len(ids):
                raise InputError(f"there are more descriptors than the {len(ids)} ids")
            waiting.append(self._aggregated(rows, 1))
            postings += len(waiting[-1].words)
            on_photo(1)
            if postings >= _PART:
                self._put(ids[done : done + len(waiting)], waiting)
                done, postings, waiting = done + len(waiting), 0, []
        if done + len(waiting) < len(ids):
            raise InputError(f"there are descriptors of {done + len(waiting)} of {len(ids)} ids")
        if waiting:
            self._put(ids[done:], waiting)

    def add_file(
        self, file: FeatureFile, on_photo: Callable[[int], object] = lambda count: None
    ) -> None:
        """Add those photos of a file of local features that are not in the index yet.

        `on_photo` is called with the number of photos just done.
        """
        self.codebook.require(file.header.extractor)
        missing = [row for row, name in enumerate(file.ids) if name not in self]
        on_photo(len(file) - len(missing))
        descriptors = (file.read(row).descriptors for row in missing)
        self.add([file.ids[row] for row in missing], descriptors, on_photo)

    def _put(self, ids: Sequence[str], photos: Sequence[Aggregated]) -> None:
        postings = invert(ids, photos, -(-self.codebook.dim // 64))
        fresh = IndexPart(None, postings, np.ones(len(ids), bool))
        with self._changing():
            self._commit([*(part.without(ids) for part in self._parts), fresh])

    def remove(self, ids: Sequence[str]) -> int:
        """Remove photos in one step, and say how many there were; none of them is found again."""
        with self._changing():
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
        """The k photos most like a query's local descriptors: [n, D] -> scores [k'], ids.

        k' = min(k, len(self)). Scores are ASMK*'s, from 0 to 1; equal ones come in order of `ids`.
        A descriptor has `assignments` words; `alpha` is the selectivity's power, and words in which
        the bits of two photos are no more similar than `tau` do not count.
        """
        if k < 1:
            raise InputError(f"k is {k}; ask for one photo at least")
        query = self._aggregated(descriptors, min(assignments, len(self.codebook)))
        weights = selectivity(self.codebook.dim, alpha, tau)
        parts = self._parts  # a change meanwhile does not matter
        found = [part.postings.scores(query, weights)[part.kept] for part in parts]
        scores = np.concatenate([np.zeros(0), *found]) / np.sqrt(max(1, len(query.words)))
        best = np.argsort(-scores, kind="stable")[:k]
        return scores[best], ids_at(parts, best)

    def _aggregated(self, descriptors: NDArray[np.floating], assignments: int) -> Aggregated:
        rows = checked(descriptors, self.codebook.dim)
        words = self.codebook.assign(rows, assignments)
        return aggregate(rows, words, self.codebook.centroids)

    def info(self) -> dict[str, Any]:
        """What there is to know of the index, for people and programs: JSON values."""
        count = len(self)
        size = sum(part.postings.nbytes for part in self._parts)
        return {
            "photos": count,
            "words_per_photo": sum(part.live for part in self._parts) / max(1, count),
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
        """See what other processes have written since."""
        known = {part.name: part.postings for part in self._parts}
        self._manifest, self._parts = read_segments(self.folder, known)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Be the only one that changes the index, with the newest state in view."""
        try:
            with (self.folder / "lock").open("w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # let go by the system if the process ends
                self.refresh()
                yield
        except OSError as error:
            raise InputError(f"cannot write {self.folder}: {error.strerror or error}") from error

    def _commit(self, parts: Sequence[IndexPart]) -> None:
        """Write what is not on disk yet, merged where that pays, and then the manifest."""
        self._sweep()
        written = self._manifest.written
        stored: list[IndexPart] = []
        for group in group_parts([part for part in parts if part.kept.any()]):
            if len(group) == 1 and group[0].name is not None and not group[0].wasteful:
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
        """Delete segments that do not count: replaced ones, and what a killed change left."""
        named = {segment.name for segment in self._manifest.segments}
        # safetensors writes into a hidden .tmp… of its own first.
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
    """Make an index of a codebook if there is none, remove photos by id, and add those of files.

    Photos that are in the index already are left as is. `on_photo` is called with the number of
    photos just done.
    """
    words = None if codebook is None else Codebook.load(codebook, device)
    if words is None and not AsmkIndex.exists(folder):
        raise InputError(f"no index at {folder}: pass a `codebook` to create one")
    if words is not None:
        for file in files:  # before an index is made: an empty one of wrong words is in the way
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
