"""Training: the three-stage step, and a trainer with sampling, mining, validation and resume."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from listwise.settings import TrainConfig
from listwise.training.objective import CrossBatchMemory, Loss
from listwise.training.step import Counts, MultistageStep

if TYPE_CHECKING:
    from listwise.training.choices import TrainPlan
    from listwise.training.plan import prepare
    from listwise.training.trainer import Trainer, TrainResult, resume

__all__ = ["Counts", "CrossBatchMemory", "Loss", "MultistageStep", "TrainConfig", "TrainPlan"]
__all__ += ["TrainResult", "Trainer", "prepare", "resume"]


def __getattr__(name: str) -> Any:
    """Import the trainer on first use, because it needs more packages than the step."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "plan" if name in ("TrainPlan", "prepare") else "trainer"
    return getattr(import_module(f"{__name__}.{home}"), name)
