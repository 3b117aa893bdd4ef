"""Weights of the queries in the mean."""

import torch
from torch import Tensor

from listwise.losses.checks import check_labels


def class_balanced_weights(labels: Tensor) -> Tensor:
    """Weights under which every class counts the same (section 4.2): [B] integers -> [B], mean 1.

    The weight of an image is inversely proportional to the size of its class. The losses scale
    weights once more, so that their mean over the queries that have a positive is 1.
    """
    check_labels(labels)
    _, position, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
    weights: Tensor = (len(labels) / len(sizes)) / sizes[position].float()
    return weights
