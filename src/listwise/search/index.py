"""What an index is, whichever engine holds it: entries, their descriptors, and search."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field

from listwise import __version__
from listwise.data.images import Box
from listwise.descriptors.settings import ExtractSettings
from listwise.errors import InputError

FORMAT_VERSION = 1
Float32 = NDArray[np.float32]
Keys = NDArray[np.int64]


class IndexHeader(BaseModel):
    """What an index remembers of its descriptors: the model that makes them, and how.

    `model` is the fingerprint of network and whitening, `model_folder` where they were.
    """

    model_config = ConfigDict(frozen=True)

    format_version: int = FORMAT_VERSION
    listwise: str = __version__
    model: str
    model_folder: str
    whitened: bool
    dim: int = Field(ge=1)
    settings: ExtractSettings = ExtractSettings()

    def check(self, model: str, where: str) -> None:
        """Refuse the descriptors of another model."""
        if model != self.model:
            raise InputError(
                f"{where} holds descriptors of the model {self.model[:12]} (from "
                f"{self.model_folder}), not of {model[:12]}: use that model, or build another index"
            )


class NoEntryError(InputError):
    """An index has no entry with a key."""


class SearchIntent(BaseModel):
    """What a user wants of search: bytes of memory at most, milliseconds a query, recall@10.

    None leaves a choice to the library, which searches exactly as long as that is fast.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    memory: int | None = Field(None, ge=1)
    milliseconds: float | None = Field(None, gt=0)
    recall: float | None = Field(None, gt=0, le=1)


@dataclass(frozen=True)
class Tuned:
    """How an index searches now, in words, and what was measured: recall@10, ms a query, bytes."""

    method: str
    recall: float
    milliseconds: float
    memory: int


@dataclass(frozen=True)
class Entry:
    """A photo of an index.

    `id` is its name as the source wrote it, `path` where it lies (empty if that is not known);
    `box` is the part of it that was described, all of it if None; `digest` is a hash of the file
    and the box, empty if the file was not read; `attributes` are the user's.
    """

    id: str
    path: str
    width: int
    height: int
    box: Box | None = None
    digest: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> int:
        """The entry's number in every engine."""
        return entry_key(self.id)


def entry_key(name: str) -> int:
    """63 bits of a hash of an id: an entry's number in every engine."""
    # What a terminal or a file system gives need not be UTF-8.
    content = name.encode(errors="surrogateescape")
    return int.from_bytes(blake2b(content, digest_size=8).digest()) >> 1


def possible_keys(keys: Iterable[int]) -> list[int]:
    """Those that can be keys: a number that a user typed may be any."""
    return [int(key) for key in keys if 0 <= key < 1 << 63]


@dataclass(frozen=True, eq=False)
class NewEntries:
    """Entries to be written together: n of them, their descriptors [n, C], their thumbnails.

    A thumbnail is a JPEG file's content, empty if there is none.
    """

    entries: Sequence[Entry]
    descriptors: Float32
    thumbnails: Sequence[bytes]


