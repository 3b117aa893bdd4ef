"""Searches within the limits of a server, in the current generation of its index."""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TypeVar

import numpy as np
from PIL import Image

from listwise.data.images import (
    DECODED_SIDE,
    ORIGINAL_SIDE,
    ImageError,
    Source,
    TooManyPixelsError,
    decoding_pixels,
    image_size,
)
from listwise.errors import InputError
from listwise.local.features import LARGE, Features
from listwise.local.rerank import PhotoPart, Reranker
from listwise.machine import core_count
from listwise.search.generation import Generation
from listwise.search.hits import Query, SearchResult
from listwise.search.index import Index
from listwise.search.searching import Searcher, network_pixels
from listwise.search.store import IndexUpgradedError, Store
from listwise.serving.server import Limits

REFRESH_SECONDS = 1.0
# Re-ranking ends a tenth of the time limit before it, so that the answer is sent in time.
ANSWER_SHARE = 10
# A JPEG file is decoded in one pass per scan. Progressive files have about ten scans.
SCANS = 100
START_OF_JPEG = b"\xff\xd8"
START_OF_SCAN = b"\xff\xda"

# Peak memory of decoding a photo per pixel, as `decoding_pixels` counts them, rounded up.
DECODING_BYTES = 13
# Features of photos that were verified before.
FEATURE_BYTES = 256 << 20
# Finding the features of one photo, whose long side is at most 1024 pixels.
VERIFYING_BYTES = 150 << 20
# Buffers of a thousand connections.
CONNECTION_BYTES = 256 << 20

logger = logging.getLogger(__name__)

Done = TypeVar("Done")


class PixelBudget:
    """Limits the photos that are decoded at one time, by the number of their pixels."""

    def __init__(self, pixels: int) -> None:
        self.limit = pixels
        self._free = pixels
        self._turn = threading.Lock()
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, pixels: int) -> Iterator[None]:
        """Wait until so many pixels may be decoded; more than the limit count as the limit."""
        share = min(pixels, self.limit)
        # One thread waits at a time, so that small photos do not overtake a large one for ever.
        with self._turn, self._changed:
            self._changed.wait_for(lambda: self._free >= share)
            self._free -= share
        try:
            yield
        finally:
            with self._changed:
                self._free += share
                self._changed.notify()


class Engine:
    """Computes the results of searches; worker threads of the server call its methods."""

    def __init__(self, index: Index, limits: Limits) -> None:
        self.index = index
        self.limits = limits
        self.decoding = budget = PixelBudget(limits.pixels)
        self.searcher = Searcher(limits.pixels, budget.reserve, lambda: _BoundedReranker(budget))
        self._refreshed = time.monotonic()
        self._switching = threading.Lock()
        self._closed = threading.Event()

    @property
    def store(self) -> Store:
        """The store of the index, with what other processes wrote up to a second ago."""
        return self.on_current(lambda: self._fresh().store)

    def refresh(self) -> None:
        """Read what other processes wrote to the index, also an upgrade.

        While another thread loads an upgraded index, or if it cannot be loaded, the earlier one is
        used.
        """
        with suppress(InputError):  # `watch` logs it
            self.switch(wait=False)
        self.on_current(lambda: self._fresh(now=True))

    def _fresh(self, now: bool = False) -> Generation:
        """The current generation; its store was read again now, or up to a second ago."""
        current = self.index.generation
        if now or time.monotonic() - self._refreshed >= REFRESH_SECONDS:
            self._refreshed = time.monotonic()
            current.store.refresh()
        return current

    def switch(self, wait: bool = True) -> bool:
        """Use the current generation after an upgrade or a rollback; False if it is used already.

        The store and the model are loaded first, and requests use the earlier ones meanwhile.
        Without `wait`, False is also returned while another thread loads them.
        """
        if not self._switching.acquire(blocking=wait):
            return False
        try:
            generation = self.index.generation
            if generation.store.generations.is_current():
                return False
            new = generation.reopened()
            load(new)
            self.index.generation = new
            logger.warning("%s was switched to generation %d", new.store.uri, new.store.generation)
            return True
        finally:
            self._switching.release()

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

    def check(self, photos: Sequence[BytesIO]) -> float:
        """Refuse files that are not photos or too large; return the expected work.

        The unit is the work of the network on a million pixels. Decoding a pixel counts as a
        twentieth of its work in the network, and a photo of any size as a tenth of a unit.
        """
        cost = 0.0
        settings = self.index.header.settings
        for photo in photos:
            pixels = check_pixels(photo, self.limits.pixels, settings.max_side)
            content = photo.getvalue()
            scans = content.count(START_OF_SCAN) if content.startswith(START_OF_JPEG) else 0
            if scans > SCANS:
                raise ImageError(photo, f"has {scans} scans, more than the {SCANS} allowed")
            size = image_size(photo)
            if settings.max_side is None and max(size) > ORIGINAL_SIDE:
                raise TooManyPixelsError(
                    photo,
                    f"has a long side of {max(size)} pixels; this index has photos of "
                    f"their original size, for which a server takes up to {ORIGINAL_SIDE}: build "
                    "the index with a maximum (--max-side)",
                )
            cost += 0.1 + (network_pixels(size, settings) + pixels / 20) / 1e6
        return cost

    def room_for(self, photos: Sequence[BytesIO]) -> AbstractContextManager[None]:
        """Wait until these photos may be decoded, one after the other."""
        side = self.index.header.settings.max_side
        return self.decoding.reserve(max(decoding_pixels(photo, None, side) for photo in photos))

    def cost(self, query: Query) -> float:
        """Check the photos of a query, and return the expected work; 1 for a search by keys."""
        photos = [photo for photo in query.photos if isinstance(photo, BytesIO)]
        return self.check(photos) if photos else 1.0

    def search(self, batch: Sequence[Query]) -> list[SearchResult | Exception]:
        """Search for each query; an error in the place of a result concerns that query alone."""

        def search() -> list[SearchResult | Exception]:
            # Descriptors and store of one generation: an upgrade replaces both.
            generation = self._fresh()
            answers = self.searcher.search(generation, batch)
            answers = [
                replace(each, matching=generation.store.count(each.where))
                if isinstance(each, SearchResult)
                else each
                for each in answers
            ]
            if any(isinstance(each, InputError) for each in answers) and self._replaced(generation):
                raise IndexUpgradedError(generation.store.uri)
            return answers

        return self.on_current(search)

    def on_current(self, work: Callable[[], Done]) -> Done:
        """Call a function; once more if the generation was replaced or discarded meanwhile."""
        used = self.index.generation
        try:
            return work()
        except IndexUpgradedError:
            self.switch()
        except InputError:
            if not self._replaced(used):
                raise
        return work()

    def _replaced(self, used: Generation) -> bool:
        """Whether another generation is used now; waits for it if this one was discarded.

        Other errors of a request do not wait, because loading a generation can take minutes.
        """
        store = used.store
        numbers = store.generations.record().numbers
        if used is self.index.generation and store.generation not in numbers:
            self.switch()
        return used is not self.index.generation

    def rerank(self, result: SearchResult, until: float) -> SearchResult:
        """Verify a result until a time of `time.monotonic`.

        The hits of a generation that was discarded meanwhile stay as they are.
        """
        try:
            return self.searcher.rerank(result, until - self.limits.seconds / ANSWER_SHARE)
        except InputError:
            if not self._replaced(result.generation):
                raise
            return result

    def close(self) -> None:
        """Stop the threads."""
        self._closed.set()
        self.searcher.close()


