"""An inverted file: the photos of each visual word, in memory or memory-mapped."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from listwise.files import write_tensors
from listwise.local.asmk.kernel import Bits, PhotoWords, hamming, run_positions

_BLOCK = 1 << 16  # postings compared at a time; they fit into the processor's cache
_TYPES = {"I32": np.int32, "I64": np.int64, "U64": np.uint64, "U8": np.uint8}


@dataclass(frozen=True, eq=False)
class Postings:
    """The inverted file of n photos: p postings, in one list for each of the u words that occur.

    Attributes:
        words: int32 [u], ascending.
        starts: int64 [u + 1], where the list of each word starts in `photos` and `bits`.
        photos: int32 [p], numbers from 0 to n − 1, ascending in each list.
        bits: uint64 [p, L].
        sizes: int32 [n], number of words of each photo.
        names: uint8, the ids in UTF-8, concatenated.
        name_ends: int64 [n], where each id ends in `names`.
    """

    words: NDArray[np.int32]
    starts: NDArray[np.int64]
    photos: NDArray[np.int32]
    bits: Bits
    sizes: NDArray[np.int32]
    names: NDArray[np.uint8]
    name_ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(int(getattr(self, field.name).nbytes) for field in fields(self))

    def name(self, photo: int) -> str:
        """Return the id of a photo."""
        start = int(self.name_ends[photo - 1]) if photo else 0
        return self.names[start : int(self.name_ends[photo])].tobytes().decode()

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of the photo with each id."""
        content = self.names.tobytes()
        ends = [0, *self.name_ends.tolist()]
        spans = enumerate(pairwise(ends))
        return {content[start:end].decode(): i for i, (start, end) in spans}

    def scores(self, query: PhotoWords, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return γ(Y) Σ_c σ(...) of every photo Y, 0 without shared words: [n].

        `weights` [D + 1] is σ for each Hamming distance.
        """
        _, lists, shared = np.intersect1d(
            self.words, query.words, assume_unique=True, return_indices=True
        )
        bits = query.bits[shared]
        starts = self.starts[lists]
        lengths = self.starts[lists + 1] - starts
        totals = np.zeros(len(self))
        ends = np.cumsum(lengths)
        block = max(_BLOCK, 4 * len(self))
        cuts = np.searchsorted(ends, np.arange(0, lengths.sum(), block), "right")
        for first, past in pairwise([*cuts, len(ends)]):
            here = lengths[first:past]
            places = run_positions(starts[first:past], here)
            distances = hamming(self.bits[places], np.repeat(bits[first:past], here, axis=0))
            totals += np.bincount(self.photos[places], weights[distances], len(self))
        return totals / np.sqrt(np.maximum(self.sizes, 1))


def invert(names: Sequence[str], photos: Sequence[PhotoWords], width: int) -> Postings:
    """Build the inverted file of photos with these ids; `width` is L, the columns of their bits."""
    sizes = np.array([len(photo.words) for photo in photos], np.int32)
    words = np.concatenate([np.zeros(0, np.int32), *(photo.words for photo in photos)])
    bits = np.concatenate([np.zeros((0, width), np.uint64), *(photo.bits for photo in photos)])
    numbers = np.repeat(np.arange(len(photos), dtype=np.int32), sizes)
    encoded = [name.encode() for name in names]
    blob = np.frombuffer(b"".join(encoded), np.uint8)
    ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
    return Postings(*_sort_by_word(words, numbers, bits), sizes, blob, ends)


def merge(parts: Sequence[tuple[Postings, NDArray[np.bool_]]]) -> Postings:
    """Merge inverted files, each with a mask [n] of the photos to keep."""
    words, numbers, bits, names, lengths = [], [], [], [], []
    before = 0
    for part, keep in parts:
        listed = np.repeat(part.words, np.diff(part.starts))
        kept = keep[part.photos]
        words.append(listed[kept])
        numbers.append((np.cumsum(keep, dtype=np.int32) - 1 + before)[part.photos[kept]])
        bits.append(part.bits[kept])
        each = np.diff(part.name_ends, prepend=0)
        names.append(part.names[np.repeat(keep, each)])
        lengths.append(each[keep])
        before += int(keep.sum())
    return Postings(
        *_sort_by_word(np.concatenate(words), np.concatenate(numbers), np.concatenate(bits)),
        np.concatenate([part.sizes[keep] for part, keep in parts]),
        np.concatenate(names),
        np.cumsum(np.concatenate(lengths), dtype=np.int64),
    )


def _sort_by_word(
    words: NDArray[np.int32], photos: NDArray[np.int32], bits: Bits
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32], Bits]:
    """Sort postings by word: the words that occur, where their lists start, photos, bits."""
    order = np.argsort(words, kind="stable")  # fast, because the input consists of sorted runs
    ordered = words[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-1))
    return ordered[starts], np.append(starts, len(words)), photos[order], bits[order]


def write_postings(postings: Postings, path: Path) -> None:
    """Write an inverted file atomically."""
    write_tensors(path, {field.name: getattr(postings, field.name) for field in fields(postings)})


def map_postings(path: Path) -> Postings:
    """Map the inverted file at a path into memory; only the parts that are used are read.

    Raises:
        OSError: the file is missing.
        ValueError: the file is damaged.
    """
    try:
        with safe_open(path, framework="numpy"):  # checks the size of the file, reads no tensor
            pass
    except SafetensorError as error:
        raise ValueError(f"{path.name}: {error}") from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    # A plain array view: every slice of a memmap would have some overhead.
    content = np.asarray(np.memmap(path, np.uint8, "r", 8 + length))

    def array(name: str) -> NDArray[Any]:
        entry = header[name]
        start, end = entry["data_offsets"]
        return content[start:end].view(_TYPES[entry["dtype"]]).reshape(entry["shape"])

    try:
        return Postings(*(array(field.name) for field in fields(Postings)))
    except KeyError as error:
        raise ValueError(f"{path.name} is not an inverted file") from error