class Index(ABC):
    """Photos that can be searched by descriptor; `open_index` gives one.

    It is a `VectorIndex` whose positions are the entries' keys.
    """

    uri: str
    header: IndexHeader

    @abstractmethod
    def __len__(self) -> int:
        """The number of entries."""

    @abstractmethod
    def put(self, new: NewEntries) -> None:
        """Write entries in one step, in place of those with the same keys.

        Once it returns they are found by every search, and survive a kill.
        """

    @abstractmethod
    def remove(self, keys: Sequence[int]) -> int:
        """Remove entries in one step, and say how many there were; none of them is found again."""

    @abstractmethod
    def get(self, keys: Sequence[int]) -> dict[int, Entry]:
        """The entries with these keys, as far as there are any."""

    @abstractmethod
    def with_digests(self, digests: Sequence[str]) -> dict[str, Entry]:
        """Entries by digest, as far as there are any."""

    @abstractmethod
    def page(self, start: int, count: int) -> list[Entry]:
        """Some entries, in an order that stays while nothing is written."""

    @abstractmethod
    def thumbnail(self, key: int) -> bytes | None:
        """An entry's thumbnail, a JPEG file's content; None if it has none."""

    @abstractmethod
    def search(self, queries: ArrayLike, k: int, /) -> tuple[Float32, Keys]:
        """Scores and keys of the k nearest entries, best first, -1 where there are fewer.

        Shapes: [Q, C] -> [Q, k'], [Q, k'] with k' = min(k, len(self)).
        """

    @abstractmethod
    def vectors(self, keys: ArrayLike, /) -> Float32:
        """The descriptors of entries: [n] -> [n, C].

        Raises:
            NoEntryError: there is no entry with one of the keys.
        """

    @abstractmethod
    def tune(
        self, intent: SearchIntent, on_note: Callable[[str], object] = lambda note: None
    ) -> Tuned:
        """Choose how to search from what the user wants, measure it, and remember both."""

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """What there is to know of the index, for people and programs: JSON values."""

    @abstractmethod
    def refresh(self) -> None:
        """See what other processes have written since."""

    @abstractmethod
    def close(self) -> None:
        """Let go of files and connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Entry]:
        start = 0
        while found := self.page(start, 1000):
            yield from found
            start += len(found)

    def checked(self, new: NewEntries) -> None:
        """Refuse what does not fit: shapes, values that are not finite, ids that clash."""
        rows = new.descriptors
        if rows.shape != (len(new.entries), self.header.dim):
            raise InputError(
                f"{len(new.entries)} entries of {self.uri} need descriptors "
                f"[{len(new.entries)}, {self.header.dim}], not {list(rows.shape)}"
            )
        broken = np.flatnonzero(~np.isfinite(rows).all(axis=1))
        if len(broken):
            raise InputError(f"the descriptor of {new.entries[broken[0]].id} is not finite")
        names: dict[int, str] = {}
        for entry in new.entries:
            if names.setdefault(entry.key, entry.id) != entry.id:
                raise InputError(
                    f"the ids {entry.id} and {names[entry.key]} have one key: rename one"
                )
        for key, present in self.get(list(names)).items():
            if present.id != names[key]:
                raise InputError(f"the ids {names[key]} and {present.id} have one key: rename one")


def index_exists(uri: str) -> bool:
    """Whether there is an index."""
    engine, place = _engine(uri)
    found: bool = engine.exists(place)
    return found


def open_index(uri: str | Path) -> Index:
    """Open an index: a folder, `milvus://host:port/name`, or a `.db` file of milvus-lite."""
    engine, place = _engine(str(uri))
    if not engine.exists(place):
        raise InputError(
            f"there is no index at {uri}: make one with listwise index build {uri} PHOTOS "
            "--model MODEL"
        )
    opened: Index = engine.open(place)
    return opened


def create_index(uri: str | Path, header: IndexHeader) -> Index:
    """Make an empty index where there is none; places are named as for `open_index`."""
    engine, place = _engine(str(uri))
    if engine.exists(place):
        raise InputError(f"there is an index at {uri} already: add to it, or give another name")
    created: Index = engine.create(place, header)
    return created


def _engine(uri: str) -> tuple[Any, str]:
    # milvus-lite's files are folders, which shells end with a slash.
    file = uri.rstrip("/").endswith(".db")
    if file or uri.startswith("milvus://"):
        from listwise.search.milvus.index import MilvusIndex

        return MilvusIndex, uri.rstrip("/") if file else uri
    if "://" in uri:
        raise InputError(
            f"{uri}: an index is a folder, milvus://host:port/name, or a .db file of milvus-lite"
        )
    from listwise.search.embedded import EmbeddedIndex

    return EmbeddedIndex, uri
