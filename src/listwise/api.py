"""The functions and classes of `import listwise`."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from listwise.data.catalog.dataset import check_named
from listwise.descriptors import Model
from listwise.descriptors import load_model as load
from listwise.errors import InputError, ListwiseWarning
from listwise.labeling import Labels, label
from listwise.pages import notebook_html
from listwise.progress import bars_are_seen, readable_time, stderr_console
from listwise.results import Evaluation, Tuning, evaluate, tune
from listwise.search import Added, Entry, Hit, Index, open_index
from listwise.settings import merge, read_settings

if TYPE_CHECKING:
    from listwise.feedback import Comparison
    from listwise.settings import TrainConfig
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

    def _repr_html_(self) -> str:
        result, start = self.result, 100 * self.result.first_map
        best = f"{start:.1f} → {100 * result.best_map:.1f}, best at update {result.best_update}"
        done = f"{result.updates} in {readable_time(result.seconds)}"
        rows = [("validation mAP", best), ("updates", done)]
        return notebook_html(f"Run {self.folder}", rows=rows)

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
    resume: str | Path | None = None,
    config: "TrainConfig | str | Path | None" = None,
    preset: Literal["auto", "paper"] = "auto",
    progress: bool | None = None,
    view: "TrainView | None" = None,
    on_plan: "Callable[[TrainPlan], object]" = lambda plan: None,
    **settings: Any,
) -> Run:
    """Train a network on labelled photos by maximizing average precision.

    Args:
        photos: a folder of class folders, a table or list of labelled photos, or the name of a
            data set.
        from_index: train the model of this index on its labels and marks, instead of `photos`. The
            model of the run is the new one only if it is better.
        run_folder: folder to write the run to; by default runs/NAME, or if there is a run in it
            runs/NAME2, runs/NAME3 and so on.
        resume: resume the interrupted run in this folder, with its photos and settings.
        config: settings as a `TrainConfig`, whose fields editors complete, or a YAML file.
        preset: source of the settings that you do not give: auto chooses them for the photos and
            the machine, paper uses the values of the paper.
        progress: whether to show a progress bar and the validations; by default on a terminal and
            in a notebook.
        view: receives updates and validations instead of the progress bar.
        on_plan: called with the photos and settings before training starts.
        **settings: settings of `listwise.training.TrainConfig`. `loss` may also be a callable of
            descriptors and labels; `pooling` and `backbone` may also be modules. `teacher` may
            also be a `Model`. With `resume`, only such objects, which the run was started with.

    Returns:
        The run, with its model and metrics.

    Examples:
        >>> run = listwise.train("photos", backbone="resnet50")       # doctest: +SKIP
        >>> run.model.encode("chair.jpg").shape                       # doctest: +SKIP
        (2048,)
        >>> run = listwise.train(from_index="shop", adapter=True)     # doctest: +SKIP
        >>> run.comparison.better                                     # doctest: +SKIP
        True
        >>> run = listwise.train(resume="runs/photos")                # doctest: +SKIP
    """
    from listwise.training import Trainer, prepare
    from listwise.training import resume as resumed
    from listwise.training.run import check_unused, is_index_run, read_run

    if [photos is None, from_index is None, resume is None].count(False) != 1:
        raise InputError("give one of `photos`, `from_index` and `resume`")
    if photos is not None:
        check_named(photos)
    live: TrainView | None = None
    if view is None and (bars_are_seen() if progress is None else progress):
        from listwise.training.view import LiveTrainView

        live = view = LiveTrainView(stderr_console())

    def announce(plan: "TrainPlan") -> None:
        on_plan(plan)
        if live is not None:
            for note in plan.notes:
                live.message(f"note: {note}")

    if resume is not None:
        folder = Path(resume)
        if run_folder or config or settings.keys() - {"loss", "backbone", "pooling"}:
            raise InputError("`resume` uses the settings of the run: leave out all others")
        if is_index_run(folder, read_run(folder)):
            from listwise.feedback import resume_from_index

            return Run(folder, *resume_from_index(folder, view, announce))
        trainer = resumed(folder, view, **settings)
        announce(trainer.plan)
        parts = {"device": trainer.plan.config.device, **trainer.plan.parts.modules}
        return Run(folder, trainer.fit(), _parts=parts)
    place = from_index.uri if isinstance(from_index, Index) else from_index or photos
    folder = Path(run_folder or default_run_folder(str(place)))
    check_unused(folder)
    settings = merge(_given(config), settings)
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


def _given(config: "TrainConfig | str | Path | None") -> dict[str, Any]:
    if isinstance(config, str | Path):
        return read_settings(config)
    return {} if config is None else config.model_dump(exclude_unset=True)


def default_run_folder(photos: str | Path) -> Path:
    """Return the default folder of a run on photos called NAME.

    It is the first of runs/NAME, runs/NAME2, runs/NAME3 ... without a run in it.
    """
    from listwise.training.run import RUN_FILE

    first = Path("runs") / Path(photos).resolve().stem
    names = (f"{first.name}{number}" for number in count(2))
    folders = chain([first], map(first.with_name, names))
    free = next(folder for folder in folders if not (folder / RUN_FILE).exists())
    if free != first:
        warnings.warn(
            f"{first} contains a run, which `resume` would resume: this one is written to {free}",
            ListwiseWarning,
            stacklevel=3,
        )
    return free
