"""What holds an index, whichever engine it is: entries, their descriptors, and search."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from listwise.blocks import as_queries
from listwise.columns import FileHeader
from listwise.descriptors.settings import ExtractSettings
from listwise.errors import InputError
from listwise.search.checksums import EntryCheck
from listwise.search.entries import Entry, Float32, Keys, NewEntries, NoEntryError


class IndexHeader(FileHeader):
    """What an index remembers of its descriptors: the model that makes them, and how.

    `model` is the fingerprint of network and whitening, `model_folder` the folder they were opened
    from, `model_name` the timm backbone for a model off the shelf.
    """

    model: str
    model_folder: str = ""
    model_name: str = ""
    whitened: bool
    dim: int = Field(ge=1)
    settings: ExtractSettings = ExtractSettings()

    def check(self, model: str, where: str) -> None:
        """Refuse the descriptors of another model."""
        if model != self.model:
            source = self.model_folder or self.model_name or "Python"
            raise InputError(
                f"{where} holds descriptors of the model {self.model[:12]} (from {source}), "
                f"not of {model[:12]}: use that model, or build another index"
            )


class SearchIntent(BaseModel):
    """What a user wants of search: bytes of memory at most, milliseconds a query, recall@10.

    None leaves a choice to the library, which searches exactly while that is fast enough.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    memory: int | None = Field(None, ge=1)
    milliseconds: float | None = Field(None, gt=0)
    recall: float | None = Field(None, gt=0, le=1)


def search_intent(
    memory: int | None = None, milliseconds: float | None = None, recall: float | None = None
) -> SearchIntent:
    """What a user wants of search, checked."""
    try:
        return SearchIntent(memory=memory, milliseconds=milliseconds, recall=recall)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"`{first['loc'][0]}` {first['input']}: {first['msg'].lower()}") from None


Note = Callable[[str], object]
"""Is called with a sentence for the user."""


@dataclass(frozen=True)
class TuningResult:
    """How an index searches, in words, and what was measured: recall@10, ms per query, bytes."""

    method: str
    recall: float
    milliseconds: float
    memory: int


class Store(ABC):
    """Photos that can be searched by descriptor; `open_index` gives one.

    It is a `VectorIndex` whose positions are the entries' keys.
    """

    engine: ClassVar[str]
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
        """Remove entries in one step, and return how many there were."""

    @abstractmethod
    def get(self, keys: Sequence[int]) -> dict[int, Entry]:
        """The entries with these keys; keys without an entry are left out."""

    @abstractmethod
    def with_digests(self, digests: Sequence[str]) -> dict[str, Entry]:
        """Entries by digest; digests without an entry are left out."""

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
    def descriptors(self, keys: Keys) -> Iterable[tuple[Keys, Float32]]:
        """Descriptors of entries with distinct keys, part by part: keys [n], rows [n, C]."""

    @abstractmethod
    def tune(self, intent: SearchIntent, on_note: Note = lambda note: None) -> TuningResult:
        """Choose how to search from what the user wants, measure it, and remember both."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What an engine adds to `info`: how it searches, and what was measured."""

    @abstractmethod
    def examine(self) -> Iterator[list[EntryCheck]]:
        """Read every entry and compare it with its checksums, part by part."""

    @abstractmethod
    def discard(self, places: Sequence[int]) -> None:
        """Remove damaged entries by the `place` of their `EntryCheck`."""

    @abstractmethod
    def add_checksums(self) -> None:
        """Store the checksums of entries that an earlier version wrote without them."""

    @staticmethod
    def damaged_files(place: str) -> list[str]:
        """Names of the damaged files of an index; an engine without files has none."""
        return []

    @classmethod
    def repair_files(cls, place: str) -> list[str]:
        """Repair the damaged files of an index and return their names."""
        return []

    @abstractmethod
    def refresh(self) -> None:
        """Read what other processes have written since."""

    @abstractmethod
    def close(self) -> None:
        """Close files and connections."""

    def vectors(self, keys: ArrayLike, /) -> Float32:
        """The descriptors of entries: [n] -> [n, C]; a `NoEntryError` if one does not exist."""
        wanted, inverse = np.unique(np.asarray(keys, np.int64), return_inverse=True)
        found = np.empty((len(wanted), self.header.dim), np.float32)
        known = np.zeros(len(wanted), bool)
        for some, rows in self.descriptors(wanted):
            places = np.searchsorted(wanted, some)
            found[places], known[places] = rows, True
        if not known.all():
            raise NoEntryError(f"there is no entry {wanted[~known][0]} in the index")
        return found[inverse]

    def info(self) -> dict[str, Any]:
        """Facts about the index as JSON values: engine, entries, model, settings, search method."""
        header = self.header
        return {
            "engine": self.engine,
            "entries": len(self),
            "dim": header.dim,
            "model": header.model[:12],
            "model_folder": header.model_folder or None,
            "model_name": header.model_name or None,
            "whitened": header.whitened,
            "settings": header.settings.model_dump(mode="json"),
            "version": header.listwise,
            **self.facts(),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Entry]:
        start = 0
        while found := self.page(start, 1000):
            yield from found
            start += len(found)

    def check_queries(self, queries: ArrayLike, k: int) -> Float32:
        """Queries [Q, C] as they are searched; refuse what does not fit."""
        if k < 1:
            raise InputError(f"k is {k}; ask for one neighbour at least")
        vectors = np.ascontiguousarray(as_queries(queries), np.float32)
        if vectors.shape[1] != self.header.dim:
            raise InputError(
                f"{self.uri} holds descriptors of {self.header.dim} dimensions, the queries have "
                f"{vectors.shape[1]}: describe both with one model"
            )
        if not np.isfinite(vectors).all():
            raise InputError("a query is not finite; look for broken descriptors")
        return vectors

    def check_new(self, new: NewEntries) -> None:
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
