"""Accuracy against bytes per photo: shorter descriptors, and descriptors stored in fewer bits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from listwise.descriptors import Whitening
from listwise.errors import InputError
from listwise.pages import percent
from listwise.progress import aligned
from listwise.results.describe import BenchmarkDescriptors

Descriptors = NDArray[np.float32]


@dataclass(frozen=True)
class DescriptorSize:
    """The accuracy of descriptors of one length, stored in one format.

    Attributes:
        dim: number of dimensions.
        stored_as: "float32", "int8" or "bits".
        bytes: bytes per photo.
        maps: protocol -> mAP, from 0 to 1.
    """

    dim: int
    stored_as: str
    bytes: int
    maps: Mapping[str, float]


def rounded_to_int8(descriptors: Descriptors) -> Descriptors:
    """Return descriptors as they are after storage as int8 numbers: [n, C], unit rows.

    The largest number of a descriptor becomes ±127. Its scale need not be stored, because a
    descriptor has unit length.
    """
    largest = np.abs(descriptors).max(axis=1, keepdims=True)
    return _unit(np.rint(descriptors * (127 / np.maximum(largest, 1e-12))))


def rounded_to_bits(descriptors: Descriptors) -> Descriptors:
    """Return descriptors as they are after storage of their signs: [n, C], unit rows."""
    return _unit(np.where(descriptors > 0, 1.0, -1.0))


def centered(described: BenchmarkDescriptors) -> BenchmarkDescriptors:
    """Subtract the mean of the database, since most networks compute only positive numbers."""
    mean = described.database.mean(axis=0)
    database = _unit(described.database - mean)
    return replace(described, queries=_unit(described.queries - mean), database=database)


def _unit(rows: NDArray[np.floating]) -> Descriptors:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.maximum(lengths, 1e-12), np.float32)


# How descriptors are stored -> bits per dimension, and the descriptors after storage.
FORMATS: Final[dict[str, tuple[int, Callable[[Descriptors], Descriptors]]]] = {
    "float32": (32, lambda descriptors: descriptors),
    "int8": (8, rounded_to_int8),
    "bits": (1, rounded_to_bits),
}


def check_dims(dims: Sequence[int], whole: int) -> None:
    """Refuse lengths that descriptors of `whole` dimensions do not have."""
    for dim in dims:
        if not 1 <= dim <= whole:
            raise InputError(
                f"`dims` must be from 1 to {whole}, the dimensions of a descriptor, not {dim}"
            )


def evaluate_sizes(
    described: BenchmarkDescriptors, dims: Sequence[int]
) -> tuple[DescriptorSize, ...]:
    """Evaluate the first dimensions of descriptors at some lengths, in every format.

    The database is stored; queries are cut to the same length, but not rounded. Bits are the signs
    of the difference from the mean of the database.

    Args:
        described: the descriptors of a benchmark.
        dims: the lengths.

    Returns:
        The lengths in the given order, each in all formats.
    """
    whole = described.database.shape[1]
    check_dims(dims, whole)
    found = []
    for dim in dims:
        cut = described.whiten(Whitening.prefix(whole, dim))
        for name, (bits, stored) in FORMATS.items():
            given = centered(cut) if name == "bits" else cut
            results = replace(given, database=stored(given.database)).evaluate()
            maps = {protocol: result.mAP for protocol, result in results.items()}
            found.append(DescriptorSize(dim, name, -(-dim * bits // 8), maps))
    return tuple(found)


def format_sizes(sizes: Sequence[DescriptorSize]) -> str:
    """Format a table of mAP in percent, one line per length and format."""
    protocols = list(sizes[0].maps)
    lines = [["dimensions", "stored as", "bytes", *(f"mAP {name}" for name in protocols)]]
    for size in sizes:
        maps = (percent(value) for value in size.maps.values())
        lines.append([str(size.dim), size.stored_as, str(size.bytes), *maps])
    texts = aligned(lines, left=0)
    return "\n".join([texts[0], "-" * len(texts[0]), *texts[1:]])
