"""The segments of an ASMK* index: the valid files, and the photos removed from them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from listwise.columns import FileHeader
from listwise.errors import InputError
from listwise.local.asmk.postings import Postings, map_postings

MANIFEST: Final = "manifest.json"

_LARGEST = 1 << 25  # maximum postings of a merged segment; merging it needs about 2 GB
_DEAD = 0.25  # share of a segment's photos that may be removed before it is rewritten


class Segment(BaseModel):
    """A file of postings, and the numbers of the photos removed from it."""

    model_config = ConfigDict(frozen=True)

    name: str
    removed: tuple[int, ...] = ()


class Manifest(FileHeader):
    """The content of `manifest.json`: the fingerprint of the codebook, and the segments."""

    codebook: str
    written: int = 0  # number of segments written so far, for their names
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True, eq=False)
class IndexPart:
    """A segment, and a mask `kept` [n] of its photos; `name` is None until it is on disk."""

    name: str | None
    postings: Postings
    kept: NDArray[np.bool_]

    @property
    def live_postings(self) -> int:
        """Number of postings of photos that were not removed."""
        return int(self.postings.sizes[self.kept].sum(dtype=np.int64))

    @property
    def needs_rewrite(self) -> bool:
        """Whether so many photos were removed that the segment should be rewritten."""
        return bool(self.kept.mean() < 1 - _DEAD) if len(self.kept) else True

    def without(self, names: Iterable[str]) -> "IndexPart":
        """Return the same segment without the photos of these ids."""
        known = self.postings.numbers
        found = [known[name] for name in names if name in known]
        if not self.kept[found].any():
            return self
        kept = self.kept.copy()
        kept[found] = False
        return IndexPart(self.name, self.postings, kept)


def group_parts(parts: Sequence[IndexPart]) -> list[list[IndexPart]]:
    """Group the parts that should become one segment each.

    The newest parts are merged while the one before them is not much larger. The index then has
    few segments, and a posting is rewritten only when the index doubles.
    """
    groups = [[part] for part in parts]
    if not parts or parts[-1].name is not None:
        return groups
    size = parts[-1].live_postings
    while len(groups) > 1 and groups[-2][0].live_postings <= 2 * size:
        size += groups[-2][0].live_postings
        if size > _LARGEST:
            break
        groups[-2:] = [groups[-2] + groups[-1]]
    return groups


def read_segments(
    folder: Path, known: dict[str | None, Postings] | None = None
) -> tuple[Manifest, tuple[IndexPart, ...]]:
    """Read the manifest and open its segments; `known` postings are not mapped again."""
    for _ in range(10):
        try:
            content = (folder / MANIFEST).read_bytes()
        except OSError as error:
            raise InputError(f"{folder} is damaged: build the index again") from error
        manifest = Manifest.parse(content, folder, "build the index again")
        try:
            return manifest, tuple(
                _open_segment(folder, each, known or {}) for each in manifest.segments
            )
        except FileNotFoundError:
            continue  # another process replaced the segment after the manifest was read
        except (OSError, ValueError, IndexError) as error:
            raise InputError(f"{folder} is damaged ({error}): build the index again") from error
    raise InputError(f"{folder} is damaged: a segment is missing; build the index again")


def _open_segment(folder: Path, segment: Segment, known: dict[str | None, Postings]) -> IndexPart:
    postings = known.get(segment.name)
    if postings is None:
        postings = map_postings(folder / segment.name)
    kept = np.ones(len(postings), bool)
    kept[list(segment.removed)] = False
    return IndexPart(segment.name, postings, kept)


def ids_at(parts: Sequence[IndexPart], positions: NDArray[np.int64]) -> list[str]:
    """Return the ids at these positions, counting the photos that were not removed."""
    numbers = [np.flatnonzero(part.kept) for part in parts]
    ends = np.cumsum([len(part) for part in numbers])
    owners = np.searchsorted(ends, positions, "right")
    return [
        parts[owner].postings.name(int(numbers[owner][position - ends[owner]]))
        for owner, position in zip(owners.tolist(), positions.tolist(), strict=True)
    ]
