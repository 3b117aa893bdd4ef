"""Search by local features: ASMK* finds photos, spatial verification re-ranks them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from listwise.data import PhotoFile
from listwise.local.asmk.index import AsmkIndex
from listwise.local.extract import Extractor
from listwise.local.features import Features
from listwise.local.rerank import TOP, rerank_by_inliers
from listwise.local.storage import FeatureFile
from listwise.local.verification import Verification, verifier_for


@dataclass(frozen=True, eq=False)
class LocalHit:
    """A search result: the id of a photo, its ASMK* score, and its verification.

    `verified` is None if the photo was not verified.
    """

    id: str
    score: float
    verified: Verification | None = None

    @property
    def inliers(self) -> int | None:
        """Number of features that it shares with the query; None if it was not verified."""
        return None if self.verified is None else self.verified.inliers


def search_by_photo(
    folder: str | Path,
    photo: PhotoFile,
    extractor: Extractor,
    k: int = 10,
    features: str | Path | None = None,
    device: str = "auto",
) -> list[LocalHit]:
    """Find the k photos of an index that are most similar to a photo.

    Args:
        folder: folder of the index.
        photo: the query.
        extractor: the extractor of the indexed photos.
        k: number of results.
        features: feature file of the indexed photos; with it the first 100 results are verified.
        device: where visual words are looked up: cpu, cuda, cuda:1 ...; auto uses a GPU if present.
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
    """Find the k photos that are most similar to the features of a query.

    `features` returns the features of an indexed photo by its id, as `FeatureFile.get` does. If it
    is given, the first 100 results are verified and re-ranked by inliers.
    """
    scores, ids = index.search(query.descriptors, k if features is None else max(k, TOP))
    hits = [LocalHit(name, float(score)) for name, score in zip(ids, scores, strict=True)]
    if features is None:
        return hits
    compare = verifier_for(index.codebook.info.extractor)
    found = [LocalHit(hit.id, hit.score, compare(query, features(hit.id))) for hit in hits[:TOP]]
    order = rerank_by_inliers(range(len(hits)), [hit.inliers or 0 for hit in found])
    return [(found[i] if i < len(found) else hits[i]) for i in order][:k]
