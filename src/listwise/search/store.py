"""The interface of every store: entries, their descriptors, and search."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError

from listwise.blocks import as_queries
from listwise.calibration import Calibration
from listwise.errors import InputError
from listwise.files import FileHeader
from listwise.search.entries import (
    ENTRY,
    NO_CONTENT,
    Entry,
    EntryCheck,
    Float32,
    Keys,
    NewEntries,
    NoEntryError,
    check_content,
    check_entry,
    from_row,
    in_parts,
    possible_keys,
)
from listwise.search.filters import Filter
from listwise.search.marks import MarkLog
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

    def check(self, model: str, where: str) -> None:
        """Refuse the descriptors of another model."""
        if model != self.model:
            source = self.model_folder or self.model_name or "Python"
            raise InputError(
                f"{where} holds descriptors of the model {self.model[:12]} (from {source}), "
                f"not of {model[:12]}: use that model, upgrade the index to the other "
                "one, or build another index"
            )


class SearchIntent(BaseModel):
    """The requirements of a user for search. None leaves the choice to the library.

    Attributes:
        memory: the maximum memory in bytes.
        milliseconds: the maximum latency per query.
        recall: the minimum recall@10, from 0 to 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    memory: ByteSize | None = Field(None, ge=1)
    milliseconds: float | None = Field(None, gt=0)
    recall: float | None = Field(None, gt=0, le=1)


def search_intent(
    memory: int | str | None = None,
    milliseconds: float | None = None,
    recall: float | None = None,
) -> SearchIntent:
    """Make a `SearchIntent`; a value out of range is an `InputError`.

    Args:
        memory: maximum memory for search, such as 500MB or 2GB, or a number of bytes.
        milliseconds: maximum latency per query, in milliseconds.
        recall: minimum share of the ten nearest photos that a search finds, from 0 to 1.
    """
    given = {"memory": memory, "milliseconds": milliseconds, "recall": recall}
    try:
        return SearchIntent.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        wanted = first["msg"].removeprefix("Input should be ")
        if first["loc"][0] == "memory":
            wanted = "a size such as 500MB or 2GB"
        raise InputError(f"`{first['loc'][0]}` must be {wanted}, not {first['input']}") from None


_PAGE = 1000  # entries that are read together
Note = Callable[[str], object]
"""A function that is called with a sentence for the user."""
Values = Sequence[int] | Sequence[str] | None
"""The keys or the digests of some entries; None for all entries."""
Rows = Iterator[list[dict[str, Any]]]
"""Columns of entries by name, part by part."""


class IndexUpgradedError(InputError):
    """The index has another generation now: open it again, and repeat the change."""


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

    def begun(self) -> "GenerationRecord":
        """The record of an upgrade that begins with an empty generation."""
        number = self.latest + 1
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


@dataclass(frozen=True)
class TuningResult:
    """A search method and its measurements.

    Attributes:
        method: a description of the method.
        recall: recall@10, against exact search.
        milliseconds: the median latency per query.
        memory: bytes of memory.
    """

    method: str
    recall: float
    milliseconds: float
    memory: int


