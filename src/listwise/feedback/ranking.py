"""Rank photos of a run among all its photos, and measure the average precision."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from listwise.evaluation import average_precision
from listwise.search.entries import Float32

Labels = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Ranking:
    """Descriptors of photos that are ranked for each other.

    Photos after the labelled ones have no label. They count as negatives, since what they show is
    not known.

    Attributes:
        rows: descriptors [P, C], unit rows.
        labels: the labels of the first N photos [N].
    """

    rows: Float32
    labels: Labels

    @classmethod
    def of(cls, rows: Float32, labels: Labels, layer: Float32 | None = None) -> "Ranking":
        """Rank descriptors [P, C], multiplied by a layer [C, C] first if it is given."""
        if layer is None:
            return cls(rows, labels)
        product = rows @ layer.T
        return cls(product / np.linalg.norm(product, axis=1, keepdims=True).clip(1e-12), labels)

    def scores(self, photo: int) -> Float32:
        """The scores of all photos for one of them [P]; its own score is the lowest."""
        found: Float32 = self.rows @ self.rows[photo]
        found[photo] = -np.inf
        return found

    def relevance(self, photo: int) -> NDArray[np.bool_]:
        """Which photos show the same thing as one of them [P], without itself."""
        found = np.zeros(len(self.rows), bool)
        found[: len(self.labels)] = self.labels == self.labels[photo]
        found[photo] = False
        return found

    def ap(self, photo: int) -> float:
        """The average precision of a photo; NaN if no other photo shows the same thing.

        Of photos with equal scores, those that show the same thing come last. Otherwise a network
        that describes all photos alike could seem better than another one.
        """
        relevant = self.relevance(photo)
        if not relevant.any():
            return np.nan
        order = np.argsort(relevant, kind="stable")
        return average_precision(self.scores(photo)[order], relevant[order])
