"""One index for many threads."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import ArrayLike

from listwise.search.index import Entry, Float32, Index, Keys, NewEntries, SearchIntent, Tuned

REFRESH_SECONDS = 1.0


class SharedIndex(Index):
    """An index whose methods threads may call at the same time, each waiting for its turn.

    What other processes write is seen after a second at most.
    """

    def __init__(self, index: Index) -> None:
        self.uri = index.uri
        self.header = index.header
        self._index = index
        self._lock = threading.RLock()
        self._refreshed = time.monotonic()

    def __len__(self) -> int:
        with self._lock:
            return len(self._fresh())

    def put(self, new: NewEntries) -> None:
        with self._lock:
            self._index.put(new)

    def remove(self, keys: Sequence[int]) -> int:
        with self._lock:
            return self._index.remove(keys)

    def get(self, keys: Sequence[int]) -> dict[int, Entry]:
        with self._lock:
            return self._fresh().get(keys)

    def with_digests(self, digests: Sequence[str]) -> dict[str, Entry]:
        with self._lock:
            return self._fresh().with_digests(digests)

    def page(self, start: int, count: int) -> list[Entry]:
        with self._lock:
            return self._fresh().page(start, count)

    def thumbnail(self, key: int) -> bytes | None:
        with self._lock:
            return self._fresh().thumbnail(key)

    def search(self, queries: ArrayLike, k: int, /) -> tuple[Float32, Keys]:
        with self._lock:
            return self._fresh().search(queries, k)

    def vectors(self, keys: ArrayLike, /) -> Float32:
        with self._lock:
            return self._fresh().vectors(keys)

    def tune(
        self, intent: SearchIntent, on_note: Callable[[str], object] = lambda note: None
    ) -> Tuned:
        with self._lock:
            return self._index.tune(intent, on_note)

    def info(self) -> dict[str, Any]:
        with self._lock:
            return self._fresh().info()

    def refresh(self) -> None:
        with self._lock:
            self._index.refresh()
            self._refreshed = time.monotonic()

    def close(self) -> None:
        with self._lock:
            self._index.close()

    def _fresh(self) -> Index:
        if time.monotonic() - self._refreshed >= REFRESH_SECONDS:
            self.refresh()
        return self._index
