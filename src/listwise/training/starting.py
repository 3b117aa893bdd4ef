"""Create the trainer of a new run or of an interrupted one."""

from pathlib import Path

from torch import nn

from listwise.errors import InputError
from listwise.plugins import CUSTOM, custom_name
from listwise.settings import read_settings
from listwise.training.adapter import AdapterTrainer
from listwise.training.distillation import DistillationTrainer
from listwise.training.objective import Loss
from listwise.training.plan import TrainPlan, prepare
from listwise.training.run.folder import CONFIG_FILE, check_settings, is_index_run, read_run
from listwise.training.run.view import TrainView
from listwise.training.trainer import Trainer


def make_trainer(
    plan: TrainPlan, run: str | Path, view: TrainView | None = None, *, resume: bool = False
) -> Trainer:
    """Create the trainer for the settings of a plan; the arguments are those of `Trainer`."""
    kind = Trainer
    if plan.config.adapter:
        kind = AdapterTrainer
    elif plan.config.teacher:
        kind = DistillationTrainer
    return kind(plan, run, view, resume=resume)


def resume(
    run: str | Path,
    view: TrainView | None = None,
    *,
    loss: Loss | None = None,
    backbone: nn.Module | None = None,
    pooling: nn.Module | None = None,
) -> Trainer:
    """Create the trainer of an interrupted run, with the data and settings of that run.

    Args:
        run: the folder of the run.
        view: shows the progress to the user; by default nothing is shown.
        loss: the loss object that the run was started with, if it was your own.
        backbone: the backbone module that the run was started with, if it was your own.
        pooling: the pooling module that the run was started with, if it was your own.

    Examples:
        >>> resume("runs/first").fit().best_map  # doctest: +SKIP
    """
    about = read_run(run)
    if is_index_run(run, about):
        raise InputError(
            f"{run} trains from an index: resume it with listwise.feedback.resume_from_index, or "
            "with listwise train"
        )
    settings = read_settings(Path(run) / CONFIG_FILE)
    check_settings(run, about, settings)
    given = {"loss": loss, "backbone": backbone, "pooling": pooling}
    for kind, part in given.items():
        if part is None:
            continue
        recorded, name = str(settings.get(kind)), custom_name(part)
        # Compare class names only: a class may have moved, as when a script becomes a package.
        if not recorded.startswith(CUSTOM) or recorded.split(".")[-1] != name.split(".")[-1]:
            raise InputError(
                f"{run} was started with the {kind} {recorded!r}, not {name!r}: pass that one"
            )
        settings[kind] = part
    plan = prepare(about["data"], settings, preset="paper")
    return make_trainer(plan, run, view, resume=True)