class Store(ABC):
    """The entries of an index with their descriptors [N, C]; `open_store` opens one.

    It is a `VectorIndex` whose positions are the keys of the entries.
    """

    engine: ClassVar[str]
    uri: str
    header: IndexHeader
    generation: int

    @staticmethod
    @abstractmethod
    def exists(place: str) -> bool:
        """Whether an index exists at a place; an unfinished one does not count."""

    @classmethod
    @abstractmethod
    def open(cls, place: str) -> "Store":
        """Open an index that exists."""

    @classmethod
    @abstractmethod
    def create(cls, place: str, header: IndexHeader) -> "Store":
        """Create an empty index; it replaces an unfinished one."""

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
    def set_attribute(self, keys: Sequence[int], name: str, value: str) -> int:
        """Set an attribute of entries in one step, or remove it if the value is empty.

        Entries that were removed meanwhile are left out.

        Returns:
            The number of entries that have changed or had this value already.
        """

    @property
    @abstractmethod
    def mark_log(self) -> MarkLog:
        """The log of the marks, which all generations share."""

    def get(self, keys: Sequence[int]) -> dict[int, Entry]:
        """Return the entries with these keys; unknown keys are left out."""
        return {row["key"]: self._entry(row) for row in self._all(ENTRY, possible_keys(keys))}

    def with_digests(self, digests: Sequence[str]) -> dict[str, Entry]:
        """Return entries by digest; unknown digests are left out."""
        wanted = sorted({digest for digest in digests if digest})
        return {row["digest"]: self._entry(row) for row in self._all(ENTRY, wanted, "digest")}

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

    def pages(
        self, where: Filter | None = None, start: int = 0, count: int | None = None
    ) -> Iterator[list[Entry]]:
        """Read the entries, or those that match a filter, at most 1000 at a time.

        They are those from position `start` on, `count` of them or all. Entries that are removed
        meanwhile are left out.
        """
        keys = self.keys(where, None if count is None else start + count)[start:].tolist()
        for some in in_parts(keys, _PAGE):
            found = self.get(some)
            yield [found[key] for key in some if key in found]

    def page(self, start: int, count: int, where: Filter | None = None) -> list[Entry]:
        """Return `count` entries from position `start`, among those that match a filter or all."""
        return list(chain.from_iterable(self.pages(where, start, count)))

    def __iter__(self) -> Iterator[Entry]:
        return chain.from_iterable(self.pages())

    def attribute_texts(self) -> Iterator[list[str]]:
        """Read the attributes of all entries as JSON texts, part by part."""
        return ([row["attributes"] for row in part] for part in self._rows(["attributes"]))

    def thumbnail(self, key: int) -> bytes | None:
        """Return the thumbnail of an entry as the bytes of a JPEG file; None if it has none."""
        return self.thumbnails([key]).get(key)

    def thumbnails(self, keys: Sequence[int]) -> dict[int, bytes]:
        """Return the thumbnails of entries by key; entries without one are left out."""
        return self._contents("thumbnail", keys)

    @abstractmethod
    def store_local(self) -> None:
        """Store local features of photos from now on; the header says so."""

    def local(self, keys: Sequence[int]) -> dict[int, bytes]:
        """Return the encoded local features of entries; entries without them are left out."""
        return self._contents("local", keys) if self.header.local else {}

    def _contents(self, kind: str, keys: Sequence[int]) -> dict[int, bytes]:
        """The thumbnails or local features of entries; entries without them are left out."""
        found: dict[int, bytes] = {}
        for row in self._all([kind, f"{kind}_sum"], possible_keys(keys)):
            check_content(self.uri, kind, row["key"], row[kind], row[f"{kind}_sum"])
            found |= {row["key"]: row[kind]} if row[kind] else {}
        return found

    @abstractmethod
    def _rows(self, columns: Sequence[str], values: Values = None, by: str = "key") -> Rows:
        """Read the key and other columns of entries, part by part, in any order.

        Args:
            columns: values of entries as in `as_row`, "thumbnail" and "local", and checksums.
            values: the keys of the entries, or their digests; by default all entries are read.
            by: the column of the values: "key" or "digest".
        """

    def _all(self, *arguments: Any) -> Iterator[dict[str, Any]]:
        """The rows of all parts."""
        return chain.from_iterable(self._rows(*arguments))

    @abstractmethod
    def put_local(self, entries: Sequence[Entry], local: Sequence[bytes]) -> None:
        """Write the local features of n entries in one step.

        Entries that were removed or replaced meanwhile are left out.
        """

    def without_local(self) -> list[int]:
        """Return the keys of the entries without local features."""
        keys, versions = self.versions()
        found: list[int] = keys[versions[:, 2] == NO_CONTENT].tolist()
        return found

    def count_local(self) -> tuple[int, int]:
        """Return the number of entries with local features, and the bytes of all of them."""
        sums = self.versions()[1][:, 2]
        sizes = sums[sums != NO_CONTENT] >> 32
        return len(sizes), int(sizes.sum())

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
    def tune(self, intent: SearchIntent, on_note: Note = lambda note: None) -> TuningResult:
        """Choose a search method that meets the intent, measure it, and save the choice."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What an engine adds to `info`: its search method and the measurements."""

    @abstractmethod
    def examine(self) -> Iterator[list[EntryCheck]]:
        """Read every entry and compare it with its checksums, part by part."""

    @abstractmethod
    def discard(self, places: Sequence[int]) -> None:
        """Remove damaged entries by the `place` of their `EntryCheck`."""

    @staticmethod
    def check_files(place: str, repair: bool = False) -> list[str]:
        """Names of the damaged files of an index; with `repair`, they are restored.

        An engine without files has none.

        Raises:
            DamagedIndexError: a file cannot be restored.
        """
        return []

    @abstractmethod
    def refresh(self) -> None:
        """Read the changes of other processes."""

    def versions(self) -> tuple[Keys, Keys]:
        """Keys of all entries, and checksums of what does not depend on a model: [N], [N, 3].

        Two stores with equal versions have the same entries, thumbnails and local features.
        """
        columns = ("entry_sum", "thumbnail_sum", "local_sum")
        rows = [(row["key"], *(row[name] for name in columns)) for row in self._all(columns)]
        found = np.array(rows, np.int64).reshape(-1, 4)
        return found[:, 0], found[:, 1:]

    @abstractmethod
    def record(self) -> GenerationRecord:
        """Read which generations the index has now."""

    @abstractmethod
    def save_record(self, record: GenerationRecord) -> None:
        """Replace the record of the generations in one step."""

    @abstractmethod
    def open_generation(self, number: int, *, aside: bool = False) -> "Store":
        """Open another generation of the index.

        A store of the current generation refuses changes with `IndexUpgradedError` as soon as
        another generation is the current one. With `aside`, the store of another generation may
        be changed too; only an upgrade does this.
        """

    @abstractmethod
    def create_generation(self, number: int, header: IndexHeader) -> "Store":
        """Create an empty generation and open it with `aside`; it replaces an unfinished one."""

    @abstractmethod
    def drop_generations(self) -> None:
        """Delete the data of the generations that the record does not name."""

    def free_bytes(self) -> int | None:
        """Free space where the index is stored; None if it is not known."""
        return None

    @abstractmethod
    def upgrading(self) -> AbstractContextManager[None]:
        """Allow one upgrade at a time."""

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
        return self.record().current == self.generation

    def upgraded(self) -> IndexUpgradedError:
        """The error for a change of a generation that is not the current one."""
        return IndexUpgradedError(
            f"{self.uri} was upgraded or rolled back meanwhile: run the command again"
        )

    @abstractmethod
    def close(self) -> None:
        """Close files and connections."""

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
        header, record, local, generations = self.header, self.record(), None, None
        if header.local:
            local = dict(zip(("entries", "bytes"), self.count_local(), strict=True))
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
            **self.facts(),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def with_content(
        self, keys: Sequence[int], entries: Sequence[Entry], descriptors: Float32
    ) -> NewEntries:
        """Make new entries with the thumbnails and the local features that keys have here."""
        small, local = self.thumbnails(keys), self.local(keys)
        found = [[each.get(key, b"") for key in keys] for each in (small, local)]
        return NewEntries(entries, descriptors, *found)

    def _entry(self, row: Mapping[str, Any]) -> Entry:
        """The entry of a row; `DamagedIndexError` if it is not what was written."""
        check_entry(self.uri, row)
        return from_row(row)

    def check_queries(self, queries: ArrayLike, k: int) -> Float32:
        """Check queries and convert them to float32 [Q, C]."""
        if k < 1:
            raise InputError(f"`k` must be 1 or more, not {k}")
        vectors = np.ascontiguousarray(as_queries(queries), np.float32)
        if vectors.shape[1] != self.header.dim:
            raise InputError(
                f"{self.uri} holds descriptors of {self.header.dim} dimensions, the queries have "
                f"{vectors.shape[1]}: describe both with one model"
            )
        if not np.isfinite(vectors).all():
            raise InputError("the descriptor of a query is not finite: check the model")
        return vectors

    def check_new(self, new: NewEntries) -> None:
        """Refuse wrong shapes, values that are not finite, and ids that share a key."""
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
        for entry in [*new.entries, *self.get([entry.key for entry in new.entries]).values()]:
            name = names.setdefault(entry.key, entry.id)
            if name != entry.id:
                raise InputError(f"the ids {name} and {entry.id} have the same key: rename one")
