"""Average precision of a ranked list."""

import numpy as np
from numpy.typing import ArrayLike

from listwise.errors import InputError
from listwise.evaluation.ranks import rank_scores


def average_precision(scores: ArrayLike, relevance: ArrayLike) -> float:
    """Mean, over the relevant images, of the precision at each one's rank.

    The highest score comes first; equal scores keep the order they are given in.
    Shapes: [N], [N] (truthy where relevant) -> a number in (0, 1].
    """
    values = np.asarray(scores)
    relevant = np.asarray(relevance).astype(bool)
    if values.ndim != 1 or values.shape != relevant.shape:
        raise InputError(
            f"scores and relevance should be two lists of one length, "
            f"found shapes {values.shape} and {relevant.shape}"
        )
    if not relevant.any():
        raise InputError("no image is relevant, so there is no average precision")
    ranks = np.sort(rank_scores(values[None], [np.flatnonzero(relevant)])[0])
    return float((np.arange(1, len(ranks) + 1) / (ranks + 1)).mean())
