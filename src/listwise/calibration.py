"""Calibration: from the score of two photos to the probability that they show the same thing."""

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from listwise.errors import InputError

NEIGHBORS = 50  # pairs per photo: it and its nearest photos, as a search returns them
FIRST = 5  # nearest photos that weigh as much as the others together: people look at them first
MAX_ERROR = 0.1  # of the probabilities of a calibration
_FOLDS = 5  # groups of classes; each is left out of one fit
_BINS = 10  # of probabilities
_GROUPS = 64  # of pairs with similar scores
_BLOCK = 1024  # photos whose scores are computed together
_STEPS = 100
_EVEN = 1e-9  # Newton's method stops when no parameter changes by more

_Floats = npt.NDArray[np.float64]
_Bools = npt.NDArray[np.bool_]


class Calibration(BaseModel):
    """The probability 1 / (1 + exp(-f(score))), where f is a rising line, or rising points.

    The errors are measured on classes that were left out of the fit, and are None if they are
    not known.

    Attributes:
        slope: positive, so that a higher score is a higher probability.
        intercept: of the line slope * score + intercept.
        points: pairs (score, f) if points fit better than a line. f is linear between them, and has
            the slope of the line before the first and after the last one.
        source: the photos that it was fitted on.
        photos: the number of these photos.
        pairs: the number of pairs of photos.
        positives: the number of pairs with equal labels.
        error: the expected calibration error: the mean difference between probabilities and the
            share of equal labels, in ten bins of probabilities.
        first_probability: the mean probability of the five nearest photos of each photo.
        first_share: the share of these with the label of the photo.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    slope: float = Field(gt=0)
    intercept: float
    points: tuple[tuple[float, float], ...] = ()
    source: str
    photos: int
    pairs: int
    positives: int
    error: float | None = None
    first_probability: float | None = None
    first_share: float | None = None

    def probability(self, score: npt.ArrayLike) -> _Floats:
        """The probability that photos with these scores show the same thing: [n] -> [n]."""
        scores = np.asarray(score, np.float64)
        known, values = self._curve()
        inside = np.clip(scores, known[0], known[-1])
        value = np.interp(inside, known, values) + self.slope * (scores - inside)
        found: _Floats = 0.5 * (1 + np.tanh(value / 2))  # never overflows
        return found

    def score(self, probability: float) -> float:
        """The score that has this probability, which is between 0 and 1."""
        if not 0 < probability < 1:
            return -np.inf if probability <= 0 else np.inf
        value = np.log(probability / (1 - probability))
        known, values = self._curve()
        inside = np.clip(value, values[0], values[-1])
        return float(np.interp(inside, values, known) + (value - inside) / self.slope)

    def _curve(self) -> _Floats:
        """Scores and values of f; the slope continues them on both sides: [2, n]."""
        return np.array(self.points or ((0.0, self.intercept),)).T

    def reliability(self) -> str:
        """Describe the errors in a sentence; empty if they are not known."""
        if self.error is None or self.first_probability is None or self.first_share is None:
            return ""
        return (
            f"on classes left out of the fit, the first {FIRST} hits have a mean probability of "
            f"{self.first_probability:.2f} and {self.first_share:.2f} of them are right; "
            f"expected calibration error {self.error:.3f}"
        )


def fit_calibration(
    descriptors: npt.NDArray[np.float32],
    labels: npt.NDArray[np.int64],
    source: str = "",
) -> Calibration:
    """Fit a calibration on pairs of photos, and measure its errors.

    The pairs are those that a search shows: each photo with its 50 nearest others, of which the
    first five weigh as much as all others. A logistic and an isotonic regression are fitted; the
    one with the smaller log loss on classes that are left out of the fit is taken.

    Args:
        descriptors: unit descriptors of labelled photos [n, C].
        labels: their labels [n]; photos with equal labels show the same thing.
        source: the name of the photos.

    Raises:
        InputError: fewer than two labels have several photos, scores of equal labels are not
            higher, or the probabilities are off by more than 0.1.
    """
    labels, name = np.asarray(labels), source or "these photos"
    folds = _folds(labels, name)
    scores, same = _pairs(np.asarray(descriptors, np.float32), labels)
    rank, half = np.arange(same.shape[1]), same.shape[1] / 2
    by_rank = np.where(rank < FIRST, half / FIRST, half / max(len(rank) - FIRST, 1))
    weights = np.broadcast_to(by_rank, scores.shape)
    fits = _fits(scores, same, weights, name)
    held_out = np.empty((len(fits), *scores.shape))
    for fold in folds:
        for place, fit in enumerate(_fits(scores[~fold], same[~fold], weights[~fold], name)):
            held_out[place, fold] = fit.probability(scores[fold])
    hits = np.where(same, held_out, 1 - held_out)
    best = int(np.argmin([-(weights * np.log(each + 1e-12)).sum() for each in hits]))
    found = held_out[best]
    error = _calibration_error(found, same)
    first, share = float(found[:, :FIRST].mean()), float(same[:, :FIRST].mean())
    known = {"source": source, "photos": len(labels)}
    known |= {"pairs": same.size, "positives": int(same.sum())}
    errors = {"error": error, "first_probability": first, "first_share": share}
    calibration = fits[best].model_copy(update=known | errors)
    if max(error, abs(first - share)) > MAX_ERROR:
        raise InputError(
            f"the probabilities of {name} would be off by more than {MAX_ERROR}: "
            f"{calibration.reliability()}. Learn a whitening, or calibrate on more photos"
        )
    return calibration


def _pairs(
    descriptors: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]
) -> tuple[_Floats, _Bools]:
    """Scores of each photo with its nearest, best first, and whether labels are equal: [n, k]."""
    count = min(NEIGHBORS, len(labels) - 1)
    scores, same = [], []
    for start in range(0, len(labels), _BLOCK):
        block = descriptors[start : start + _BLOCK] @ descriptors.T
        block[np.arange(len(block)), start + np.arange(len(block))] = -np.inf  # not itself
        # With every place up to `count`, the nearest are sorted.
        nearest = np.argpartition(-block, range(count), axis=1)[:, :count]
        scores.append(np.take_along_axis(block, nearest, 1).astype(np.float64))
        same.append(labels[nearest] == labels[start : start + _BLOCK, None])
    return np.concatenate(scores), np.concatenate(same)


def _folds(labels: npt.NDArray[np.int64], name: str) -> list[_Bools]:
    """Distribute classes over folds, the largest first: whether a photo is in each fold, [n]."""
    _, inverse, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    several = int((sizes > 1).sum())
    if several < 2:
        raise InputError(f"calibration needs two labels with several photos: {name} have {several}")
    place = np.argsort(np.argsort(-sizes, kind="stable"))[inverse]  # of the class of each photo
    count = min(_FOLDS, several)
    return [place % count == fold for fold in range(count)]


def _fits(
    scores: _Floats, same: _Bools, weights: _Floats, name: str
) -> tuple[Calibration, Calibration]:
    """Fit a line, and points, to pairs of photos."""
    scores, same, weights = scores.ravel(), same.ravel(), weights.ravel()
    slope, intercept = _fit(scores, same, weights)
    if not slope > 0 or same.all() or not same.any():
        raise InputError(f"{name} cannot calibrate: the scores do not separate the labels")
    line = Calibration(slope=slope, intercept=intercept, source="", photos=0, pairs=0, positives=0)
    return line, line.model_copy(update={"points": _fit_points(scores, same, weights)})


def _fit_points(scores: _Floats, same: _Bools, weights: _Floats) -> tuple[tuple[float, float], ...]:
    """Isotonic regression of groups of pairs with similar scores: (score, log odds), rising."""
    rate = np.average(same, weights=weights)
    blocks: list[_Floats] = []
    for group in np.array_split(np.argsort(scores, kind="stable"), min(_GROUPS, scores.size)):
        # One more pair in each group keeps the probabilities from being 0 or 1.
        total = weights[group].sum() + 1
        middle = np.average(scores[group], weights=weights[group])
        block = np.array([total * middle, weights[group] @ same[group] + rate, total])
        while blocks and blocks[-1][1] * block[2] >= block[1] * blocks[-1][2]:
            block = block + blocks.pop()
        blocks.append(block)
    sums, positives, totals = np.array(blocks).T
    values = np.log(positives / (totals - positives))
    return tuple(zip((sums / totals).tolist(), values.tolist(), strict=True))


def _calibration_error(found: _Floats, same: _Bools) -> float:
    """The expected calibration error of probabilities."""
    bins = np.minimum((found * _BINS).astype(int), _BINS - 1).ravel()
    return float(np.abs(np.bincount(bins, (found - same).ravel())).sum() / same.size)


def _fit(scores: _Floats, same: _Bools, weights: _Floats) -> tuple[float, float]:
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
    line = np.zeros(2)

    def loss(line: _Floats) -> float:
        value = line @ columns
        return float(weights @ (np.logaddexp(0, value) - targets * value))

    for _ in range(_STEPS):
        found = 0.5 * (1 + np.tanh(line @ columns / 2))
        gradient = columns @ (weights * (found - targets))
        hessian = (columns * (weights * found * (1 - found) + 1e-9)) @ columns.T
        step = np.linalg.solve(hessian + 1e-9 * np.eye(2), gradient)
        while loss(line - step) > loss(line) and np.abs(step).max() > _EVEN:
            step = step / 2
        line = line - step
        if np.abs(step).max() < _EVEN:
            break
    slope = float(line[0] / spread)
    return slope, float(line[1] - slope * center)
