"""The server's work on requests: each has a place in a queue and a time limit."""

import asyncio
import io
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from anyio import to_thread
from fastapi import HTTPException
from PIL import Image

from listwise.data.images import ImageError, load_image
from listwise.errors import InputError
from listwise.files import write_failure
from listwise.local.rerank import Reranker
from listwise.search.duplicates import DuplicateGroup, find_duplicates
from listwise.search.entries import Entry, NoEntryError
from listwise.search.filling import thumbnail_from_photo
from listwise.search.filters import Facet, count_facets
from listwise.search.generations import IndexUpgradedError
from listwise.search.hits import Hit
from listwise.search.index import Index
from listwise.search.store import Store
from listwise.serving.batching import Batcher, Client, QueueFullError, TooLateError
from listwise.serving.decoding import check_pixels
from listwise.serving.engine import Engine, RerankRequest, SearchRequest, SearchResult
from listwise.serving.fields import BadRequestError
from listwise.serving.metrics import Metrics
from listwise.serving.settings import ServeSettings
from listwise.serving.upload_folder import UploadFolder
from listwise.serving.uploads import HeldBytes, Upload
from listwise.serving.views import AddedView, Answer

PHOTO_SIDE = 1600
FACET_SECONDS = 60

logger = logging.getLogger(__name__)


