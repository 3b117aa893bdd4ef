"""What the server does for its requests, each within its time and its place in a queue."""

import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from anyio import to_thread

from listwise.search.entries import Entry, NoEntryError
from listwise.search.hits import Hit
from listwise.search.index import Index
from listwise.search.store import Store
from listwise.serving.batching import Batcher
from listwise.serving.engine import Engine, RerankRequest, SearchRequest
from listwise.serving.fields import BadRequestError
from listwise.serving.metrics import Metrics
from listwise.serving.settings import ServeSettings
from listwise.serving.upload_folder import UploadFolder
from listwise.serving.uploads import Held, Upload
from listwise.serving.views import AddedView, Answer

Gone = Callable[[], Coroutine[Any, Any, None]]
"""Returns when the client of a request has gone."""


class Service:
    """An index that is searched and written to by many clients at once."""

    def __init__(self, index: Index, settings: ServeSettings, metrics: Metrics) -> None:
        self.settings = settings
        self.limits = settings.limits
        self.held = Held(self.limits.held_bytes)
        self._engine = Engine(index, self.limits)
        self._uploads = None
        if settings.uploads is not None:
            self._uploads = UploadFolder(index, settings.uploads)
        waiting = self.limits.waiting
        self._searches = Batcher[SearchRequest, list[Hit]](
            self._engine.search, waiting=waiting, size=self.limits.batch, on_batch=metrics.batch
        )
        self._reranks = Batcher[RerankRequest, list[Hit]](self._engine.rerank, waiting=waiting)
        # One after the other: two that add one photo would both find that it is not there.
        self._writes = Batcher[Callable[[], Any], Any](
            lambda writes: [write() for write in writes], waiting=waiting
        )
        self._queues: tuple[Batcher[Any, Any], ...] = (self._searches, self._reranks, self._writes)
        metrics.watch("queue_length", "Requests that wait", lambda: sum(map(len, self._queues)))
        metrics.watch("entries", "Photos in the index", lambda: len(self.store))
        metrics.watch("held_bytes", "Uploads in memory", lambda: self.held.bytes)

    @property
    def store(self) -> Store:
        """The index's entries as they are now, whoever writes to it."""
        return self._engine.fresh()

    async def search(self, request: SearchRequest, gone: Gone) -> Answer:
        """Search, and re-rank if that is asked for."""
        started = time.monotonic()
        until = started + self.limits.seconds
        await to_thread.run_sync(self._engine.check, request.photos)
        size = max(1, len(request.photos))
        hits = await self._searches.result(self._searches.submit(request, size), until, gone)
        if request.rerank and hits:
            job = self._reranks.submit(RerankRequest(request, hits, until))
            hits = (await self._reranks.result(job, until, gone))[: request.k]
        reranked = any(hit.inliers is not None for hit in hits)
        return Answer.of(hits, time.monotonic() - started, request.expand, reranked)

    async def add(self, photos: Sequence[Upload], gone: Gone) -> AddedView:
        """Put photos into the index; once begun it is finished."""
        uploads = self._uploads
        if uploads is None:
            raise BadRequestError(
                "there is no folder for photos: start listwise serve with --uploads"
            )
        if not photos:
            raise BadRequestError("there is nothing to add: send photos (curl -F photos=@FILE)")
        await to_thread.run_sync(self._engine.check, photos)
        stored: AddedView = await self._write(lambda: uploads.add(photos), gone)
        return stored

    async def remove(self, key: int, gone: Gone) -> int:
        """Remove an entry, and its file if it was added here."""

        def write() -> int:
            entry = self.entry(key)
            removed = self.store.remove([key])
            if self._uploads:
                self._uploads.forget(entry)
            return removed

        removed: int = await self._write(write, gone)
        return removed

    def entry(self, key: int) -> Entry:
        """The entry with a key; a `NoEntryError` if there is none."""
        found = self.store.get([key])
        if key not in found:
            raise NoEntryError(f"there is no entry {key} in the index")
        return found[key]

    async def _write(self, write: Callable[[], Any], gone: Gone) -> Any:
        until = time.monotonic() + self.limits.seconds
        return await self._writes.result(self._writes.submit(write), until, gone, finish=True)

    def close(self) -> None:
        """Take nothing more."""
        for queue in self._queues:
            queue.close()
        self._engine.close()