def load(generation: Generation) -> None:
    """Load a generation of an index and its model, so that the first request is fast.

    The network runs on a photo of the largest size.
    """
    zero = np.zeros((1, generation.model.dim), np.float32)
    if len(generation.store):
        generation.store.search(zero, 1)
    side = generation.header.settings.max_side or ORIGINAL_SIDE
    generation.describe([Image.new("RGB", (side, side))])


def prepare(index: Index, limits: Limits) -> tuple[int, int]:
    """Load the index and its model, and return the memory of its server in bytes: now, at most.

    The network runs on a photo of the largest size, to measure the memory that it takes. The
    maximum covers the process as it is now and its requests; memory for photos that are added to
    the index later comes on top. Both are 0 if the system does not report the memory of a process.
    """
    before, _ = process_memory()
    load(index.generation)
    now, peak = process_memory()
    network = max(0, peak - before)
    waiting = limits.batch + (limits.waiting_reranks + 1) * limits.photos  # for re-ranking
    memory = now + (
        limits.held_bytes
        + limits.batch * limits.upload_bytes  # of clients that have left
        + limits.pixels * DECODING_BYTES
        + 2 * network  # one for searches, one for photos that are added
        + FEATURE_BYTES
        + core_count() * VERIFYING_BYTES
        + waiting * 3 * DECODED_SIDE**2  # bytes of decoded photos
        + CONNECTION_BYTES
    )
    return (now, memory) if now else (0, 0)


def process_memory() -> tuple[int, int]:
    """Memory of this process in RAM, now and at most, in bytes; zeros where it is not known."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0, 0
    found = {name: int(value) * 1024 for name, value in re.findall(r"(Vm\w+):\s*(\d+) kB", status)}
    return found.get("VmRSS", 0), found.get("VmHWM", 0)


def check_pixels(source: Source, max_pixels: int, max_side: int | None) -> int:
    """The number of pixels to decode, as `decoding_pixels` counts them, if it is allowed."""
    pixels = decoding_pixels(source, None, max_side)
    if pixels > max_pixels:
        raise TooManyPixelsError(
            source,
            f"takes as much memory as {pixels / 1e6:.0f} million pixels, more than the "
            f"{max_pixels / 1e6:g} million allowed: reduce the photo",
        )
    return pixels


class _BoundedReranker(Reranker):
    """Decodes photos of the index within the budget."""

    def __init__(self, decoding: PixelBudget) -> None:
        super().__init__(FEATURE_BYTES)
        self._decoding = decoding

    def features(self, entry: PhotoPart) -> Features:
        """Features of an entry's photo, from memory if they are there."""
        pixels = check_pixels(entry.path, self._decoding.limit, LARGE)
        with self._decoding.reserve(pixels):
            return super().features(entry)
