"""The interface of every store: entries, their descriptors, and search."""

import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field

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
from listwise.search.generations import GenerationRecord, Generations
from listwise.search.marks import MarkLog
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
    def set_attribute(self, keys: Sequence[int], name: str, value: str) -> int:
        """Set an attribute of entries in one step, or remove it if the value is empty.

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
    def store_local(self) -> None:
        """Store local features of photos from now on; the header says so."""

    @abstractmethod
    def put_local(self, entries: Sequence[Entry], local: Sequence[bytes]) -> None:
        """Write the local features of n entries in one step.

        Entries that were removed or replaced meanwhile are left out.
        """

    def local_sizes(self) -> dict[int, int]:
        """The bytes of the local features of all entries by key; 0 for entries without them."""
        keys, versions = self.versions()
        sizes = np.maximum(versions[:, 2], 0) >> 32
        return dict(zip(keys.tolist(), sizes.tolist(), strict=True))

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

    def versions(self) -> tuple[Keys, Keys]:
        """Keys of all entries, and checksums of what does not depend on a model: [N], [N, 3].

        Two stores with equal versions have the same entries, thumbnails and local features.
        """
        names = ("entry_sum", "thumbnail_sum", "local_sum")
        parts = chain.from_iterable(self.rows(names))
        rows = [(row["key"], *(row[name] for name in names)) for row in parts]
        found = np.array(rows, np.int64).reshape(-1, 4)
        return found[:, 0], found[:, 1:]

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
