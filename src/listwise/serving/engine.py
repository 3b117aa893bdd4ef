"""Queries from photos and keys to hits: in batches, within the limits."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image

from listwise.data.images import Box, ImageError, Source, TooManyPixelsError, image_size, load_image
from listwise.local.rerank import TOP
from listwise.machine import core_count
from listwise.search.entries import Float32
from listwise.search.hits import Hit, Query, entry_vectors, find_hits
from listwise.search.index import Index
from listwise.search.store import Store
from listwise.serving.settings import Limits
from listwise.serving.uploads import Upload

REFRESH_SECONDS = 1.0


@dataclass(frozen=True, eq=False)
class SearchRequest:
    """A search: photos, their boxes, and keys of entries as examples."""

    photos: Sequence[Upload]
    boxes: Sequence[Box | None]
    keys: Sequence[int]
    k: int
    expand: bool
    rerank: bool


@dataclass(frozen=True, eq=False)
class RerankRequest:
    """What a search found, to be re-ranked until a time of `time.monotonic`."""

    request: SearchRequest
    hits: Sequence[Hit]
    until: float


class Engine:
    """Works on searches; its methods are the work of a server's threads."""

    def __init__(self, index: Index, limits: Limits) -> None:
        self.index = index
        self.limits = limits
        self._pool = ThreadPoolExecutor(core_count(), "decode")
        self._refreshed = time.monotonic()

    def fresh(self) -> Store:
        """The index with what other processes wrote until a second ago, at least."""
        if time.monotonic() - self._refreshed >= REFRESH_SECONDS:
            self._refreshed = time.monotonic()
            self.index.store.refresh()
        return self.index.store

    def check(self, photos: Sequence[Upload]) -> None:
        """Refuse photos that are none, or too large, from their headers."""
        for photo in photos:
            width, height = image_size(photo)
            if width * height > self.limits.pixels:
                allowed = f"{self.limits.pixels / 1e6:g} million"
                raise TooManyPixelsError(
                    photo, f"has {width} × {height} pixels, more than the {allowed} allowed"
                )

    def search(self, batch: Sequence[SearchRequest]) -> list[list[Hit] | Exception]:
        """Search for all of a batch; what is wrong with one is its own answer alone."""
        self.fresh()
        described = self._describe(batch)
        answers: list[list[Hit] | Exception] = []
        queries: dict[int, Query] = {}
        for request, rows in zip(batch, described, strict=True):
            try:
                if isinstance(rows, Exception):
                    raise rows
                entries = entry_vectors(self.index.store, request.keys)
                vectors = np.concatenate([rows, entries]) if request.keys else rows
                k = max(request.k, TOP) if request.rerank else request.k
                queries[len(answers)] = Query(vectors, k, request.expand, set(request.keys))
                answers.append([])
            except Exception as error:
                answers.append(error)
        if queries:
            found = find_hits(self.index.store, list(queries.values()))
            for place, hits in zip(queries, found, strict=True):
                answers[place] = hits
        return answers

    def rerank(self, batch: Sequence[RerankRequest]) -> list[list[Hit]]:
        """Re-rank what searches found; photos of examples that are gone are left out."""
        return [self._reranked(each) for each in batch]

    def _describe(self, batch: Sequence[SearchRequest]) -> list[Float32 | Exception]:
        """Descriptors [n, C] of each search's photos, or why there are none."""
        photos = [
            (place, photo, box)
            for place, request in enumerate(batch)
            for photo, box in zip(request.photos, request.boxes, strict=True)
        ]
        empty = np.empty((0, self.index.model.dim), np.float32)
        rows: list[list[Float32]] = [[empty] for _ in batch]
        errors: dict[int, Exception] = {}
        for part in self._in_memory(photos):
            loaded: list[tuple[int, Image.Image]] = []
            for (place, _, _), image in zip(part, self._pool.map(_load, part), strict=True):
                if isinstance(image, Exception):
                    errors.setdefault(place, image)
                else:
                    loaded.append((place, image))
            described = self.index.describe([image for _, image in loaded])
            for (place, _), row in zip(loaded, described, strict=True):
                rows[place].append(row[None])
        return [errors.get(i) or np.concatenate(parts) for i, parts in enumerate(rows)]

    def _in_memory(
        self, photos: Sequence[tuple[int, Upload, Box | None]]
    ) -> list[list[tuple[int, Upload, Box | None]]]:
        """Photos in parts that together have no more pixels than one photo may have."""
        parts: list[list[tuple[int, Upload, Box | None]]] = []
        room = 0
        for each in photos:
            width, height = image_size(each[1])
            if not parts or width * height > room:
                parts.append([])
                room = self.limits.pixels
            parts[-1].append(each)
            room -= width * height
        return parts

    def _reranked(self, found: RerankRequest) -> list[Hit]:
        request = found.request
        loaded: list[tuple[int, Image.Image, Box | None]] = []
        sources: list[tuple[Source, Box | None]] = [
            *zip(request.photos, request.boxes, strict=True)
        ]
        entries = self.index.store.get(request.keys)
        there = [entries.get(key) for key in request.keys]
        sources += [(entry.path, entry.box) if entry else ("", None) for entry in there]
        for number, (source, box) in enumerate(sources):
            with suppress(ImageError):
                loaded.append((number, load_image(source), box))
        if not loaded:
            return list(found.hits)
        numbers, photos, boxes = zip(*loaded, strict=True)
        hits = self.index.rerank(photos, found.hits, boxes, found.until)
        return [
            hit if hit.photo is None else replace(hit, photo=numbers[hit.photo]) for hit in hits
        ]

    def close(self) -> None:
        """Let the threads go."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _load(request: tuple[int, Upload, Box | None]) -> Image.Image | Exception:
    _, photo, box = request
    try:
        return load_image(photo, box)
    except ImageError as error:
        return error
