"""Training: the three-stage step and what is built around it."""

from listwise.settings import TrainConfig
from listwise.training.prepare import TrainPlan, prepare
from listwise.training.step import Counts, Loss, MultistageStep
from listwise.training.trainer import Trainer, TrainResult, resume

__all__ = [
    "Counts",
    "Loss",
    "MultistageStep",
    "TrainConfig",
    "TrainPlan",
    "TrainResult",
    "Trainer",
    "prepare",
    "resume",
]
