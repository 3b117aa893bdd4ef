"""Re-rank hits by matching points, within a time limit if one is given."""

import threading
from collections.abc import Sequence
from dataclasses import replace

from PIL import Image

from listwise.data.images import Box
from listwise.local.rerank import TOP, Reranker
from listwise.search.hits import Hit
from listwise.search.store import Store


def rerank_hits(
    reranker: Reranker,
    photos: Sequence[Image.Image],
    hits: Sequence[Hit],
    boxes: Sequence[Box | None] | None = None,
    until: float | None = None,
    finished: threading.Event | None = None,
    store: Store | None = None,
) -> list[Hit]:
    """Re-rank the first 100 hits by spatial verification with the query photos.

    Args:
        reranker: extracts and compares local features; it caches the features of entries.
        photos: upright query photos.
        hits: hits, best first.
        boxes: the part of each query photo to use, x0, y0, x1, y1 in pixels, or None for all.
        until: return before this time of `time.monotonic`, with what was verified until then;
            since features are cached, the next call verifies more.
        finished: stop verifying when this event is set.
        store: the store of the index, which may hold local features of the entries.

    Returns:
        All hits. Those that were verified have `inliers` and are sorted by them; the others keep
        their place.
    """
    entries = [hit.entry for hit in hits[:TOP]]
    known = {} if store is None else store.local([entry.key for entry in entries])
    reranked = reranker.rerank(
        photos,
        entries,
        boxes,
        stored=[known.get(entry.key) for entry in entries],
        until=until,
        finished=finished,
    )
    found = [
        hits[each.position]
        if each.inliers is None
        else replace(
            hits[each.position], inliers=each.inliers, matches=each.matches, photo=each.photo
        )
        for each in reranked
    ]
    return [*found, *hits[len(found) :]]
