"""The interface of every store: entries, their descriptors, and search."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from listwise.blocks import as_queries
from listwise.columns import FileHeader
from listwise.descriptors.settings import ExtractSettings
from listwise.descriptors.tuned import Expansion
from listwise.errors import InputError
from listwise.models.calibration import Calibration
from listwise.search.checksums import EntryCheck
from listwise.search.entries import Entry, Float32, Keys, NewEntries, NoEntryError
from listwise.search.filters import Filter
from listwise.search.generations import GenerationRecord, IndexUpgradedError
from listwise.search.mark_log import MarkLog


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

    memory: int | None = Field(None, ge=1)
    milliseconds: float | None = Field(None, gt=0)
    recall: float | None = Field(None, gt=0, le=1)


def search_intent(
    memory: int | None = None, milliseconds: float | None = None, recall: float | None = None
) -> SearchIntent:
    """Make a `SearchIntent`; a value out of range is an `InputError`."""
    try:
        return SearchIntent(memory=memory, milliseconds=milliseconds, recall=recall)
    except ValidationError as error:
        first = error.errors()[0]
        wanted = first["msg"].removeprefix("Input should be ")
        raise InputError(f"`{first['loc'][0]}` must be {wanted}, not {first['input']}") from None


Note = Callable[[str], object]
"""A function that is called with a sentence for the user."""


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

    @abstractmethod
    def get(self, keys: Sequence[int]) -> dict[int, Entry]:
        """Return the entries with these keys; unknown keys are left out."""

    @abstractmethod
    def with_digests(self, digests: Sequence[str]) -> dict[str, Entry]:
        """Return entries by digest; unknown digests are left out."""

    @abstractmethod
    def page(self, start: int, count: int, where: Filter | None = None) -> list[Entry]:
        """Return `count` entries from position `start`; the order is stable between writes.

        With `where`, positions are counted among the entries that match.
        """

    @abstractmethod
    def matching(self, where: Filter) -> Keys:
        """Return the keys of all entries that match a filter: distinct [n].

        Raises:
            InputError: no entry has an attribute of this name; the message lists those there are.
        """

    def check_filter(self, where: Filter) -> None:
        """Refuse a filter with an attribute that no entry has."""
        self.matching(where)

    def count(self, where: Filter | None = None) -> int:
        """The number of entries that match a filter, or of all."""
        return len(self) if where is None else len(self.matching(where))

    @abstractmethod
    def attribute_texts(self) -> Iterator[list[str]]:
        """Read the attributes of all entries as JSON texts, part by part."""

    def thumbnail(self, key: int) -> bytes | None:
        """Return the thumbnail of an entry as the bytes of a JPEG file; None if it has none."""
        return self.thumbnails([key]).get(key)

    @abstractmethod
    def thumbnails(self, keys: Sequence[int]) -> dict[int, bytes]:
        """Return the thumbnails of entries by key; entries without one are left out."""

    @abstractmethod
    def store_local(self) -> None:
        """Store local features of photos from now on; the header says so."""

    @abstractmethod
    def local(self, keys: Sequence[int]) -> dict[int, bytes]:
        """Return the encoded local features of entries; entries without them are left out."""

    @abstractmethod
    def put_local(self, entries: Sequence[Entry], local: Sequence[bytes]) -> None:
        """Write the local features of n entries in one step.

        Entries that were removed or replaced meanwhile are left out.
        """

    @abstractmethod
    def without_local(self) -> list[int]:
        """Return the keys of the entries without local features."""

    @abstractmethod
    def count_local(self) -> tuple[int, int]:
        """Return the number of entries with local features, and the bytes of all of them."""

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
        """Read the changes of other processes."""

    @abstractmethod
    def versions(self) -> tuple[Keys, Keys]:
        """Keys of all entries, and checksums of what does not depend on a model: [N], [N, 3].

        Two stores with equal versions have the same entries, thumbnails and local features.

        Raises:
            InputError: an earlier version of Listwise wrote entries without checksums.
        """

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
        header = self.header
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
            "local": self._local_facts(),
            "version": header.listwise,
            "generations": self._generation_facts(),
            **self.facts(),
        }

    def _local_facts(self) -> dict[str, int] | None:
        """What `info` shows about local features; None for an index without them."""
        if not self.header.local:
            return None
        entries, size = self.count_local()
        return {"entries": entries, "bytes": size}

    def _generation_facts(self) -> dict[str, int | None] | None:
        """What `info` shows about generations; None for an index that was never upgraded."""
        record = self.record()
        return (
            None
            if record == GenerationRecord()
            else record.model_dump(include={"current", "previous", "building"})
        )

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
        for entry in new.entries:
            if names.setdefault(entry.key, entry.id) != entry.id:
                raise InputError(
                    f"the ids {entry.id} and {names[entry.key]} have the same key: rename one"
                )
        for key, present in self.get(list(names)).items():
            if present.id != names[key]:
                raise InputError(
                    f"the ids {names[key]} and {present.id} have the same key: rename one"
                )
