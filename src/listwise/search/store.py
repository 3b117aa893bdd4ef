"""The interface of every store: entries with their descriptors, search, and generations.

The generations of an index are its stores of descriptors of different models. An upgrade fills
another generation, and a switch makes it the current one by replacing a record.
"""

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict, Field

from listwise.blocks import as_queries
from listwise.calibration import Calibration
from listwise.errors import InputError
from listwise.files import FileHeader
from listwise.search.entries import (
    ENTRY,
    Entry,
    EntryCheck,
    Float32,
    Keys,
    NewEntries,
    NoEntryError,
    check_content,
    in_parts,
    possible_keys,
    read_entry,
)
from listwise.search.filters import Filter
from listwise.search.mark_log import MarkLog
from listwise.search.methods import SearchMethod
from listwise.settings import Expansion, ExtractSettings


class IndexHeader(FileHeader):
    """The model and the settings that an index was created with.

    Attributes:
        model: the fingerprint of network and whitening.
        model_folder: the folder of the model; empty if it was not loaded from one.
        model_name: the timm name of a pretrained backbone; empty for other models.
        whitened: whether the model has a whitening.
        dim: the dimensions C of a descriptor.
        settings: how descriptors are computed.
        calibration: the calibration of the model when the index was created, if it had one.
        expansion: the α query expansion that the model was tuned to, if it was.
        local: whether local features of added photos are stored.
        folders: the folders that were added.
    """

    model: str
    model_folder: str = ""
    model_name: str = ""
    whitened: bool
    dim: int = Field(ge=1)
    settings: ExtractSettings = ExtractSettings()
    calibration: Calibration | None = None
    expansion: Expansion | None = None
    local: bool = False
    folders: tuple[str, ...] = ()

    def check(self, model: str, where: str) -> None:
        """Refuse the descriptors of another model."""
        if model != self.model:
            source = self.model_folder or self.model_name or "Python"
            raise InputError(
                f"{where} holds descriptors of the model {self.model[:12]} (from {source}), "
                f"not of {model[:12]}: use that model, upgrade the index to the other "
                "one, or build another index"
            )


class IndexUpgradedError(InputError):
    """The index has another generation now: open it again, and repeat the change."""

    def __init__(self, uri: str) -> None:
        super().__init__(f"{uri} was upgraded or rolled back meanwhile: run the command again")


