"""Re-ranking of hits by matching points, within a time if need be."""

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
    """Put what shares the geometry of the upright query photos first, of the first 100 hits.

    To be done before `until`, a time of `time.monotonic`, hits further down the list are left as
    they are. What was looked at is remembered, so the next time gets further.
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
    """How many of the first entries have features when two thirds of the time are over."""
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
