"""Search by local features: ASMK* finds, spatial verification orders what it found."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from listwise.local.asmk_index import AsmkIndex
from listwise.local.features import Features
from listwise.local.rerank import TOP, rerank_by_inliers
from listwise.local.verification import Verified, comparison


@dataclass(frozen=True, eq=False)
class LocalHit:
    """A photo that was found: its id, its ASMK* score, and what it shares with the query.

    `verified` is None if it was not looked at.
    """

    id: str
    score: float
    verified: Verified | None = None


def search_local(
    index: AsmkIndex,
    query: Features,
    k: int,
    features: Callable[[str], Features] | None = None,
) -> list[LocalHit]:
    """The k photos most like a query; the first 100 ordered by inliers if there are features.

    Args:
        index: made of the same extractor's descriptors.
        query: features of the query photo.
        k: photos at most.
        features: gives an indexed photo's features by its id, such as `FeatureFile.get`.
    """
    scores, ids = index.search(query.descriptors, k if features is None else max(k, TOP))
    hits = [LocalHit(name, float(score)) for name, score in zip(ids, scores, strict=True)]
    if features is None:
        return hits
    compare = comparison(index.codebook.info.extractor)
    found = [LocalHit(hit.id, hit.score, compare(query, features(hit.id))) for hit in hits[:TOP]]
    order = rerank_by_inliers(range(len(hits)), inliers_of(found))
    return [(found[i] if i < len(found) else hits[i]) for i in order][:k]


def inliers_of(hits: Sequence[LocalHit]) -> NDArray[np.int64]:
    """The inliers of hits, 0 where nothing was verified: [n]."""
    counts = [0 if hit.verified is None else hit.verified.inliers for hit in hits]
    return np.array(counts, dtype=np.int64)
