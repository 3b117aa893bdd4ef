"""Searches from photos and keys to hits, in batches and within the limits."""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from listwise.data.images import Box, ImageError, Source, image_size
from listwise.data.photos import reduced_size
from listwise.errors import InputError
from listwise.local.features import LARGE, Features
from listwise.local.rerank import TOP, PhotoPart, Reranker
from listwise.machine import core_count
from listwise.models.embed import BATCH_PIXELS
from listwise.search.entries import Float32, NoEntryError
from listwise.search.filters import Filter
from listwise.search.generation import Generation
from listwise.search.hits import (
    Hit,
    Query,
    entry_vectors,
    find_hits,
    lowest_score,
    marked_order,
)
from listwise.search.index import Index
from listwise.search.refinement import RefineMethod, find_refinement
from listwise.search.reranking import DIFFUSED, diffuse_hits, rerank_hits
from listwise.search.store import Store
from listwise.serving.batching import ClientGoneError
from listwise.serving.decoding import QueryPhoto, check_photo, check_pixels, decode_query
from listwise.serving.memory import FEATURE_BYTES, TRIAL_SIDE, PixelBudget, load, longest_side
from listwise.serving.recent import RecentDescriptors, name_of
from listwise.serving.settings import Limits
from listwise.serving.uploads import Upload

