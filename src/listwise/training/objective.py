"""The loss that a config names."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from listwise.losses import (
    ContrastiveLoss,
    FastAPLoss,
    MultiSimilarityLoss,
    QuantizedAPLoss,
    SmoothAPLoss,
    TieAwareAPLoss,
    TripletLoss,
)
from listwise.settings import TrainConfig
from listwise.training.step import Loss

LOSSES: dict[str, Callable[[TrainConfig], Loss]] = {
    "ap": lambda config: QuantizedAPLoss(config.bins),
    "tie-aware": lambda config: TieAwareAPLoss(config.bins),
    "triplet": lambda config: TripletLoss(config.triplet.margin, config.triplet.form),
    "contrastive": lambda config: ContrastiveLoss(
        config.contrastive.margin, config.contrastive.negatives
    ),
    "fastap": lambda config: FastAPLoss(),
    "smoothap": lambda config: SmoothAPLoss(),
    "multi-similarity": lambda config: MultiSimilarityLoss(),
}


def make_loss(config: TrainConfig) -> Loss:
    """The config's loss; one of mined tuples takes batches that hold them one after the other."""
    loss = LOSSES[config.loss](config)
    if config.mined is None:
        return loss
    return partial(loss, tuples=tuples_in_order(config.mined.tuples, config.mined.negatives))


def tuples_in_order(count: int, negatives: int) -> Tensor:
    """Rows of a batch of so many tuples, one after the other: [count, 2 + negatives]."""
    return torch.arange(count * (2 + negatives)).view(count, 2 + negatives)
