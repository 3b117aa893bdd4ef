"""What a server needs: its maximum memory, and the time of its network."""

import ctypes
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from listwise.machine import core_count
from listwise.search.generation import Generation
from listwise.search.index import Index
from listwise.serving.settings import MAX_SIDE, Limits

# Peak memory of decoding a photo to RGB per pixel: 24 bytes (a transparent WebP), rounded up.
DECODING_BYTES = 25
# After this many decoded pixels free memory is returned to the system.
RETURN_PIXELS = 10_000_000
# Features of photos that were verified before.
FEATURE_BYTES = 256 << 20
# Finding the features of one photo, whose long side is at most 1024 pixels.
VERIFYING_BYTES = 150 << 20
# Sides of the photo whose time is measured.
TRIAL_SIDE = 256
# Buffers of one connection, in the process.
CONNECTION_BYTES = 256 << 10


class PixelBudget:
    """Limits the photos that are decoded at one time, by the number of their pixels.

    Threads get their share in the order in which they ask for it.
    """

    def __init__(self, pixels: int) -> None:
        self.limit = pixels
        self._free = pixels
        self._line: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, pixels: int) -> Iterator[None]:
        """Wait until so many pixels may be decoded; more than the limit count as the limit."""
        share = min(pixels, self.limit)
        place = object()
        with self._changed:
            self._line.append(place)
            self._changed.wait_for(lambda: self._line[0] is place and self._free >= share)
            self._line.popleft()
            self._free -= share
            self._changed.notify_all()
        try:
            yield
        finally:
            if share >= RETURN_PIXELS:
                _return_memory()
            with self._changed:
                self._free += share
                self._changed.notify_all()


def load(generation: Generation, limits: Limits) -> None:
    """Load a generation of an index and its model, so that the first request is fast.

    The network runs on a photo of the largest size.
    """
    zero = np.zeros((1, generation.model.dim), np.float32)
    if len(generation.store):
        generation.store.search(zero, 1)
    # Photos that are added have the size of the index, also where searches are reduced further.
    side = generation.header.settings.max_side or longest_side(generation, limits)
    generation.describe([Image.new("RGB", (side, side))])


@dataclass(frozen=True)
class Preparation:
    """What was measured before a server starts.

    Attributes:
        memory: maximum memory of the server in bytes; 0 if the system does not report the memory
            of a process.
        trial_seconds: time of the network for a photo of `TRIAL_SIDE` x `TRIAL_SIDE` pixels.
    """

    memory: int
    trial_seconds: float


def prepare(index: Index, limits: Limits) -> Preparation:
    """Load the index and its model, and measure what its server needs.

    The network runs on a photo of the largest size, to measure the memory it takes. The maximum
    covers the process as it is now and its requests; memory for photos that are added to the index
    later comes on top.
    """
    index.search(np.zeros(index.model.dim, np.float32), 1)
    _restart_peak()
    before = resident_bytes()
    load(index.generation, limits)
    now, peak = resident_bytes(), _peak_bytes()
    network = max(0, peak - before)
    memory = now + (
        limits.held_bytes
        + limits.batch * limits.upload_bytes  # of clients that have left
        + limits.pixels * DECODING_BYTES
        + 2 * network  # one for searches, one for photos that are added
        + FEATURE_BYTES
        + core_count() * VERIFYING_BYTES
        + limits.connections * CONNECTION_BYTES
    )
    trial = Image.new("RGB", (TRIAL_SIDE, TRIAL_SIDE))
    index.describe([trial])  # the first photo of a size may take longer
    started = time.perf_counter()
    index.describe([trial])
    return Preparation(memory if now and peak else 0, time.perf_counter() - started)


def longest_side(generation: Generation, limits: Limits) -> int:
    """Long side in pixels of the largest image that the network gets."""
    sides = (limits.max_side, generation.header.settings.max_side)
    return min((side for side in sides if side), default=MAX_SIDE)


def _return_memory() -> None:
    """Return freed memory to the system, which the C library otherwise keeps for later use."""
    with suppress(AttributeError, OSError):  # only the GNU library has this function
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    import resource

    return pages * resource.getpagesize()


def _restart_peak() -> None:
    """Let the peak of the resident memory start at its present size, where the system can do so."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    """Peak of the resident memory of this process; 0 where the system does not tell."""
    with suppress(OSError):
        # On Linux `ru_maxrss` starts at the peak of the process that started this one.
        found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        if found:
            return int(found[1]) * 1024
    if sys.platform == "win32":
        return 0
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
