"""Re-rank hits by matching points, within a time limit if one is given."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile

from PIL import Image

from listwise.data.images import Box, ImageError
from listwise.local.rerank import TOP, Reranker
from listwise.machine import core_count
from listwise.search.entries import Entry
from listwise.search.hits import Hit


def rerank_hits(
    reranker: Reranker,
    photos: Sequence[Image.Image],
    hits: Sequence[Hit],
    boxes: Sequence[Box | None] | None = None,
    until: float | None = None,
) -> list[Hit]:
    """Re-rank the first 100 hits by spatial verification with the query photos.

    Args:
        reranker: extracts and compares local features; it caches the features of entries.
        photos: upright query photos.
        hits: hits, best first.
        boxes: the part of each query photo to use, x0, y0, x1, y1 in pixels, or None for all.
        until: finish before this time of `time.monotonic`. Hits for which the time does not
            suffice keep their order; since features are cached, the next call verifies more.

    Returns:
        All hits: those that were verified by their number of inliers, then the others.
    """
    entries = [hit.entry for hit in hits[:TOP]]
    if until is not None:
        entries = entries[: max(1, TOP // max(1, len(photos)))]
        entries = entries[: _count_in_time(reranker, entries, until)]
    verified = [
        replace(hits[each.position], inliers=each.inliers, matches=each.matches, photo=each.photo)
        for each in reranker.rerank(photos, entries, boxes)
    ]
    return [*verified, *hits[len(verified) :]]


def _count_in_time(reranker: Reranker, entries: Sequence[Entry], until: float) -> int:
    """Extract features for two thirds of the time, and count the entries that have them."""
    now = time.monotonic()
    stop = now + (until - now) * 2 / 3

    def ready(entry: Entry) -> bool:
        if time.monotonic() > stop:
            return False
        with suppress(ImageError):
            reranker.features(entry)
        return True

    with ThreadPoolExecutor(core_count()) as pool:
        return sum(1 for _ in takewhile(bool, pool.map(ready, entries)))
