"""The loss that a config names."""

from collections.abc import Callable
from functools import partial

import torch

from listwise.losses import (
    ContrastiveLoss,
    FastAPLoss,
    MultiSimilarityLoss,
    QuantizedAPLoss,
    SmoothAPLoss,
    TieAwareAPLoss,
    TripletLoss,
)
from listwise.losses.tuples import TupleLoss
from listwise.settings import TrainConfig
from listwise.training.step import Loss

LOSSES: dict[str, Callable[[TrainConfig], Loss]] = {
    "ap": lambda config: QuantizedAPLoss(config.bins),
    "tie-aware": lambda config: TieAwareAPLoss(config.bins),
    "triplet": lambda config: of_mined_tuples(
        TripletLoss(config.triplet.margin, config.triplet.form), config.triplet.tuples
    ),
    "contrastive": lambda config: of_mined_tuples(
        ContrastiveLoss(config.contrastive.margin, config.contrastive.negatives),
        config.contrastive.tuples,
    ),
    "fastap": lambda config: FastAPLoss(),
    "smoothap": lambda config: SmoothAPLoss(),
    "multi-similarity": lambda config: MultiSimilarityLoss(),
}


def make_loss(config: TrainConfig) -> Loss:
    """The loss that a config names, with its settings."""
    return LOSSES[config.loss](config)


def of_mined_tuples(loss: TupleLoss, count: int) -> Loss:
    """The loss of batches that hold so many tuples one after the other."""
    width = 2 + loss.negatives
    return partial(loss, tuples=torch.arange(count * width).view(count, width))