REFRESH_SECONDS = 1.0
# Re-ranking ends a tenth of the time limit before it, so that the answer is sent in time.
ANSWER_SHARE = 10
# Work of a refinement: the number of plain searches that take as long.
REFINE_COSTS: dict[RefineMethod, float] = {"superglobal": 5.0, "diffusion": 25.0}
# Work of a plain search, in the unit of `Engine.check`.
SEARCH_COST = 0.01

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class SearchRequest:
    """A search: photos with their boxes, and keys of entries, as examples of one thing.

    `same` and `different` are keys of entries that were marked in the results of this search.

    `expand` is None for the default of the index. `finished` is set when nobody waits for the
    result any more; work on it then stops.
    """

    photos: Sequence[Upload]
    boxes: Sequence[Box | None]
    keys: Sequence[int]
    k: int
    expand: bool | None
    rerank: bool
    where: Filter | None = None
    min_score: float | None = None
    min_probability: float | None = None
    start: int = 0
    refine: RefineMethod | None = None
    same: Sequence[int] = ()
    different: Sequence[int] = ()
    finished: threading.Event = field(default_factory=threading.Event)

    @property
    def marked(self) -> bool:
        """Whether results were marked."""
        return bool(self.same or self.different)

    @property
    def diffuses(self) -> bool:
        """Whether diffusion comes after the verification, and starts from what it matched."""
        return self.rerank and self.refine == "diffusion"


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The hits of a search, and the generation of the index that was searched."""

    hits: list[Hit]
    generation: Generation


@dataclass(frozen=True, eq=False)
class RerankRequest:
    """The result of a search, to be re-ranked before a time of `time.monotonic`."""

    request: SearchRequest
    found: SearchResult
    until: float


@dataclass(frozen=True, eq=False)
class _Example:
    """A photo of the search at `place` in a batch, with the number of its pixels.

    `network_pixels` is the number after it was reduced.
    """

    place: int
    photo: Upload
    box: Box | None
    pixels: int
    network_pixels: int


class Engine:
    """Computes the results of searches; worker threads of the server call its methods."""

    def __init__(self, index: Index, limits: Limits) -> None:
        self.index = index
        self.limits = limits
        self.decoding = PixelBudget(limits.pixels)
        self._pool = ThreadPoolExecutor(core_count(), "decode")
        self.reranker = _BoundedReranker(self.decoding)
        self._recent = RecentDescriptors()
        self._refreshed = time.monotonic()
        self._switching = threading.Lock()
        self._closed = threading.Event()

    @property
    def max_side(self) -> int:
        """Long side in pixels of the largest image that the network gets."""
        return longest_side(self.index.generation, self.limits)

    def fresh(
        self, seconds: float = REFRESH_SECONDS, generation: Generation | None = None
    ) -> Store:
        """The store of a generation, with what other processes wrote up to some seconds ago."""
        used = generation or self.index.generation
        if time.monotonic() - self._refreshed >= seconds:
            self._refreshed = time.monotonic()
            try:
                used.store.refresh()
            except InputError:
                # As in `search`, which repeats the whole search.
                if generation is not None or not self.replaced(used):
                    raise
                return self.index.store
        return used.store

    def switch(self, wait: bool = True) -> bool:
        """Use the current generation after an upgrade or a rollback; False if it is used already.

        The store and the model are loaded first, and requests use the earlier ones meanwhile.
        Without `wait`, False is also returned while another thread loads them.
        """
        if not self._switching.acquire(blocking=wait):
            return False
        try:
            generation = self.index.generation
            if generation.store.is_current():
                return False
            new = generation.reopened()
            load(new, self.limits)
            self.index.generation = new
            logger.warning("%s was switched to generation %d", new.store.uri, new.store.generation)
            return True
        finally:
            self._switching.release()

    def replaced(self, used: Generation) -> bool:
        """Whether another generation is used now; waits for it if this one was discarded.

        Other errors of a request do not wait, because loading a generation can take minutes.
        """
        store = used.store
        if used is self.index.generation and store.generation not in store.record().numbers:
            self.switch()
        return used is not self.index.generation

    def watch(self) -> None:
        """Switch after an upgrade by another process, until the engine is closed."""
        reported = ""
        while not self._closed.wait(REFRESH_SECONDS):
            try:
                self.switch()
                reported = ""
            except Exception as error:  # the earlier generation is served until this is fixed
                if str(error) != reported:
                    reported = str(error)
                    logger.error("cannot switch to the upgraded index: %s", reported)

    def check(self, photos: Sequence[Upload]) -> float:
        """Refuse files that are not photos or too large; return the expected work.

        The unit is the work of the network on a million pixels. Decoding a pixel counts as a
        twentieth of its work in the network, and a photo of any size as a tenth of a unit.
        """
        cost = 0.0
        for photo in photos:
            check_photo(photo, self.limits.pixels)
            example = self._example(self.index.generation, 0, photo, None)
            cost += _photo_cost(example.pixels, example.network_pixels)
        return cost

    @property
    def trial_cost(self) -> float:
        """The expected work of the photo whose time `prepare` measures."""
        pixels = TRIAL_SIDE**2
        return _photo_cost(pixels, round(pixels * max(self.index.header.settings.scales) ** 2))

    def cost(self, request: SearchRequest) -> float:
        """Check the photos of a search, and return the expected work.

        The unit is the one of `check` for a search by photos, and a plain search for one by keys.
        """
        refine = 0.0 if request.refine is None else REFINE_COSTS[request.refine]
        if request.photos:
            return self.check(request.photos) + SEARCH_COST * refine
        return 1.0 + refine

    def search(self, batch: Sequence[SearchRequest]) -> list[SearchResult | Exception]:
        """Search for each request; an error in the place of hits concerns that request alone."""
        # Descriptors and store of one generation: an upgrade replaces both.
        generation = self.index.generation
        try:
            answers = self._search(generation, batch)
            failed = any(isinstance(answer, InputError) for answer in answers)
            if not failed or not self.replaced(generation):
                return _results(answers, generation)
        except InputError:
            # After an upgrade, the earlier generation may have been discarded meanwhile.
            if not self.replaced(generation):
                raise
        generation = self.index.generation
        return _results(self._search(generation, batch), generation)

    def _search(
        self, generation: Generation, batch: Sequence[SearchRequest]
    ) -> list[list[Hit] | Exception]:
        described = self._describe(generation, batch)
        store = self.fresh(generation=generation)
        answers: list[list[Hit] | Exception] = []
        queries: list[tuple[int, Query]] = []
        for place, (request, rows) in enumerate(zip(batch, described, strict=True)):
            answers.append(rows if isinstance(rows, Exception) else [])
            if isinstance(rows, Exception):
                continue
            try:
                queries.append((place, self._query(generation, request, rows)))
            except Exception as error:
                answers[place] = error
        plain = [(place, query) for place, query in queries if query.refine is None]
        if plain:
            found = find_hits(store, [query for _, query in plain], generation.calibration)
            for (place, _), hits in zip(plain, found, strict=True):
                answers[place] = hits
        for place, query in queries:
            if query.refine is not None:
                # Refinement is slow: each search has its turn, and nobody may wait for it by then.
                answers[place] = self._refine_one(generation, batch[place], query)
        return answers

    def _query(self, generation: Generation, request: SearchRequest, rows: Float32) -> Query:
        """The query of a request whose photos have the descriptors `rows` [n, C]."""
        store = generation.store
        lowest = lowest_score(generation.calibration, request.min_score, request.min_probability)
        if request.where is not None:
            store.check_filter(request.where)
        if request.keys:
            rows = np.concatenate([rows, entry_vectors(store, request.keys)])
        k = request.start + request.k + 1  # one more shows whether there are more
        k = max(k, DIFFUSED if request.diffuses else TOP) if request.rerank else k
        left_out = set(request.keys)
        now = request.refine is not None and not request.diffuses
        method = find_refinement(request.refine) if request.refine and now else None
        expand = generation.expands(
            request.expand, request.refine, request.min_probability, request.marked
        )
        same, different = request.same, request.different
        check_entries(store, [*same, *different])
        return Query(rows, k, expand, left_out, request.where, lowest, method, same, different)

    def _refine_one(
        self, generation: Generation, request: SearchRequest, query: Query
    ) -> list[Hit] | Exception:
        if request.finished.is_set():
            return ClientGoneError()
        try:
            return find_hits(generation.store, [query], generation.calibration)[0]
        except Exception as error:
            return error

    def rerank(self, batch: Sequence[RerankRequest]) -> list[list[Hit] | Exception]:
        """Re-rank hits; example photos that no longer exist are left out."""
        return [self._rerank_one(each) for each in batch]

    def _describe(
        self, generation: Generation, batch: Sequence[SearchRequest]
    ) -> list[Float32 | Exception]:
        """Descriptors [n, C] of the photos of each request, or an error."""
        empty = np.empty((0, generation.model.dim), np.float32)
        rows: list[list[Float32]] = [[empty] for _ in batch]
        errors: dict[int, Exception] = {}
        for part in self._parts(generation, batch):
            wanted = []
            for example in part:
                if batch[example.place].finished.is_set():
                    errors.setdefault(example.place, ClientGoneError())
                if example.place in errors:
                    continue
                known = None
                if batch[example.place].marked:
                    known = self._recent.find(name_of(generation, example.photo, example.box))
                if known is None:
                    wanted.append(example)
                else:
                    rows[example.place].append(known[None])
            with self.decoding.reserve(sum(example.pixels for example in wanted)):
                side = longest_side(generation, self.limits)
                decoded = list(self._pool.map(partial(_decode, side), wanted))
            ready = []
            for example, photo in zip(wanted, decoded, strict=True):
                if batch[example.place].finished.is_set():
                    errors.setdefault(example.place, ClientGoneError())
                elif isinstance(photo, Exception):
                    errors.setdefault(example.place, photo)
                else:
                    ready.append((example, photo.image))
            if ready:
                described = generation.describe([image for _, image in ready])
                for (example, _), row in zip(ready, described, strict=True):
                    self._recent.keep(name_of(generation, example.photo, example.box), row.copy())
                    rows[example.place].append(row[None])
        return [errors.get(place) or np.concatenate(parts) for place, parts in enumerate(rows)]

    def _parts(
        self, generation: Generation, batch: Sequence[SearchRequest]
    ) -> Iterator[list[_Example]]:
        """The photos of a batch in parts.

        A part has no more pixels than one photo may have, and no more than the network takes at
        one time, so that a request can be dropped between two parts.
        """
        most = BATCH_PIXELS[generation.model.device.type]
        part: list[_Example] = []
        for place, request in enumerate(batch):
            for photo, box in zip(request.photos, request.boxes, strict=True):
                new = self._example(generation, place, photo, box)
                pixels = sum(example.pixels for example in part) + new.pixels
                network = sum(example.network_pixels for example in part) + new.network_pixels
                if part and (pixels > self.limits.pixels or network > most):
                    yield part
                    part = []
                part.append(new)
        if part:
            yield part

    def _example(
        self, generation: Generation, place: int, photo: Upload, box: Box | None
    ) -> _Example:
        width, height = image_size(photo)
        size = reduced_size(width, height, longest_side(generation, self.limits))
        network = round(size[0] * size[1] * max(generation.header.settings.scales) ** 2)
        return _Example(place, photo, box, width * height, network)

    def _rerank_one(self, job: RerankRequest) -> list[Hit] | Exception:
        # The generation that was searched: scores and descriptors of another one do not compare.
        request, generation = job.request, job.found.generation
        try:
            hits = self._verify_one(job, generation.store)
            if isinstance(hits, Exception):
                return hits
            if request.finished.is_set():
                return ClientGoneError()
            if request.diffuses:
                hits = diffuse_hits(generation.store, hits)
            return marked_order(hits, request.same, request.different)
        except InputError:
            if not self.replaced(generation):
                raise
            return job.found.hits  # the generation was discarded meanwhile

    def _verify_one(self, job: RerankRequest, store: Store) -> list[Hit] | Exception:
        request, found = job.request, job.found.hits
        sources: list[tuple[Source, Box | None]] = [
            *zip(request.photos, request.boxes, strict=True)
        ]
        entries = store.get(request.keys)
        sources += [
            (entries[key].path, entries[key].box) if key in entries else ("", None)
            for key in request.keys
        ]
        loaded: list[tuple[int, QueryPhoto]] = []
        for number, (source, box) in enumerate(sources):
            if request.finished.is_set():
                return ClientGoneError()
            try:
                with self.decoding.reserve(check_pixels(source, self.limits.pixels)):
                    loaded.append((number, decode_query(source, box, LARGE)))
            except ImageError:
                continue
        if not loaded:
            return found
        images = [photo.image for _, photo in loaded]
        until = job.until - self.limits.seconds / ANSWER_SHARE
        hits = rerank_hits(
            store, self.reranker, images, found, until=until, finished=request.finished
        )
        return [_placed(hit, loaded) for hit in hits]

    def close(self) -> None:
        """Stop the threads."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.reranker.close()


