"""ASMK*: the similarity of two photos by their visual words, an index of photos, and its search.

After Tolias, Avrithis and Jégou, "Image search with selective match kernels: aggregation across
single and multiple images" (IJCV 2016). With X_c the descriptors of a photo that belong to the
word c, V(X_c) = Σ (x − q_c) and b its signs,

    K(X, Y) = γ(X) γ(Y) Σ_c σ(b(V(X_c))ᵀ b(V(Y_c)) / D),   σ(u) = sign(u) |u|^α if u > τ, else 0,

where γ makes K(X, X) = 1: γ(X) = (number of words of X)^(−1/2). A word counts once, however many
descriptors it has, so repeated structure does not dominate the score.

The folder of an index holds its codebook and an SQLite file: the photos, and for each word lists of
the photos that have it, with their bits. Every change is one transaction.
"""

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from listwise.data import PhotoFile
from listwise.errors import InputError
from listwise.local.codebook import Codebook, check_descriptors
from listwise.local.extract import Extractor
from listwise.local.rerank import TOP, rerank_by_inliers
from listwise.local.storage import FeatureFile, writing
from listwise.local.verification import verifier_for

ALPHA: Final = 3.0
TAU: Final = 0.0
ASSIGNMENTS: Final = 5
"""Number of words per descriptor of a query; descriptors of the database have one word."""

CODEBOOK: Final = "codebook.safetensors"
PHOTOS: Final = "photos.sqlite"

_PART = 1 << 22  # words of photos per change
_LISTS = 1 << 10  # lists that are compared at a time
_WAIT = 600  # seconds that a change waits for the one of another process
# A number is never used twice, so lists may hold photos that are gone while a search reads them.
_CREATE = """
CREATE TABLE IF NOT EXISTS photos
    (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, words INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS lists (word INTEGER NOT NULL, photos BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS list_of_word ON lists (word);
"""

Bits = NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class PhotoWords:
    """The visual words of a photo: `words` int32 [w], ascending, and `bits` uint64 [w, L].

    The bits are the signs of the summed residuals of each word, L = ⌈D/64⌉; bits after D are zero.
    """

    words: NDArray[np.int32]
    bits: Bits


