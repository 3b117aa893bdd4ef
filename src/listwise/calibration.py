"""Calibration: from the score of two photos to the probability that they show the same thing."""

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from listwise.errors import InputError

NEIGHBORS = 50  # pairs per photo: it and its nearest photos, as a search returns them
_BLOCK = 1024  # photos whose scores are computed together
_STEPS = 100
_EVEN = 1e-9  # Newton's method stops when no parameter changes by more


class Calibration(BaseModel):
    """A logistic function of the score: probability = 1 / (1 + exp(-(slope * score + intercept))).

    Attributes:
        slope: positive, so that a higher score is a higher probability.
        intercept: the value at score 0, before the logistic function.
        source: the photos that it was fitted on.
        photos: the number of these photos.
        pairs: the number of pairs of photos.
        positives: the number of pairs with equal labels.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    slope: float = Field(gt=0)
    intercept: float
    source: str
    photos: int
    pairs: int
    positives: int

    def probability(self, score: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """The probability that photos with these scores show the same thing: [n] -> [n]."""
        value = self.slope * np.asarray(score, np.float64) + self.intercept
        found: npt.NDArray[np.float64] = 0.5 * (1 + np.tanh(value / 2))  # never overflows
        return found

    def score(self, probability: float) -> float:
        """The score that has this probability, which is between 0 and 1."""
        if not 0 < probability < 1:
            return -np.inf if probability <= 0 else np.inf
        return float((np.log(probability / (1 - probability)) - self.intercept) / self.slope)


def fit_calibration(
    descriptors: npt.NDArray[np.float32],
    labels: npt.NDArray[np.int64],
    source: str = "",
) -> Calibration:
    """Fit a calibration by logistic regression on pairs of photos.

    The pairs are those that a search shows: each photo with its 50 nearest others.

    Args:
        descriptors: unit descriptors of labelled photos [n, C].
        labels: their labels [n]; photos with equal labels show the same thing.
        source: the name of the photos.

    Raises:
        InputError: there are no pairs with equal labels or none with different ones, or scores of
            equal labels are not higher.
    """
    scores, same = _pairs(np.asarray(descriptors, np.float32), np.asarray(labels))
    positives = int(same.sum())
    if not 0 < positives < len(same):
        kind = "the same label" if not positives else "different labels"
        raise InputError(
            f"calibration needs pairs of photos with {kind}: {source or 'these'} have none"
        )
    slope, intercept = _fit(scores, same)
    if not slope > 0:
        raise InputError(
            f"the scores of {source or 'these photos'} do not separate their labels: "
            "the model cannot be calibrated on them"
        )
    return Calibration(
        slope=slope,
        intercept=intercept,
        source=source,
        photos=len(labels),
        pairs=len(same),
        positives=positives,
    )


def _pairs(
    descriptors: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Scores of pairs, and whether their labels are equal: both [n * min(50, n - 1)]."""
    count = min(NEIGHBORS, len(labels) - 1)
    scores, same = [np.zeros(0)], [np.zeros(0, bool)]
    for start in range(0, len(labels) if count > 0 else 0, _BLOCK):
        block = descriptors[start : start + _BLOCK] @ descriptors.T
        block[np.arange(len(block)), start + np.arange(len(block))] = -np.inf  # not itself
        nearest = np.argpartition(-block, count - 1, axis=1)[:, :count]
        scores.append(np.take_along_axis(block, nearest, 1).ravel().astype(np.float64))
        same.append((labels[nearest] == labels[start : start + _BLOCK, None]).ravel())
    return np.concatenate(scores), np.concatenate(same)


def _fit(scores: npt.NDArray[np.float64], same: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """Logistic regression by Newton's method, with the targets of Platt scaling.

    These targets are a little inside of 0 and 1, so that the slope is finite where the scores
    separate the labels.
    """
    positives = int(same.sum())
    high = (positives + 1) / (positives + 2)
    low = 1 / (len(same) - positives + 2)
    targets = np.where(same, high, low)
    center, spread = scores.mean(), scores.std() + 1e-12
    columns = np.stack([(scores - center) / spread, np.ones_like(scores)])
    weights = np.zeros(2)

    def loss(weights: npt.NDArray[np.float64]) -> float:
        value = weights @ columns
        return float((np.logaddexp(0, value) - targets * value).sum())

    for _ in range(_STEPS):
        found = 0.5 * (1 + np.tanh(weights @ columns / 2))
        gradient = columns @ (found - targets)
        hessian = (columns * (found * (1 - found) + 1e-9)) @ columns.T
        step = np.linalg.solve(hessian + 1e-9 * np.eye(2), gradient)
        while loss(weights - step) > loss(weights) and np.abs(step).max() > _EVEN:
            step = step / 2
        weights = weights - step
        if np.abs(step).max() < _EVEN:
            break
    slope = float(weights[0] / spread)
    return slope, float(weights[1] - slope * center)
