"""Search by local features: ASMK* finds, spatial verification orders what it found."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from listwise.data import PhotoFile
from listwise.local.asmk.index import AsmkIndex
from listwise.local.extract import Extractor
from listwise.local.features import Features
from listwise.local.rerank import TOP, rerank_by_inliers
from listwise.local.storage import FeatureFile
from listwise.local.verification import Verified, comparison


@dataclass(frozen=True, eq=False)
class LocalHit:
    """A photo that was found: its id, its ASMK* score, and what it shares with the query.

    `verified` is None if it was not looked at.
    """

    id: str
    score: float
    verified: Verified | None = None

    @property
    def inliers(self) -> int | None:
        """Number of features it shares with the query, None if it was not looked at."""
        return None if self.verified is None else self.verified.inliers


def search_by_photo(
    folder: str | Path,
    photo: PhotoFile,
    extractor: Extractor,
    k: int = 10,
    features: str | Path | None = None,
    device: str = "auto",
) -> list[LocalHit]:
    """The k photos of an index most similar to a photo, by the extractor of the index.

    With a file of the indexed photos' features, the first 100 are verified. Words are looked up on
    `device`.
    """
    index = AsmkIndex.open(folder, device)
    index.codebook.require(extractor.name)
    file = None if features is None else FeatureFile.open(features)
    if file is not None:
        file.require(extractor.name)
    return search_local(index, extractor(photo), k, file.get if file else None)


def search_local(
    index: AsmkIndex, query: Features, k: int, features: Callable[[str], Features] | None = None
) -> list[LocalHit]:
    """The k photos most like a query; the first 100 ordered by inliers if there are features.

    `features` gives an indexed photo's features by its id, such as `FeatureFile.get`.
    """
    scores, ids = index.search(query.descriptors, k if features is None else max(k, TOP))
    hits = [LocalHit(name, float(score)) for name, score in zip(ids, scores, strict=True)]
    if features is None:
        return hits
    compare = comparison(index.codebook.info.extractor)
    found = [LocalHit(hit.id, hit.score, compare(query, features(hit.id))) for hit in hits[:TOP]]
    order = rerank_by_inliers(range(len(hits)), [hit.inliers or 0 for hit in found])
    return [(found[i] if i < len(found) else hits[i]) for i in order][:k]
