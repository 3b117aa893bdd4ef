"""The front door: what `import listwise` offers, and training in one call."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from listwise.descriptors import Model
from listwise.descriptors import load_model as load
from listwise.results import Evaluation, evaluate
from listwise.search import Added, Entry, Hit, Index, open_index

if TYPE_CHECKING:
    from listwise.training import TrainPlan, TrainResult
    from listwise.training.run.view import TrainView

__all__ = ["Added", "Entry", "Evaluation", "Hit", "Index", "Model", "Run"]
__all__ += ["evaluate", "load", "open_index", "train"]


@dataclass(frozen=True, eq=False)
class Run:
    """A training run: its folder, and its result (best validation mAP, time, counts)."""

    folder: Path
    result: "TrainResult"
    _parts: dict[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def model(self) -> Model:
        """The network that was best on the validation classes."""
        return load(self.result.model, **self._parts)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`: the figures of each update and each validation."""
        from listwise.training.run.record import read_metrics

        return read_metrics(self.folder)


def train(
    photos: str | Path,
    run_folder: str | Path | None = None,
    *,
    preset: Literal["auto", "paper"] = "auto",
    progress: bool | None = None,
    view: "TrainView | None" = None,
    on_plan: "Callable[[TrainPlan], object]" = lambda plan: None,
    **settings: Any,
) -> Run:
    """Train a network on labelled photos by maximising average precision.

    Args:
        photos: a folder of class folders, a table or list of labelled photos, or a data set by
            name.
        run_folder: where the run goes; `runs/NAME` by default. `listwise.training.resume`
            continues a run that was interrupted.
        preset: where settings come from that are not given: "auto" chooses them from the photos
            and the machine, "paper" takes the paper's.
        progress: show a progress bar and the validations; by default on a terminal.
        view: receives what happens instead.
        on_plan: called with the photos and settings before training starts.
        **settings: those of `listwise.training.TrainConfig`. `loss` may be any callable of
            descriptors and labels, `pooling` and `backbone` may be modules of your own.

    Example:
        >>> run = listwise.train("photos", backbone="resnet50")       # doctest: +SKIP
        >>> run.model.encode("chair.jpg").shape                       # doctest: +SKIP
        (2048,)
    """
    from listwise.training import Trainer, prepare
    from listwise.training.run.folder import check_unused
    from listwise.training.run.view import LiveTrainView

    folder = default_run_folder(photos) if run_folder is None else Path(run_folder)
    check_unused(folder)
    plan = prepare(photos, settings, preset)
    on_plan(plan)
    if view is None and (sys.stderr.isatty() if progress is None else progress):
        from rich.console import Console

        view = LiveTrainView(Console(stderr=True))
        for note in plan.notes:
            view.message(f"note: {note}")
    result = Trainer(plan, folder, view).fit()
    modules = {kind: part for kind, part in plan.parts.items() if kind != "loss"}
    return Run(folder, result, {"device": plan.config.device, **modules})


def default_run_folder(photos: str | Path) -> Path:
    """The folder of a run that is given none: `runs/NAME`, by the name of the photos."""
    return Path("runs") / Path(photos).resolve().stem
