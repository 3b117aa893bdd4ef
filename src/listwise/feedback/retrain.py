"""Train from an index, and keep the model of the index unless the new one is better."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from listwise.data.labelled import LabelledImages
from listwise.descriptors import Model, load_model
from listwise.errors import InputError
from listwise.feedback.comparison import Comparison, compare_models, read_comparison
from listwise.feedback.page import write_comparison_page
from listwise.feedback.photos import IndexPhotos, read_index_photos
from listwise.feedback.run import IndexRun, read_index_run, write_index_run
from listwise.feedback.trainers import make_index_trainer, trainable
from listwise.feedback.whiten import whiten_again
from listwise.plugins import CUSTOM
from listwise.search.index import Index
from listwise.search.opening import open_index
from listwise.settings import make_config
from listwise.training.distributed import world
from listwise.training.plan import TrainPlan, prepare
from listwise.training.run.folder import (
    CONFIG_FILE,
    MODEL_FOLDER,
    TABLE_FILE,
    check_settings,
    read_run,
)
from listwise.training.run.view import TrainView
from listwise.training.trainer import Trainer, TrainResult

VAL_FRACTION = 0.25
"""Fraction of the classes that are held out, unless it is given: an index has few at first."""
REPORT_FILE, OLD_FOLDER = "comparison.html", "old-model"
_CHECKED = ("adapter", "seed", "val_fraction")
_OF_THE_MODEL = ("backbone", "pooling", "projection", "weights", "teacher", "split_column")


def train_from_index(
    index: Index | str | Path,
    run: Path,
    settings: dict[str, Any],
    preset: Literal["auto", "paper"] = "auto",
    view: TrainView | None = None,
    on_plan: Callable[[TrainPlan], object] = lambda plan: None,
) -> tuple[TrainResult, Comparison]:
    """Train the model of an index on its labels and marks; `listwise.train` calls it.

    Args:
        index: the index, its folder or its address.
        run: the folder of the run, without a run in it.
        settings: settings of the training by name.
        preset: where the other settings come from, as in `prepare`.
        view: shows the progress to the user; by default nothing is shown.
        on_plan: called with the photos and settings before training starts.

    Returns:
        The result of the training, and the comparison of the model of the index with the new one.
        The model of the run is the better one.
    """
    if world()[1] > 1:
        raise InputError("`from_index` trains in one process: start it without torchrun")
    for name in _OF_THE_MODEL:
        if name in settings:
            raise InputError(f"`from_index` trains the model of the index: leave out `{name}`")
    if isinstance(index, Index):
        plan = _start(index, run, settings, preset)
    else:
        device = str(settings.get("device", "auto"))
        with open_index(index, device=device, create=False) as opened:
            plan = _start(opened, run, settings, preset)
    on_plan(plan)
    return _fit(make_index_trainer(plan, run, view))


def resume_from_index(
    run: str | Path, view: TrainView | None = None
) -> tuple[TrainResult, Comparison]:
    """Resume an interrupted run of `train_from_index`; it does not read the index."""
    from listwise.settings import read_settings

    run = Path(run)
    about, settings = read_run(run), read_settings(run / CONFIG_FILE)
    check_settings(run, about, settings)
    record, images = read_index_run(run)
    model = load_model(record.model, str(settings["device"]))
    if model.fingerprint != record.fingerprint:
        raise InputError(
            f"the model in {record.model} has changed since {run} was started: start a new run"
        )
    plan = _with_parts(prepare(about["data"], settings, "paper", images), model, record)
    return _fit(make_index_trainer(plan, run, view, resume=True))


def _start(index: Index, run: Path, settings: dict[str, Any], preset: Any) -> TrainPlan:
    """Take from the index what the run needs, write it into the run folder, and prepare the run."""
    current = index.generation
    model = current.model
    net = trainable(model)
    if model.fingerprint != current.header.model:
        raise InputError(
            f"{index.uri} is searched with a student of its model: open it with the model itself"
        )
    if net.config.backbone.startswith(CUSTOM) or net.config.pooling.startswith(CUSTOM):
        raise InputError(
            f"the model of {index.uri} has a backbone or pooling of your own, which `from_index` "
            "cannot train: write the labels to a table, and give it as `photos`"
        )
    # Others are checked later: a loss may be an object.
    checked = make_config({name: settings[name] for name in _CHECKED if name in settings})
    fraction = checked.val_fraction if "val_fraction" in settings else VAL_FRACTION
    photos = read_index_photos(index, fraction, checked.seed)
    record = write_index_run(run, index.uri, current, photos, others=checked.adapter)
    given = {"val_fraction": fraction} | settings
    given |= {"backbone": net.config.backbone, "pooling": net.config.pooling}
    if not checked.adapter:
        given["projection"] = net.config.projection
        side = current.header.settings.max_side
        given = ({"val_max_side": max(side, 32)} if side else {}) | given
    plan = _with_parts(prepare(run / TABLE_FILE, given, preset, photos.images), model, record)
    return replace(plan, notes=_notes(plan, photos, index.uri))


def _notes(plan: TrainPlan, photos: IndexPhotos, index: str) -> list[str]:
    """The notes of a plan; classes of one photo are no mistake here."""
    notes = [note for note in plan.notes if "only one photo" not in note]
    alone = int((photos.images.class_sizes() == 1).sum())
    if alone:
        notes.append(f"{_count(alone)} in no class of two or more: they are only negatives")
    if photos.conflicting:
        notes.append(
            f"left out {_count(photos.conflicting)} whose marks or labels contradict each other: "
            f"see listwise index marks {index} --conflicts"
        )
    side = dict(zip(photos.images.ids, photos.images.splits or (), strict=True))
    pairs = [(each.query, other) for each in photos.queries for other in each.different]
    apart = sum(side[query] != side[other] for query, other in pairs)
    if apart:
        notes.append(
            f'{apart} of the "different" marks are between a training photo and a validation '
            "photo: the training does not use them"
        )
    return notes


def _count(photos: int) -> str:
    return "1 photo" if photos == 1 else f"{photos} photos"


def _with_parts(plan: TrainPlan, model: Model, record: IndexRun) -> TrainPlan:
    return replace(plan, parts=plan.parts | {"model": model, "record": record})


def _fit(trainer: Trainer) -> tuple[TrainResult, Comparison]:
    """Train, compare, and make the better model that of the run."""
    result = trainer.fit()
    run = trainer.run
    found = read_comparison(run)
    if found is None:
        found = _compare(trainer, result)
    _keep_better(run, found)
    return result, found


def _compare(trainer: Trainer, result: TrainResult) -> Comparison:
    """Compare the trained model with that of the index, and write the comparison."""
    run, plan = trainer.run, trainer.plan
    old: Model = plan.parts["model"]
    record: IndexRun = plan.parts["record"]
    folder = run / MODEL_FOLDER
    if not plan.config.adapter and old.whitening is not None and result.best_update:
        trainer.view.message("learning the whitening again, for the new network")
        whiten_again(folder, old, record)
    photos = _photos(run, plan)
    new = load_model(folder, str(old.device)) if result.best_update else old
    layer = run if plan.config.adapter else None
    found = compare_models(record, old, new, photos, layer)
    if not found.better:
        replace(old).save(run / OLD_FOLDER)
    write_comparison_page(run / REPORT_FILE, record, found, photos)
    found.save(run)  # last: it marks that the comparison and the old model are complete
    return found


def _keep_better(run: Path, found: Comparison) -> None:
    """Put the old model in place of the trained one if that is not better.

    A process that is killed meanwhile leaves no incomplete model, and a resumed run continues here.
    """
    folder, old, rejected = run / MODEL_FOLDER, run / OLD_FOLDER, run / "rejected-model"
    if not found.better and old.exists():
        shutil.rmtree(rejected, ignore_errors=True)
        if folder.exists():
            folder.rename(rejected)
        old.rename(folder)
    shutil.rmtree(rejected, ignore_errors=True)


def _photos(run: Path, plan: TrainPlan) -> LabelledImages:
    """The photos of the run that can be read, those of training and of validation."""
    _, images = read_index_run(run)
    kept = {*plan.train.ids, *plan.validation.ids}
    return images.subset([i for i, photo in enumerate(images.ids) if photo in kept])
