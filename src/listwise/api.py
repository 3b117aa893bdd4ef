"""The functions and classes of `import listwise`."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from listwise.descriptors import Model
from listwise.descriptors import load_model as load
from listwise.errors import InputError
from listwise.labeling import Labels, label
from listwise.results import Evaluation, Tuning, evaluate, tune
from listwise.search import Added, Entry, Hit, Index, open_index

if TYPE_CHECKING:
    from listwise.feedback import Comparison
    from listwise.training import TrainPlan, TrainResult
    from listwise.training.view import TrainView

__all__ = ["Added", "Entry", "Evaluation", "Hit", "Index", "Labels", "Model", "Run", "Tuning"]
__all__ += ["evaluate", "label", "load", "open_index", "train", "tune"]


@dataclass(frozen=True, eq=False)
class Run:
    """A training run: its folder and its result (best validation mAP, time, counts).

    A run from an index also has the `comparison` of the model of the index with the new one.
    """

    folder: Path
    result: "TrainResult"
    comparison: "Comparison | None" = None
    _parts: dict[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def model(self) -> Model:
        """The model with the best validation mAP, loaded when it is first used."""
        return load(self.result.model, **self._parts)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`: the metrics of each update and each validation."""
        from listwise.training.run import read_metrics

        return read_metrics(self.folder)


def train(
    photos: str | Path | None = None,
    run_folder: str | Path | None = None,
    *,
    from_index: Index | str | Path | None = None,
    preset: Literal["auto", "paper"] = "auto",
    progress: bool | None = None,
    view: "TrainView | None" = None,
    on_plan: "Callable[[TrainPlan], object]" = lambda plan: None,
    **settings: Any,
) -> Run:
    """Train a network on labelled photos by maximizing average precision.

    `listwise.training.resume` resumes an interrupted run.

    Args:
        photos: a folder of class folders, a table or list of labelled photos, or the name of a
            data set.
        from_index: train the model of this index on its labels and marks, instead of `photos`. The
            model of the run is the new one only if it is better.
        run_folder: folder to write the run to; by default runs/NAME.
        preset: source of the settings that you do not give: auto chooses them for the photos and
            the machine, paper uses the values of the paper.
        progress: whether to show a progress bar and the validations; by default on a terminal.
        view: receives updates and validations instead of the progress bar.
        on_plan: called with the photos and settings before training starts.
        **settings: settings of `listwise.training.TrainConfig`. `loss` may also be a callable of
            descriptors and labels; `pooling` and `backbone` may also be modules. `teacher` may
            also be a `Model`.

    Returns:
        The run, with its model and metrics.

    Examples:
        >>> run = listwise.train("photos", backbone="resnet50")       # doctest: +SKIP
        >>> run.model.encode("chair.jpg").shape                       # doctest: +SKIP
        (2048,)
        >>> run = listwise.train(from_index="shop", adapter=True)     # doctest: +SKIP
        >>> run.comparison.better                                     # doctest: +SKIP
        True
    """
    from listwise.training import Trainer, prepare
    from listwise.training.run import check_unused

    if (photos is None) == (from_index is None):
        raise InputError("give either `photos` or `from_index` to train on")
    place = from_index.uri if isinstance(from_index, Index) else photos or from_index
    folder = default_run_folder(str(place)) if run_folder is None else Path(run_folder)
    check_unused(folder)
    live: TrainView | None = None
    if view is None and (sys.stderr.isatty() if progress is None else progress):
        from rich.console import Console

        from listwise.training.view import LiveTrainView

        live = view = LiveTrainView(Console(stderr=True))

    def announce(plan: "TrainPlan") -> None:
        on_plan(plan)
        if live is not None:
            for note in plan.notes:
                live.message(f"note: {note}")

    if from_index is not None:
        from listwise.feedback import train_from_index

        result, found = train_from_index(from_index, folder, settings, preset, view, announce)
        return Run(folder, result, found, {"device": settings.get("device", "auto")})
    assert photos is not None
    if isinstance(settings.get("teacher"), str | Path):
        settings["teacher"] = load(settings["teacher"], settings.get("device", "auto"))
    plan = prepare(photos, settings, preset)
    announce(plan)
    parts = {"device": plan.config.device, **plan.parts.modules}
    trainer = Trainer(plan, folder, view)
    del plan, settings  # so that the trainer frees a teacher once its descriptors are computed
    return Run(folder, trainer.fit(), _parts=parts)


def default_run_folder(photos: str | Path) -> Path:
    """Return the default folder of a run: `runs/NAME` for photos called NAME."""
    return Path("runs") / Path(photos).resolve().stem
