"""Search by example: photos, parts of photos, entries of the index, or several of them."""

import os
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image

from listwise.data.images import Box, ImageError, cut_out
from listwise.descriptors import Model
from listwise.errors import InputError
from listwise.search.entries import Entry, Float32, NoEntryError
from listwise.search.expansion import alpha_query_expansion
from listwise.search.filling import settings_here
from listwise.search.store import Store

if TYPE_CHECKING:
    from listwise.local.rerank import Reranker


@dataclass(frozen=True, eq=False)
class Hit:
    """An entry that was found, and its score.

    After re-ranking also the number of `inliers`, the matched points [m, 4] (x and y in the
    example, x and y in the entry, pixels of the upright photos), and the number of the example
    they are in; None where nothing was verified.
    """

    entry: Entry
    score: float
    inliers: int | None = None
    matches: npt.NDArray[np.float32] | None = None
    photo: int | None = None


@dataclass(frozen=True, eq=False)
class Query:
    """Examples of one thing as descriptors [n, C], and how to search for it."""

    vectors: Float32
    k: int
    expand: bool = False
    exclude: Collection[int] = ()


class Index:
    """An index, and the model that describes photos for it."""

    def __init__(self, index: Store, model: Model) -> None:
        index.header.check(model.fingerprint, index.uri)
        self.index = index
        self.model = model
        self.settings = settings_here(index.header, model)
        self._reranker: Reranker | None = None

    def describe(
        self, photos: Sequence[Image.Image], boxes: Sequence[Box | None] | None = None
    ) -> Float32:
        """Descriptors of upright RGB photos or parts of them, made as the index's are: [n, C]."""
        return self.model.describe_photos(_parts(photos, boxes), self.settings)

    def examples(self, keys: Sequence[int]) -> Float32:
        """Descriptors of entries: [n] -> [n, C].

        Raises:
            NoEntryError: there is no such entry.
        """
        known = self.index.get(keys)
        for key in keys:
            if key not in known:
                raise NoEntryError(f"there is no entry {key} in the index")
        return self.index.vectors(np.array(keys, np.int64))

    def search(
        self, vectors: Float32, k: int, expand: bool = False, exclude: Collection[int] = ()
    ) -> list[Hit]:
        """The k entries most like some examples: [n, C].

        Args:
            vectors: descriptors of one or several examples; several count with their mean.
            k: results at most.
            expand: expand the query (αQE) with what it finds first.
            exclude: keys of entries to be left out, such as those that are the examples.
        """
        return self.search_all([Query(vectors, k, expand, exclude)])[0]

    def search_all(self, queries: Sequence[Query]) -> list[list[Hit]]:
        """`search` for several queries at once, which costs little more than one."""
        found = self._found(queries)
        entries = self._entries(found)
        if any(key not in entries for row in found for key, _ in row):
            # Another process has removed some since, and others come in their place.
            self.index.refresh()
            found = self._found(queries)
            entries = self._entries(found)
        return [[Hit(entries[key], score) for key, score in row if key in entries] for row in found]

    def _found(self, queries: Sequence[Query]) -> list[list[tuple[int, float]]]:
        """Keys and scores of what each query finds."""
        rows = np.stack([_mean(query.vectors) for query in queries])
        expanded = [i for i, query in enumerate(queries) if query.expand]
        if expanded and len(self.index):
            rows[expanded] = self._expanded(rows[expanded])
        most = max(query.k + len(query.exclude) for query in queries)
        scores, keys = self.index.search(rows, most)
        return [
            [
                (int(key), float(score))
                for key, score in zip(row, values, strict=True)
                if key >= 0 and int(key) not in query.exclude
            ][: query.k]
            for row, values, query in zip(keys, scores, queries, strict=True)
        ]

    def _expanded(self, rows: Float32) -> Float32:
        try:
            return alpha_query_expansion(rows, self.index).astype(np.float32, copy=False)
        except NoEntryError:
            # What it found first has been removed before it was read.
            self.index.refresh()
            return alpha_query_expansion(rows, self.index).astype(np.float32, copy=False)

    def _entries(self, found: list[list[tuple[int, float]]]) -> dict[int, Entry]:
        return self.index.get(sorted({key for row in found for key, _ in row}))

    def rerank(
        self,
        photos: Sequence[Image.Image],
        hits: Sequence[Hit],
        boxes: Sequence[Box | None] | None = None,
        until: float | None = None,
    ) -> list[Hit]:
        """Put what shares the examples' geometry first, of the first 100 hits.

        Args:
            photos: the examples, upright; there should be one at least.
            hits: what `search` found, best first.
            boxes: the parts of the photos that are meant.
            until: a time of `time.monotonic` before which this should be done: hits further down
                the list are left as they are, the more the more examples there are. What was
                looked at is remembered, so the next time gets further.
        """
        from listwise.local.rerank import TOP, Reranker

        if self._reranker is None:
            self._reranker = Reranker()
        entries = [hit.entry for hit in hits[:TOP]]
        if until is not None:
            entries = entries[: max(1, TOP // max(1, len(photos)))]
            entries = entries[: _in_time(self._reranker, entries, until)]
        order = self._reranker.rerank(photos, entries, boxes)
        verified = [
            replace(
                hits[each.position],
                inliers=each.inliers,
                matches=each.matches,
                photo=each.photo,
            )
            for each in order
        ]
        return [*verified, *hits[len(verified) :]]


def _in_time(reranker: "Reranker", entries: Sequence[Entry], until: float) -> int:
    """How many of the first entries have features when two thirds of the time are over."""
    now = time.monotonic()
    stop = now + (until - now) * 2 / 3

    def ready(entry: Entry) -> bool:
        if time.monotonic() > stop:
            return False
        with suppress(ImageError):
            reranker.features(entry)
        return True

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return sum(1 for _ in takewhile(bool, pool.map(ready, entries)))


def _parts(photos: Sequence[Image.Image], boxes: Sequence[Box | None] | None) -> list[Image.Image]:
    if boxes is None:
        return list(photos)
    return [
        photo if box is None else cut_out(photo, box, f"photo {number}")
        for number, (photo, box) in enumerate(zip(photos, boxes, strict=True), 1)
    ]


def _mean(vectors: Float32) -> Float32:
    if not len(vectors):
        raise InputError("there is nothing to search for: give a photo or an entry")
    if len(vectors) == 1:
        row: Float32 = vectors[0]
        return row
    total: Float32 = vectors.sum(axis=0)
    return total / max(float(np.linalg.norm(total)), float(np.finfo(np.float32).tiny))
