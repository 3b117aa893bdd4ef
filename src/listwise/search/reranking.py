"""Re-rank hits by matching points, within a time limit if one is given, and by diffusion."""

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from PIL import Image

from listwise.data.images import Box
from listwise.local.rerank import MINIMUM, TOP, Reranker
from listwise.search.entries import NoEntryError
from listwise.search.hits import Hit
from listwise.search.refinement import diffuse
from listwise.search.store import Store

DIFFUSED = 5000
"""Number of first hits that `diffuse_hits` re-ranks."""


def rerank_hits(
    store: Store,
    reranker: Reranker,
    photos: Sequence[Image.Image],
    hits: Sequence[Hit],
    boxes: Sequence[Box | None] | None = None,
    until: float | None = None,
    finished: threading.Event | None = None,
) -> list[Hit]:
    """Re-rank the first 100 hits by spatial verification with the query photos.

    Args:
        store: the store that was searched, which may hold local features of the entries.
        reranker: extracts and compares local features; it caches the features of entries.
        photos: upright query photos.
        hits: hits, best first.
        boxes: the part of each query photo to use, x0, y0, x1, y1 in pixels, or None for all.
        until: return before this time of `time.monotonic`, with what was verified until then;
            since features are cached, the next call verifies more.
        finished: stop verifying when this event is set.

    Returns:
        All hits. Those that were verified have `inliers` and are sorted by them; the others keep
        their place.
    """
    entries = [hit.entry for hit in hits[:TOP]]
    known = store.local([entry.key for entry in entries])
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


def diffuse_hits(store: Store, hits: Sequence[Hit]) -> list[Hit]:
    """Re-rank the first 5000 hits by diffusion from the nearest and the verified hits.

    Args:
        store: the store of the index, which holds the descriptors.
        hits: hits of `rerank_hits`. Those with seven inliers or more are verified.

    Returns:
        All hits; `refined` is the score that the first ones are sorted by.
    """
    short, rest = list(hits[:DIFFUSED]), list(hits[DIFFUSED:])
    try:
        rows = store.vectors(np.array([hit.entry.key for hit in short], np.int64))
    except NoEntryError:  # another process removed some of them after the search
        store.refresh()
        known = store.get([hit.entry.key for hit in short])
        short = [hit for hit in short if hit.entry.key in known]
        rows = store.vectors(np.array([hit.entry.key for hit in short], np.int64))
    verified = [(hit.inliers or 0) >= MINIMUM for hit in short]
    scores = diffuse([hit.score for hit in short], rows, verified)
    order = np.argsort(-scores, kind="stable")
    return [replace(short[i], refined=float(scores[i])) for i in order] + rest
