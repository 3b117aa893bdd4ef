"""The server's work on requests: each has a place in a queue and a time limit."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from anyio import to_thread
from fastapi import HTTPException, Request
from fastapi.responses import Response

from listwise.data.images import ImageError
from listwise.errors import InputError
from listwise.files import write_failure
from listwise.search.duplicates import DuplicateGroup, find_duplicates
from listwise.search.entries import Entry, NewEntries, NoEntryError
from listwise.search.filters import Facet, count_facets
from listwise.search.hits import Query, SearchResult, find_entries
from listwise.search.index import Index
from listwise.search.store import Store, with_contents
from listwise.serving.batching import BusyError, WorkQueue, call_each
from listwise.serving.engine import Engine, check_pixels
from listwise.serving.forms import FormReader, Upload
from listwise.serving.guard import Metrics
from listwise.serving.server import ServeSettings
from listwise.serving.upload_folder import UploadFolder

PHOTO_SIDE = 1600
UNDO = 100  # entries that were removed last and can be restored
FACET_SECONDS = 60
JPEG: dict[int | str, dict[str, Any]] = {
    200: {"content": {"image/jpeg": {}}, "description": "A JPEG file."},
    304: {"description": "The copy of the browser is current."},
}

Done = TypeVar("Done")

logger = logging.getLogger(__name__)


class Service:
    """Searches an index and changes it for many clients at one time.

    Each kind of work has its own queue and thread: searches by photo, searches by key, re-ranking,
    pictures that have to be decoded, marks and classes, and changes of the index.
    """

    def __init__(self, index: Index, settings: ServeSettings) -> None:
        self.settings = settings
        self.metrics = metrics = Metrics()
        self.limits = limits = settings.limits
        self.forms = FormReader(limits)
        self.engine = Engine(index, limits)
        self._comparing = ThreadPoolExecutor(1, "duplicates")
        self._compared: tuple[int, int, float, bool] | None = None
        self._groups: asyncio.Future[list[DuplicateGroup]] | None = None
        # Entries that can be restored: the generation, the entry, and its file if it was deleted.
        self._removed: dict[int, tuple[int, NewEntries, bytes | None]] = {}
        self._facets = lru_cache(1)(lambda *_: count_facets(self.store.attributes()))
        self.uploads = None
        if settings.uploads is not None:
            self.uploads = UploadFolder(index, settings.uploads)
            if settings.can_write:
                self.uploads.clean()
        search = self.engine.search
        self.photo_searches = WorkQueue[Query, SearchResult](
            search, limits, size=limits.batch, on_batch=metrics.batches.observe
        )
        self._key_searches = WorkQueue[Query, SearchResult](search, limits, size=limits.batch)
        # A result that waits holds decoded photos, and many would not be verified in time.
        few = limits.model_copy(update={"waiting": limits.waiting_reranks})
        self._reranks = WorkQueue[Callable[[], SearchResult], SearchResult](call_each, few)
        self._pictures = WorkQueue[Callable[[], bytes], bytes](call_each, limits)
        self._reads = WorkQueue[Callable[[], Any], Any](call_each, limits)
        # One at a time: of two threads that add the same photo, both would find it missing.
        self.writes = WorkQueue[Callable[[], Any], Any](call_each, limits)
        self._queues: list[WorkQueue[Any, Any]] = [self.photo_searches, self._key_searches]
        self._queues += [self._reranks, self._pictures, self._reads, self.writes]
        metrics.watch("queue_length", "Waiting requests", lambda: sum(map(len, self._queues)))
        metrics.watch("generation", "Upgrades of the index", lambda: self.store.generation)
        metrics.watch("entries", "Photos in the index", lambda: len(self.store))
        metrics.watch("held_bytes", "Bytes of uploads in memory", lambda: self.forms.held_bytes)

    @property
    def index(self) -> Index:
        """The index that is served."""
        return self.engine.index

    @property
    def store(self) -> Store:
        """The store of the index, with recent changes of other processes."""
        return self.engine.store

    def start(self) -> None:
        """Watch for an upgrade of the index by another process, until `close` is called."""
        threading.Thread(target=self.engine.watch, name="watch", daemon=True).start()

    async def search(self, query: Query, request: Request) -> SearchResult:
        """Search, and re-rank the hits if the query wants it."""
        until = time.monotonic() + self.limits.seconds
        queue = self.photo_searches if query.photos else self._key_searches
        try:
            cost = await to_thread.run_sync(self.engine.cost, query)
            size = max(1, len(query.photos))
            found = await queue.run(query, request, until=until, size=size, cost=cost)
            if query.options.rerank and found.hits:
                # If the server is too slow for that, the hits stay as they are.
                with suppress(BusyError):
                    rerank = partial(self.engine.rerank, found, until)
                    found = await self._reranks.run(rerank, request, until=until)
        finally:
            query.finished.set()
        if found.hits:
            self.metrics.first_scores.observe(max(hit.score for hit in found.hits))
        return found

    async def folder_for(self, photos: Sequence[Upload]) -> UploadFolder:
        """The folder of uploads, for photos that are neither damaged nor too large."""
        if self.uploads is None:
            reason = "no folder for photos of clients: start listwise serve with --uploads FOLDER"
            raise HTTPException(400, reason)
        await to_thread.run_sync(self.engine.check, photos)
        return self.uploads

    async def duplicates(self, threshold: float, mirrored: bool) -> list[DuplicateGroup]:
        """Groups of duplicates; kept until the number of entries changes.

        One comparison runs at a time, and one with other options ends it. Requests wait for it
        without a thread of their own.

        Raises:
            HTTPException: they are not found within the time limit; a later call returns them.
        """
        store, size = await to_thread.run_sync(lambda: (self.store, len(self.store)))
        wanted = store.generation, size, threshold, mirrored

        def proceed(count: int) -> None:
            if self._compared is not wanted:
                raise _still_comparing()

        def compare() -> list[DuplicateGroup]:
            return find_duplicates(store, threshold, mirrored, proceed)

        groups = self._groups if self._compared == wanted else None
        if groups is None or (groups.done() and groups.exception() is not None):
            self._compared = wanted
            groups = asyncio.get_running_loop().run_in_executor(self._comparing, compare)
            # Nobody may be waiting when it fails; asyncio would log that as an error.
            groups.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._groups = groups
        done, _ = await asyncio.wait([groups], timeout=self.limits.seconds)
        if not done:
            raise _still_comparing()
        return groups.result()

    def facets(self) -> list[Facet]:
        """The facets of the index; they are computed again after a minute or a change of size."""
        return self._facets(len(self.store), time.monotonic() // FACET_SECONDS)

    def forget_facets(self) -> None:
        """Compute the facets again when they are needed: attributes have changed."""
        self._facets.cache_clear()

    def remove(self, key: int) -> int:
        """Remove an entry, and its file if a client added it."""
        entry, store = self.entry(key), self.store
        removed = with_contents(store, [key], [entry], store.vectors([key]))
        content = Path(entry.path).read_bytes() if self.uploaded(entry) else None
        self._removed[key] = store.generation, removed, content
        if len(self._removed) > UNDO:
            self._removed.pop(next(iter(self._removed)))
        return self.uploads.remove(entry) if self.uploads else store.remove([key])

    def restore(self, key: int) -> Entry:
        """Add an entry again that was removed recently, and its file if that was deleted.

        A repeated request changes nothing.

        Raises:
            NoEntryError: it was not removed since the server started or the index was upgraded,
                or too many others were removed since.
        """
        generation, removed, content = self._removed.get(key, (None, None, None))
        present = self.store.get([key])
        if present:
            return present[key]
        if removed is None or generation != self.store.generation:
            raise NoEntryError(f"the entry {key} cannot be restored: add its photo again")
        if self.uploads and content is not None:
            self.uploads.restore(removed, content)
        else:
            self.store.put(removed)
        self._removed.pop(key, None)
        return removed.entries[0]

    def uploaded(self, entry: Entry) -> bool:
        """Whether the file of an entry is deleted with it, because a client added it."""
        return self.uploads is not None and self.uploads.owns(entry)

    def entry(self, key: int) -> Entry:
        """The entry with a key.

        Raises:
            NoEntryError: the index has no such entry.
        """
        return find_entries(self.store, key)[0]

    async def picture(self, make: Callable[[], bytes], entry: Entry, request: Request) -> Response:
        """A JPEG file that `make` decodes from an entry's photo, within the limits."""

        def decode() -> bytes:
            try:
                pixels = check_pixels(entry.path, self.limits.pixels, PHOTO_SIDE)
                with self.engine.decoding.reserve(pixels):
                    content = make()
            except ImageError as error:
                # The reason alone: the message of the error has the path on this machine.
                reason = f"the photo {entry.id} cannot be shown: {error.reason}"
                raise HTTPException(404, reason) from None
            if not content:
                raise HTTPException(404, f"no picture of {entry.id}: its photo cannot be read")
            return content

        return jpeg(await self._pictures.run(decode, request), request)

    async def read(self, read: Callable[[], Done], request: Request) -> Done:
        """Read marks or classes, which can take seconds, one request at a time."""
        work = partial(self.engine.on_current, read)
        done: Done = await self._reads.run(work, request)
        return done

    async def write(self, write: Callable[[], Done], request: Request) -> Done:
        """Change the index; a 507 error if the change cannot be stored."""
        work = partial(self.engine.on_current, write)
        try:
            done: Done = await self.writes.run(work, request, finish=True)
            return done
        except (OSError, InputError) as error:
            reason = write_failure(error)
            if reason is None:
                raise
            logger.error("a change of the index failed: %s", " ".join(str(error).split()))
            raise HTTPException(507, f"the server cannot store the change: {reason}") from None

    def close(self) -> None:
        """Stop the queues and their threads."""
        for queue in self._queues:
            queue.close()
        self._compared = None  # ends the comparison
        self._comparing.shutdown(wait=False, cancel_futures=True)
        self.engine.close()


def _still_comparing() -> HTTPException:
    reason = "the photos are still being compared: try again later"
    return HTTPException(503, reason, {"Retry-After": "10"})


def jpeg(content: bytes, request: Request) -> Response:
    """A response with a JPEG file; without the content for a browser that has it."""
    tag = f'"{blake2b(content, digest_size=12).hexdigest()}"'
    # Browsers ask whether their copy is current: a photo may be replaced.
    headers = {"Cache-Control": "private, no-cache", "ETag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type="image/jpeg", headers=headers)
