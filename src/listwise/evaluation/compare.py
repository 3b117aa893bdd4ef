"""Decide whether one ranking of the same queries is clearly better than another."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from listwise.errors import InputError

# A gain counts if it is more than this many standard errors above zero.
STANDARD_ERRORS = 2.0


class Gain(NamedTuple):
    """The difference between two mAP of the same queries, and its standard error.

    Attributes:
        value: mAP minus the mAP that it is compared with.
        error: the standard error of `value`.
    """

    value: float
    error: float

    @property
    def clear(self) -> bool:
        """Whether the gain is positive and more than two standard errors above zero."""
        return self.value > 0 and self.value > STANDARD_ERRORS * self.error


def compare_ap(ap: ArrayLike, base: ArrayLike, labels: ArrayLike) -> Gain:
    """Compare the average precision of the same queries in two rankings.

    Queries of one class have similar lists, so that their differences are not independent. The
    standard error is therefore computed over classes: with d the difference of a query, D the mean
    of all Q differences and K classes, it is √(K/(K−1) · Σ over classes (Σ in the class (d − D))²)
    / Q. With a single class, each query counts as a class.

    Args:
        ap: [Q] average precision of each query; NaN where a query has no positive.
        base: [Q] average precision in the ranking to compare with, NaN for the same queries.
        labels: [Q] class of each query.

    Examples:
        >>> compare_ap([0.9, 0.8, 0.7, 0.6], [0.8, 0.8, 0.6, 0.6], [0, 0, 1, 1])
        Gain(value=0.05, error=0.0)
    """
    new, old, classes = np.asarray(ap, np.float64), np.asarray(base, np.float64), np.asarray(labels)
    if not new.shape == old.shape == classes.shape or new.ndim != 1:
        raise InputError(
            "`ap`, `base` and `labels` should be lists of the same length, found shapes "
            f"{new.shape}, {old.shape} and {classes.shape}"
        )
    counted = ~np.isnan(new)
    if not np.array_equal(counted, ~np.isnan(old)) or not counted.any():
        raise InputError("compare the average precision of the same queries, at least of one")
    difference = new[counted] - old[counted]
    value = float(difference.mean())
    groups = np.unique(classes[counted], return_inverse=True)[1].reshape(-1)
    if groups.max() == 0:
        groups = np.arange(len(difference))
    count = int(groups.max()) + 1
    if count == 1:
        return Gain(round(value, 12), float("inf"))
    sums = np.bincount(groups, difference - value)
    error = np.sqrt(count / (count - 1) * (sums**2).sum()) / len(difference)
    # Rounding of the means must not make equal rankings differ.
    return Gain(round(value, 12), round(float(error), 12))