def aggregate(
    descriptors: NDArray[np.floating], words: NDArray[np.int32], centroids: NDArray[np.float32]
) -> PhotoWords:
    """Sum the residuals of a photo's descriptors per word, and keep the signs.

    Shapes: descriptors [n, D], words of each descriptor [n, m], centroids [K, D].
    """
    flat = words.ravel()
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    residuals = descriptors[order // words.shape[1]] - centroids[ordered]
    if len(starts):
        residuals = np.add.reduceat(residuals, starts, axis=0)
    count, dim = residuals.shape
    packed = np.zeros((count, -(-dim // 64) * 8), np.uint8)
    packed[:, : -(-dim // 8)] = np.packbits(residuals > 0, axis=1)
    return PhotoWords(ordered[starts], packed.view(np.uint64))


def selectivity(dim: int) -> NDArray[np.float64]:
    """Return σ(1 − 2h/D) for each Hamming distance h from 0 to D: [D + 1]."""
    similarity = 1 - 2 * np.arange(dim + 1) / dim
    return np.where(similarity > TAU, np.sign(similarity) * np.abs(similarity) ** ALPHA, 0.0)


class AsmkIndex:
    """An index of photos by their local descriptors; use `create` or `open` to get one.

    Several processes may use one index: changes wait for each other, and a search sees those that
    are complete.
    """

    def __init__(self, folder: Path, codebook: Codebook) -> None:
        self.folder = folder
        self.codebook = codebook
        width = -(-codebook.dim // 64)
        self._posting = np.dtype([("photo", "<u4"), ("bits", "<u8", (width,))])
        with self._reading():
            self._database = sqlite3.connect(
                folder / PHOTOS, _WAIT, isolation_level=None, check_same_thread=False
            )
            self._database.executescript(_CREATE)

    @staticmethod
    def exists(folder: str | Path) -> bool:
        """Whether a folder holds an index."""
        return (Path(folder) / PHOTOS).is_file()

    @classmethod
    def create(cls, folder: str | Path, codebook: Codebook) -> "AsmkIndex":
        """Create an empty index with a copy of the codebook; open one that has this codebook."""
        folder = Path(folder)
        if not cls.exists(folder):
            try:
                codebook.save(folder / CODEBOOK)
            except OSError as error:
                raise InputError(f"cannot write {folder}: {error.strerror or error}") from error
            return cls(folder, codebook)
        index = cls.open(folder, codebook.device)
        if index.codebook.fingerprint != codebook.fingerprint:
            raise InputError(
                f"{folder} was created with another codebook: give that codebook, or create "
                "another index"
            )
        return index

    @classmethod
    def open(cls, folder: str | Path, device: str = "auto") -> "AsmkIndex":
        """Open an index; the lists of words are read when they are used.

        Words are looked up on `device`: cpu, cuda, cuda:1 ...; auto uses a GPU if present.
        """
        folder = Path(folder)
        if not cls.exists(folder):
            raise InputError(f"no index at {folder}: create one with listwise local index")
        return cls(folder, Codebook.load(folder / CODEBOOK, device))

    def __len__(self) -> int:
        return int(self._read("SELECT count(*) FROM photos")[0][0])

    @property
    def ids(self) -> list[str]:
        """The ids of all photos; results with equal scores come in this order."""
        return [name for (name,) in self._read("SELECT id FROM photos ORDER BY number")]

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
        waiting: dict[str, PhotoWords] = {}
        size = 0
        for name, rows in zip(ids, descriptors, strict=True):
            waiting[name] = found = self._aggregate(rows, 1)
            size += len(found.words)
            on_photo(1)
            if size >= _PART:
                self._write(waiting)
                waiting, size = {}, 0
        self._write(waiting)

    def add_file(
        self, file: FeatureFile, on_photo: Callable[[int], object] = lambda count: None
    ) -> None:
        """Add the photos of a feature file that are not in the index yet.

        `on_photo` is called with the number of photos just processed.
        """
        self.codebook.require(file.header.extractor)
        known = {*self.ids}
        missing = [row for row, name in enumerate(file.ids) if name not in known]
        on_photo(len(file) - len(missing))
        descriptors = (file.read(row).descriptors for row in missing)
        self.add([file.ids[row] for row in missing], descriptors, on_photo)

    def _write(self, photos: dict[str, PhotoWords]) -> None:
        """Add photos in one transaction."""
        with self._changing() as database:
            self._delete(photos)
            lists = []
            for name, photo in photos.items():
                row = database.execute(
                    "INSERT INTO photos (id, words) VALUES (?, ?)", [name, len(photo.words)]
                )
                postings = np.empty(len(photo.words), self._posting)
                postings["photo"], postings["bits"] = row.lastrowid, photo.bits
                lists.append(postings)
            if lists:
                words = np.concatenate([photo.words for photo in photos.values()])
                order = np.argsort(words, kind="stable")
                words, ordered = words[order], np.concatenate(lists)[order]
                starts = np.flatnonzero(np.diff(words, prepend=-1))
                parts = np.split(ordered, starts[1:])
                contents = (part.tobytes() for part in parts)
                database.executemany(
                    "INSERT INTO lists VALUES (?, ?)",
                    zip(words[starts].tolist(), contents, strict=False),
                )

    def remove(self, ids: Iterable[str]) -> int:
        """Remove photos in one transaction; returns how many of them were in the index."""
        with self._changing():
            return self._delete(ids)

    def _delete(self, ids: Iterable[str]) -> int:
        """Delete photos, and their places in the lists of words."""
        database = self._database
        gone: list[int] = []
        for name in ids:
            found = database.execute("DELETE FROM photos WHERE id = ? RETURNING number", [name])
            gone += (number for (number,) in found)
        if gone:
            for row, content in database.execute("SELECT rowid, photos FROM lists").fetchall():
                postings = np.frombuffer(content, self._posting)
                kept = postings[~np.isin(postings["photo"], gone)]
                if not len(kept):
                    database.execute("DELETE FROM lists WHERE rowid = ?", [row])
                elif len(kept) < len(postings):
                    change = [kept.tobytes(), row]
                    database.execute("UPDATE lists SET photos = ? WHERE rowid = ?", change)
        return len(gone)

    def search(
        self, descriptors: NDArray[np.floating], k: int
    ) -> tuple[NDArray[np.float64], list[str]]:
        """Find the k photos that are most similar to a query: [n, D] -> scores [k'] and ids.

        k' = min(k, len(self)). Scores are ASMK* similarities from 0 to 1; photos with equal scores
        come in the order of `ids`.
        """
        if k < 1:
            raise InputError(f"`k` is {k}: give 1 or more")
        query = self._aggregate(descriptors, min(ASSIGNMENTS, len(self.codebook)))
        photos = self._read("SELECT number, words, id FROM photos ORDER BY number")
        numbers, sizes = np.array([row[:2] for row in photos], np.int64).reshape(-1, 2).T
        totals = self._totals(query, selectivity(self.codebook.dim), numbers)
        scores = totals / np.sqrt(np.maximum(sizes, 1) * max(1, len(query.words)))
        best = np.argsort(-scores, kind="stable")[:k]
        return scores[best], [photos[place][2] for place in best.tolist()]

    def _totals(
        self, query: PhotoWords, weights: NDArray[np.float64], numbers: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return Σ_c σ(...) of the photos with these numbers, 0 without shared words: [n].

        `weights` [D + 1] is σ for each Hamming distance.
        """
        count = len(numbers)
        totals = np.zeros(count + 1)  # the last one is for photos without a number
        place = np.full(numbers.max(initial=0) + 2, count)
        place[numbers] = np.arange(count)
        wanted = "SELECT word, photos FROM lists WHERE word IN (SELECT value FROM json_each(?))"
        with self._reading():
            found = self._database.execute(wanted, [json.dumps(query.words.tolist())])
            while rows := found.fetchmany(_LISTS):
                words, contents = zip(*rows, strict=True)
                postings = np.frombuffer(b"".join(contents), self._posting)
                lengths = [len(content) // self._posting.itemsize for content in contents]
                own = query.bits[np.searchsorted(query.words, words)].repeat(lengths, axis=0)
                distances = np.bitwise_count(own ^ postings["bits"]).sum(axis=1)
                places = place.take(postings["photo"], mode="clip")
                totals += np.bincount(places, weights[distances], count + 1)
        return totals[:-1]

    def _aggregate(self, descriptors: NDArray[np.floating], assignments: int) -> PhotoWords:
        rows = check_descriptors(descriptors, self.codebook.dim)
        words = self.codebook.assign(rows, assignments)
        return aggregate(rows, words, self.codebook.centroids)

    def info(self) -> dict[str, Any]:
        """Return a description of the index as JSON values."""
        ((count, words),) = self._read("SELECT count(*), coalesce(sum(words), 0) FROM photos")
        ((size,),) = self._read("SELECT coalesce(sum(length(photos)), 0) FROM lists")
        return {
            "photos": count,
            "words_per_photo": words / max(1, count),
            "bytes": size,
            "bytes_per_photo": size / max(1, count),
            "words": len(self.codebook),
            "dim": self.codebook.dim,
            "codebook": self.codebook.fingerprint,
            "extractor": self.codebook.info.extractor,
        }

    def _read(self, question: str, *values: object) -> list[tuple[Any, ...]]:
        with self._reading():
            return self._database.execute(question, values).fetchall()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise InputError(
                f"{self.folder} is damaged ({error}): build the index again"
            ) from error

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """Make one change of everything inside, or none if it fails."""
        with writing(self.folder), self._database:
            self._database.execute("BEGIN IMMEDIATE")
            yield self._database


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
        codebook: codebook of a new index; the index stores a copy.
        remove: remove the photo with this id; several can be given.
        device: device: cpu, cuda, cuda:1, or auto, which uses a GPU if one is available.
        on_photo: called with the number of photos just processed.
    """
    if codebook is None and not AsmkIndex.exists(folder):
        raise InputError(f"no index at {folder}: pass a `codebook` to create one")
    words = Codebook.load(codebook or Path(folder) / CODEBOOK, device)
    for file in files:  # check first: an empty index with the wrong words would be in the way
        words.require(file.header.extractor)
    index = AsmkIndex.create(folder, words)
    if unknown := set(remove).difference(index.ids):
        raise InputError(f"{folder} has no photo {min(unknown)}")
    index.remove(remove)
    for file in files:
        index.add_file(file, on_photo)
    return index


class LocalHit(NamedTuple):
    """A search result: the id of a photo, its ASMK* score, and its number of inliers.

    `inliers` is the number of features that it shares with the query; None if it was not verified.
    """

    id: str
    score: float
    inliers: int | None = None


def search_by_photo(
    folder: str | Path,
    photo: PhotoFile,
    extractor: Extractor,
    k: int = 10,
    features: str | Path | None = None,
    device: str = "auto",
) -> list[LocalHit]:
    """Find the k photos of an index that are most similar to a photo.

    Args:
        folder: folder of the index.
        photo: the query.
        extractor: the extractor of the indexed photos.
        k: maximum number of results.
        features: feature file of the indexed photos, to verify the first 100 results.
        device: device: cpu, cuda, cuda:1, or auto, which uses a GPU if one is available.
    """
    index = AsmkIndex.open(folder, device)
    index.codebook.require(extractor.name)
    file = None if features is None else FeatureFile.open(features)
    if file is not None:
        file.require(extractor.name)
    query = extractor(photo)
    scores, ids = index.search(query.descriptors, k if file is None else max(k, TOP))
    hits = [LocalHit(name, float(score)) for name, score in zip(ids, scores, strict=True)]
    if file is not None:
        compare = verifier_for(extractor.name)
        for place, hit in enumerate(hits[:TOP]):
            hits[place] = hit._replace(inliers=compare(query, file.get(hit.id)).inliers)
        order = rerank_by_inliers(range(len(hits)), [hit.inliers or 0 for hit in hits])
        hits = [hits[place] for place in order]
    return hits[:k]