class Service:
    """Searches an index and changes it for many clients at one time.

    Each kind of work has its own queue and thread: searches by photo, searches by key, re-ranking,
    pictures that have to be decoded, marks and classes, and changes of the index.
    """

    def __init__(
        self, index: Index, settings: ServeSettings, metrics: Metrics, trial_seconds: float = 0.0
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self.limits = settings.limits
        self.held = HeldBytes(self.limits.held_bytes, self.limits.held_bytes_per_address)
        self._engine = Engine(index, self.limits)
        self._comparing = ThreadPoolExecutor(1, "duplicates")
        self._comparison: _Comparison | None = None
        self._comparison_lock = threading.Lock()
        self._facets_lock = threading.Lock()
        self._facets: tuple[int, float, list[Facet]] | None = None
        self.uploads = None
        if settings.uploads is not None:
            self.uploads = UploadFolder(index, settings.uploads, lambda: self._engine.max_side)
            if settings.can_write:
                self.uploads.clean()
        limits = self.limits
        self._photo_searches = Batcher[SearchRequest, SearchResult](
            self._engine.search,
            limits,
            size=limits.batch,
            on_batch=metrics.batch,
            seconds_per_cost=trial_seconds / self._engine.trial_cost,
        )
        self._key_searches = Batcher[SearchRequest, SearchResult](
            self._engine.search, limits, size=limits.batch
        )
        self._reranks = Batcher[RerankRequest, list[Hit]](self._engine.rerank, limits)
        self._pictures = Batcher[Callable[[], bytes], bytes](_call_each, limits)
        self._reads = Batcher[Callable[[], Any], Any](_call_each, limits)
        # One at a time: of two threads that add the same photo, both would find it missing.
        self._writes = Batcher[Callable[[], Any], Any](_call_each, limits)
        self._queues: tuple[Batcher[Any, Any], ...] = (
            self._photo_searches,
            self._key_searches,
            self._reranks,
            self._pictures,
            self._reads,
            self._writes,
        )
        metrics.watch("queue_length", "Waiting requests", lambda: sum(map(len, self._queues)))
        metrics.watch("generation", "Upgrades of the index", lambda: self.store.generation)
        metrics.watch("entries", "Photos in the index", lambda: len(self.store))
        metrics.watch("held_bytes", "Bytes of uploads in memory", lambda: self.held.total)

    @property
    def index(self) -> Index:
        """The index that is served."""
        return self._engine.index

    @property
    def store(self) -> Store:
        """The store of the index, with recent changes of other processes."""
        return self._engine.fresh()

    def start(self) -> None:
        """Watch for an upgrade of the index by another process, until `close` is called."""
        threading.Thread(target=self._engine.watch, name="watch", daemon=True).start()

    def refresh(self) -> None:
        """Read what other processes wrote to the index, also an upgrade.

        While another thread loads an upgraded index, or if it cannot be loaded, the earlier one is
        used.
        """
        switched = False
        with suppress(InputError):  # `Engine.watch` logs it
            switched = self._engine.switch(wait=False)
        if not switched:
            self._engine.fresh(0.0)

    @property
    def calibrated(self) -> bool:
        """Whether results have probabilities."""
        return self._engine.index.calibration is not None

    @property
    def expands(self) -> bool:
        """Whether searches expand the query by default."""
        return self._engine.index.expands(None)

    @property
    def max_side(self) -> int | None:
        """Long side that query photos are reduced to; None if searches without a server do so."""
        side = self._engine.max_side
        return None if side == self.index.header.settings.max_side else side

    def check_search_room(self, address: str) -> None:
        """Raise a `QueueFullError` if a search by photo from this address would be refused now."""
        self._photo_searches.check_room(address)

    def check_write_room(self, client: Client) -> None:
        """Raise a `QueueFullError` if photos of this client would not be added now."""
        self._writes.check_room(client.address)

    def check_photos(self, photos: Sequence[Upload]) -> None:
        """Refuse files that are not photos or too large."""
        self._engine.check(photos)

    async def search(self, request: SearchRequest, client: Client) -> Answer:
        """Search, and re-rank the hits if the request wants it."""
        started = time.monotonic()
        until = started + self.limits.seconds
        queue = self._photo_searches if request.photos else self._key_searches
        try:
            # Refuse before the work on the photos begins.
            queue.check_room(client.address)
            cost = await to_thread.run_sync(self._engine.cost, request)
            size = max(1, len(request.photos))
            found = await queue.result(
                queue.submit(request, size, cost, client.address), until, client
            )
            hits = found.hits
            if request.rerank and hits:
                hits = await self._rerank(RerankRequest(request, found, until), client)
        finally:
            request.finished.set()
        if hits:
            self.metrics.searched(max(hit.score for hit in hits))
        verified = sum(hit.inliers is not None for hit in hits)
        end = request.start + request.k
        more = len(hits) > end and end < self.limits.results
        page = hits[request.start : end]
        return Answer.of(
            page,
            time.monotonic() - started,
            expanded=found.generation.expands(
                request.expand, request.refine, request.min_probability, request.marked
            ),
            refined=request.refine is not None,
            verified=verified,
            more=more,
        )

    async def _rerank(self, request: RerankRequest, client: Client) -> list[Hit]:
        """Re-rank hits; if the server is too slow for that, they stay as they are."""
        try:
            job = self._reranks.submit(request, owner=client.address)
            return await self._reranks.result(job, request.until, client)
        except (TooLateError, QueueFullError):
            return request.found.hits

    async def add(self, photos: Sequence[Upload], client: Client) -> AddedView:
        """Add photos to the index; once begun, this finishes even if the client disconnects."""
        uploads = self.uploads
        if uploads is None:
            raise BadRequestError(
                "no folder for added photos: start listwise serve with --uploads FOLDER"
            )
        if not photos:
            raise BadRequestError("no photos to add: send some (curl -F photos=@FILE)")
        await to_thread.run_sync(self._engine.check, photos)

        def write() -> AddedView:
            largest = max(check_pixels(photo, self.limits.pixels) for photo in photos)
            with self._engine.decoding.reserve(largest):
                return uploads.add(photos)

        added: AddedView = await self.write(write, client)
        return added

    async def remove(self, key: int, client: Client) -> int:
        """Remove an entry, and its file if a client added it."""

        def write() -> int:
            entry = self.entry(key)
            return self.uploads.remove(entry) if self.uploads else self.store.remove([key])

        removed: int = await self.write(write, client)
        return removed

    async def duplicates(self, threshold: float) -> list[DuplicateGroup]:
        """Groups of duplicates, verified by geometry; kept until the number of entries changes.

        One comparison runs at a time, and another threshold ends it. Requests wait for it without
        a thread of their own.

        Raises:
            HTTPException: they are not found within the time limit; a later call returns them.
        """
        groups = await to_thread.run_sync(self._compare, threshold)
        waiting = asyncio.wrap_future(groups)
        # Nobody may be waiting when it fails; asyncio would log that as an error.
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.wait_for(asyncio.shield(waiting), self.limits.seconds)
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            if not groups.done():
                raise  # the request was canceled, not the comparison
        reason = "the photos are still being compared: try again later"
        raise HTTPException(503, reason, {"Retry-After": "10"})

    def _compare(self, threshold: float) -> Future[list[DuplicateGroup]]:
        """Start a comparison unless it runs or its groups are known."""
        store = self.store
        wanted = store.generation, len(store), threshold
        with self._comparison_lock:
            comparison = self._comparison
            if comparison is None or comparison.wanted != wanted or comparison.failed:
                if comparison is not None:
                    comparison.stop()
                comparison = self._comparison = _Comparison(wanted)
                comparison.start(self._comparing, store, self._engine.reranker)
            return comparison.groups

    def facets(self) -> list[Facet]:
        """The facets of the index; they are computed again after a minute or a change of size."""
        with self._facets_lock:
            size, now = len(self.store), time.monotonic()
            if self._facets is None or self._facets[0] != size or now > self._facets[1]:
                counted = count_facets(self.store.attribute_texts())
                self._facets = size, now + FACET_SECONDS, counted
            return self._facets[2]

    def forget_facets(self) -> None:
        """Compute the facets again when they are needed: attributes have changed."""
        with self._facets_lock:
            self._facets = None

    def entry(self, key: int) -> Entry:
        """The entry with a key.

        Raises:
            NoEntryError: the index has no such entry.
        """
        found = self.store.get([key])
        if key not in found:
            raise NoEntryError(f"the index has no entry {key}")
        return found[key]

    async def thumbnail(self, key: int, client: Client) -> bytes:
        """A small JPEG file of an entry's photo.

        Raises:
            NoEntryError: the index has no such entry.
        """
        stored = await to_thread.run_sync(self.store.thumbnail, key)
        if stored:  # as for almost all entries, so that the entry itself is not read
            return stored
        entry = await to_thread.run_sync(self.entry, key)
        return await self.picture(partial(thumbnail_from_photo, entry), entry, client)

    async def photo(self, entry: Entry, client: Client) -> bytes:
        """A JPEG file of an entry's photo, its long side reduced to 1600 pixels."""
        return await self.picture(partial(_screen_photo, entry), entry, client)

    async def picture(self, make: Callable[[], bytes], entry: Entry, client: Client) -> bytes:
        """A JPEG file that `make` decodes from an entry's photo, within the limits."""

        def decode() -> bytes:
            try:
                pixels = check_pixels(entry.path, self.limits.pixels)
            except ImageError as error:
                raise _not_shown(entry, error) from None
            with self._engine.decoding.reserve(pixels):
                content = make()
            if not content:
                raise HTTPException(404, f"no picture of {entry.id}: its photo cannot be read")
            return content

        until = time.monotonic() + self.limits.seconds
        job = self._pictures.submit(decode, owner=client.address)
        return await self._pictures.result(job, until, client)

    async def read(self, read: Callable[[], Any], client: Client) -> Any:
        """Read marks or classes, which can take seconds, one request at a time."""
        until = time.monotonic() + self.limits.seconds
        job = self._reads.submit(partial(self._on_current, read), owner=client.address)
        return await self._reads.result(job, until, client)

    async def write(self, write: Callable[[], Any], client: Client) -> Any:
        """Change the index; a 507 error if the change cannot be stored."""
        until = time.monotonic() + self.limits.seconds
        job = self._writes.submit(partial(self._on_current, write), owner=client.address)
        try:
            return await self._writes.result(job, until, client, finish=True)
        except (OSError, InputError) as error:
            reason = write_failure(error)
            if reason is None:
                raise
            logger.error("a change of the index failed: %s", " ".join(str(error).split()))
            raise HTTPException(507, f"the server cannot store the change: {reason}") from None

    def _on_current(self, work: Callable[[], Any]) -> Any:
        """Call a function; once more if the generation was replaced or discarded meanwhile."""
        used = self.index.generation
        try:
            return work()
        except IndexUpgradedError:
            self._engine.switch()
        except InputError:
            if not self._engine.replaced(used):
                raise
        return work()

    def close(self) -> None:
        """Stop the queues and their threads."""
        for queue in self._queues:
            queue.close()
        if self._comparison is not None:
            self._comparison.stop()
        self._comparing.shutdown(wait=False, cancel_futures=True)
        self._engine.close()


class _Comparison:
    """A search for duplicates, for a generation, a number of entries and a threshold."""

    def __init__(self, wanted: tuple[int, int, float]) -> None:
        self.wanted = wanted
        self.groups: Future[list[DuplicateGroup]]
        self._stopped = threading.Event()

    def start(self, pool: ThreadPoolExecutor, store: Store, reranker: Reranker) -> None:
        """Begin in a thread of the pool."""
        threshold = self.wanted[2]
        self.groups = pool.submit(find_duplicates, store, threshold, reranker, self._proceed)

    def stop(self) -> None:
        """End before the next block of photos; those who wait for the groups get an error."""
        self._stopped.set()
        self.groups.cancel()

    @property
    def failed(self) -> bool:
        """Whether it ended without groups."""
        done = self.groups.done()
        return done and (self.groups.cancelled() or self.groups.exception() is not None)

    def _proceed(self, count: int) -> None:
        if self._stopped.is_set():
            raise CancelledError


def _call_each(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    return [function() for function in functions]


def _screen_photo(entry: Entry) -> bytes:
    try:
        photo = load_image(entry.path, min_side=PHOTO_SIDE)
    except ImageError as error:
        raise _not_shown(entry, error) from None
    photo.thumbnail((PHOTO_SIDE, PHOTO_SIDE), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    photo.save(file, "JPEG", quality=88)
    return file.getvalue()


def _not_shown(entry: Entry, error: ImageError) -> HTTPException:
    # The reason alone: the message of the error has the path on this machine.
    return HTTPException(404, f"the photo {entry.id} cannot be shown: {error.reason}")