def check_entries(store: Store, keys: Sequence[int]) -> None:
    """Raise a `NoEntryError` if the store does not have all of these entries."""
    known = store.get(keys) if keys else {}
    for key in keys:
        if key not in known:
            raise NoEntryError(f"the index has no entry {key}")


def _results(
    answers: Sequence[list[Hit] | Exception], generation: Generation
) -> list[SearchResult | Exception]:
    return [
        answer if isinstance(answer, Exception) else SearchResult(answer, generation)
        for answer in answers
    ]


def _decode(max_side: int, example: _Example) -> QueryPhoto | Exception:
    try:
        return decode_query(example.photo, example.box, max_side)
    except ImageError as error:
        return error


def _photo_cost(pixels: int, network_pixels: int) -> float:
    return 0.1 + (network_pixels + pixels / 20) / 1e6


class _BoundedReranker(Reranker):
    """Decodes photos of the index within the budget."""

    def __init__(self, decoding: PixelBudget) -> None:
        super().__init__(FEATURE_BYTES)
        self._decoding = decoding

    def features(self, entry: PhotoPart) -> Features:
        """Features of an entry's photo, from memory if they are there."""
        pixels = check_pixels(entry.path, self._decoding.limit)
        with self._decoding.reserve(pixels):
            return super().features(entry)


def _placed(hit: Hit, photos: Sequence[tuple[int, QueryPhoto]]) -> Hit:
    """A hit whose matches are in pixels of the whole example photo."""
    if hit.photo is None or hit.matches is None:
        return hit
    number, photo = photos[hit.photo]
    matches = np.concatenate([photo.in_whole_photo(hit.matches[:, :2]), hit.matches[:, 2:]], axis=1)
    return replace(hit, photo=number, matches=matches)