class GenerationRecord(BaseModel):
    """The numbers of the generations of an index; a new index has only generation 0.

    Attributes:
        current: the generation that is searched and changed.
        previous: the generation before the last upgrade, to which a rollback returns.
        building: the generation of an unfinished upgrade.
        latest: the highest number that was ever used; numbers are not used again.
        paused: a mark of the process that holds back changes for the moment of a switch. Only
            Milvus needs it; a folder has a lock.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    current: int = Field(0, ge=0)
    previous: int | None = Field(None, ge=0)
    building: int | None = Field(None, ge=0)
    latest: int = Field(0, ge=0)
    paused: str = ""

    @property
    def numbers(self) -> set[int]:
        """The numbers of all generations."""
        known = (self.current, self.previous, self.building)
        return {number for number in known if number is not None}

    def begun(self, number: int) -> "GenerationRecord":
        """The record of an upgrade that begins with an empty generation."""
        return GenerationRecord(current=self.current, building=number, latest=number)

    def switched(self, to: int) -> "GenerationRecord":
        """The record after a switch to another generation."""
        building = None if self.building == to else self.building
        return GenerationRecord(
            current=to, previous=self.current, building=building, latest=self.latest
        )

    def alone(self) -> "GenerationRecord":
        """The record of the current generation without the others."""
        return GenerationRecord(current=self.current, latest=self.latest)


class Generations(ABC):
    """The generations of an index, as the store of one of them uses them.

    Attributes:
        uri: the name of the index.
        number: the generation of the store.
        aside: whether the store may be changed although another generation is the current one;
            only an upgrade and a rollback do this.
    """

    uri: str
    number: int
    aside: bool

    @staticmethod
    @abstractmethod
    def exists(place: str) -> bool:
        """Whether an index exists at a place; an unfinished one does not count."""

    @staticmethod
    @abstractmethod
    def open_index(place: str) -> "Store":
        """Open the current generation of an index that exists."""

    @staticmethod
    @abstractmethod
    def create_index(place: str, header: "IndexHeader") -> "Store":
        """Create an empty index; it replaces an unfinished one."""

    @staticmethod
    def check_files(place: str, repair: bool = False) -> list[str]:
        """Names of the damaged files of an index; with `repair`, they are restored.

        An engine without files has none.

        Raises:
            DamagedIndexError: a file cannot be restored.
        """
        return []

    @abstractmethod
    def record(self) -> GenerationRecord:
        """Read which generations the index has now."""

    @abstractmethod
    def save_record(self, record: GenerationRecord) -> None:
        """Replace the record in one step."""

    @abstractmethod
    def open(self, number: int, *, aside: bool = False) -> "Store":
        """Open another generation of the index."""

    @abstractmethod
    def create(self, number: int, header: "IndexHeader") -> "Store":
        """Create an empty generation and open it with `aside`; it replaces an unfinished one."""

    @abstractmethod
    def drop_unused(self) -> None:
        """Delete the data of the generations that the record does not name."""

    def free_bytes(self) -> int | None:
        """Free space where the index is stored; None if it is not known."""
        return None

    @abstractmethod
    def upgrading(self) -> AbstractContextManager[None]:
        """Allow one upgrade at a time.

        Raises:
            IndexUpgradedError: another generation is the current one.
        """

    @abstractmethod
    def pausing(self) -> AbstractContextManager[None]:
        """Hold back changes of the entries by all processes, for the moment of a switch.

        Raises:
            IndexUpgradedError: another generation is the current one.
        """

    def switch(self, to: int) -> None:
        """Make another generation the current one, in one step; call it within `pausing`."""
        self.save_record(self.record().switched(to))

    def is_current(self) -> bool:
        """Whether searches use this generation; if not, the index was upgraded or rolled back."""
        return self.record().current == self.number

    def check_current(self) -> None:
        """Raise an `IndexUpgradedError` if another generation is the current one.

        With `aside`, it may be.
        """
        if not self.aside and not self.is_current():
            raise IndexUpgradedError(self.uri)


_PAGE = 1000  # entries that are read together
Values = Sequence[int] | Sequence[str] | None
"""The keys or the digests of some entries; None for all entries."""
Rows = Iterator[list[dict[str, Any]]]
"""Columns of entries by name, part by part."""


class Store(AbstractContextManager["Store"]):
    """The entries of an index with their descriptors [N, C]; `open_store` opens one.

    It is a `VectorIndex` whose positions are the keys of the entries.

    Attributes:
        engine: "embedded" or "milvus".
        uri: the folder or address of the index.
        header: the model and the settings of the descriptors.
        generations: the generations of the index, of which this store is one.
        method: how it searches.
        mark_log: the log of the marks, which all generations share.
    """

    engine: ClassVar[str]
    uri: str
    header: IndexHeader
    generations: Generations
    method: SearchMethod
    mark_log: MarkLog

    @property
    def generation(self) -> int:
        """The number of its generation."""
        return self.generations.number

    @abstractmethod
    def __len__(self) -> int:
        """The number of entries."""

    @abstractmethod
    def put(self, new: NewEntries) -> None:
        """Write entries in one step; they replace entries with the same keys.

        After it returns, every search finds them, and they survive a kill.
        """

    @abstractmethod
    def remove(self, keys: Sequence[int]) -> int:
        """Remove entries in one step and return their number."""

    @abstractmethod
    def set_attributes(self, keys: Sequence[int], values: Mapping[str, str]) -> int:
        """Set attributes of entries in one step, or remove those whose value is empty.

        Entries that were removed meanwhile are left out.

        Returns:
            The number of entries that have changed or had this value already.
        """

    def get(self, keys: Sequence[int]) -> dict[int, Entry]:
        """Return the entries with these keys; unknown keys are left out."""
        rows = chain.from_iterable(self.rows(ENTRY, possible_keys(keys)))
        return {row["key"]: read_entry(self.uri, row) for row in rows}

    def with_digests(self, digests: Sequence[str]) -> dict[str, Entry]:
        """Return entries by digest; unknown digests are left out."""
        wanted = sorted({digest for digest in digests if digest})
        rows = chain.from_iterable(self.rows(ENTRY, wanted, "digest"))
        return {row["digest"]: read_entry(self.uri, row) for row in rows}

    @abstractmethod
    def keys(self, where: Filter | None = None, most: int | None = None) -> Keys:
        """Return the keys of the entries that match a filter, or of all: distinct [n].

        Their order is stable between writes. With `most`, only so many are returned, the first.

        Raises:
            InputError: no entry has an attribute of this name; the message lists those there are.
        """

    def check_filter(self, where: Filter) -> None:
        """Refuse a filter with an attribute that no entry has."""
        self.keys(where)

    def count(self, where: Filter | None = None) -> int:
        """The number of entries that match a filter, or of all."""
        return len(self) if where is None else len(self.keys(where))

    def entries(
        self, where: Filter | None = None, start: int = 0, count: int | None = None
    ) -> Iterator[Entry]:
        """Read the entries, or those that match a filter, from position `start`.

        At most `count` are read, by default all. Entries that are removed meanwhile are left out.
        """
        keys = self.keys(where, None if count is None else start + count)[start:].tolist()
        for some in in_parts(keys, _PAGE):
            found = self.get(some)
            yield from (found[key] for key in some if key in found)

    def __iter__(self) -> Iterator[Entry]:
        return self.entries()

    def attributes(self) -> Iterator[tuple[dict[str, str], int]]:
        """Read the attributes of all entries, with the number of entries that have the same."""
        for part in self.rows(["attributes"]):
            for text, times in Counter(row["attributes"] for row in part).items():
                yield json.loads(text), times

    def thumbnail(self, key: int) -> bytes | None:
        """Return the thumbnail of an entry as the bytes of a JPEG file; None if it has none."""
        return self.contents("thumbnail", [key]).get(key)

    def contents(self, kind: str, keys: Sequence[int]) -> dict[int, bytes]:
        """Return the contents of entries by key; entries without them are left out.

        Args:
            kind: "thumbnail" for JPEG files, or "local" for encoded local features.
            keys: the keys of the entries.
        """
        found: dict[int, bytes] = {}
        if kind == "local" and not self.header.local:
            return found
        for row in chain.from_iterable(self.rows([kind, f"{kind}_sum"], possible_keys(keys))):
            check_content(self.uri, kind, row["key"], row[kind], row[f"{kind}_sum"])
            found |= {row["key"]: row[kind]} if row[kind] else {}
        return found

    @abstractmethod
    def change_header(self, **values: Any) -> None:
        """Set fields of the header, such as `local`, in one step."""

    @abstractmethod
    def put_local(self, entries: Sequence[Entry], local: Sequence[bytes]) -> None:
        """Write the local features of n entries in one step.

        Entries that were removed or replaced meanwhile are left out.
        """

    def local_sizes(self) -> dict[int, int]:
        """The bytes of the local features of all entries by key; 0 for entries without them."""
        rows = chain.from_iterable(self.rows(["local_sum"]))
        return {row["key"]: max(row["local_sum"], 0) >> 32 for row in rows}

    @abstractmethod
    def rows(self, columns: Sequence[str], values: Values = None, by: str = "key") -> Rows:
        """Read the key and other columns of entries, part by part, in any order.

        Args:
            columns: values of entries as in `as_row`, "thumbnail" and "local", and checksums.
            values: the keys of the entries, or their digests; by default all entries are read.
            by: the column of the values: "key" or "digest".
        """

    @abstractmethod
    def search(
        self, queries: ArrayLike, k: int, /, where: Filter | None = None
    ) -> tuple[Float32, Keys]:
        """Find the k nearest entries, best first: [Q, C] -> scores and keys, both [Q, k'].

        k' = min(k, n) for n entries that match `where`, or all. A key is -1 if fewer entries
        were found.
        """

    @abstractmethod
    def descriptors(self, keys: Keys) -> Iterable[tuple[Keys, Float32]]:
        """Read the descriptors of distinct keys, part by part: keys [n], rows [n, C]."""

    @abstractmethod
    def examine(self) -> Iterator[list[EntryCheck]]:
        """Read every entry and compare it with its checksums, part by part."""

    @abstractmethod
    def discard(self, places: Sequence[int]) -> None:
        """Remove damaged entries by the `place` of their `EntryCheck`."""

    @abstractmethod
    def refresh(self) -> None:
        """Read the changes of other processes."""

    def versions(self) -> dict[int, int]:
        """A number for each entry by key, which changes with all that does not depend on a model.

        Two stores with equal versions have the same entries, thumbnails and local features.
        """
        names = ("entry_sum", "thumbnail_sum", "local_sum")
        rows = chain.from_iterable(self.rows(names))
        return {row["key"]: hash(tuple(row[name] for name in names)) for row in rows}

    @abstractmethod
    def close(self) -> None:
        """Close files and connections."""

    def __exit__(self, *error: object) -> None:
        self.close()

    def stamp(self) -> Hashable | None:
        """Return a value that changes when entries change; None if this cannot be known."""
        return None

    def vectors(self, keys: ArrayLike, /) -> Float32:
        """Return the descriptors of entries: [n] -> [n, C]; `NoEntryError` for unknown keys."""
        wanted, inverse = np.unique(np.asarray(keys, np.int64), return_inverse=True)
        found = np.empty((len(wanted), self.header.dim), np.float32)
        known = np.zeros(len(wanted), bool)
        for some, rows in self.descriptors(wanted):
            places = np.searchsorted(wanted, some)
            found[places], known[places] = rows, True
        if not known.all():
            raise NoEntryError(f"the index has no entry {wanted[~known][0]}")
        return found[inverse]

    def info(self) -> dict[str, Any]:
        """Facts about the index as JSON values: engine, entries, model, settings, search method."""
        header, record, local, generations = self.header, self.generations.record(), None, None
        if header.local:
            sizes = [size for size in self.local_sizes().values() if size]
            local = {"entries": len(sizes), "bytes": sum(sizes)}
        if record != GenerationRecord():
            generations = record.model_dump(include={"current", "previous", "building"})
        return {
            "engine": self.engine,
            "entries": len(self),
            "dim": header.dim,
            "model": header.model[:12],
            "model_folder": header.model_folder or None,
            "model_name": header.model_name or None,
            "whitened": header.whitened,
            "calibrated": header.calibration is not None,
            "settings": header.settings.model_dump(mode="json"),
            "local": local,
            "version": header.listwise,
            "generations": generations,
            **self.method.facts(),
        }


def with_contents(
    store: Store, keys: Sequence[int], entries: Sequence[Entry], descriptors: Float32
) -> NewEntries:
    """Make new entries with the thumbnails and the local features that keys have in a store."""
    found = [store.contents(kind, keys) for kind in ("thumbnail", "local")]
    return NewEntries(
        entries, descriptors, *([each.get(key, b"") for key in keys] for each in found)
    )


def check_queries(store: Store, queries: ArrayLike, k: int) -> Float32:
    """Check queries and convert them to float32 [Q, C]."""
    if k < 1:
        raise InputError(f"`k` must be 1 or more, not {k}")
    vectors = np.ascontiguousarray(as_queries(queries), np.float32)
    if vectors.shape[1] != store.header.dim:
        raise InputError(
            f"{store.uri} holds descriptors of {store.header.dim} dimensions, the queries have "
            f"{vectors.shape[1]}: describe both with one model"
        )
    if not np.isfinite(vectors).all():
        raise InputError("the descriptor of a query is not finite: check the model")
    return vectors


def check_new(store: Store, new: NewEntries) -> NewEntries:
    """Refuse wrong shapes, values that are not finite, and ids that share a key.

    Returns:
        The entries, of those with the same id only the last.
    """
    rows = new.descriptors
    if rows.shape != (len(new.entries), store.header.dim):
        raise InputError(
            f"{len(new.entries)} entries of {store.uri} need descriptors "
            f"[{len(new.entries)}, {store.header.dim}], not {list(rows.shape)}"
        )
    broken = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if len(broken):
        raise InputError(f"the descriptor of {new.entries[broken[0]].id} is not finite")
    names: dict[int, str] = {}
    for entry in [*new.entries, *store.get([entry.key for entry in new.entries]).values()]:
        name = names.setdefault(entry.key, entry.id)
        if name != entry.id:
            raise InputError(f"the ids {name} and {entry.id} have the same key: rename one")
    last = {entry.key: place for place, entry in enumerate(new.entries)}
    return new if len(last) == len(new.entries) else new.at([*last.values()])
