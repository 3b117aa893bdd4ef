"""Train from an index, and keep the model of the index unless the new one is better."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from listwise.data.labelled import Images
from listwise.descriptors import Model, load_model
from listwise.descriptors.learning import learn_whitening, truncate_model
from listwise.errors import InputError
from listwise.feedback.comparison import (
    COMPARISON_FILE,
    Comparison,
    compare_models,
    read_comparison,
    write_comparison_page,
)
from listwise.feedback.photos import (
    IndexPhotos,
    IndexRun,
    read_index_photos,
    read_index_run,
    write_index_run,
)
from listwise.feedback.trainers import IndexTraining
from listwise.files import write_text
from listwise.plugins import CUSTOM
from listwise.progress import count_of
from listwise.search.index import Index
from listwise.search.opening import open_index
from listwise.settings import make_config
from listwise.training.choices import TrainPlan
from listwise.training.distributed import world
from listwise.training.plan import prepare
from listwise.training.run import MODEL_FOLDER, TABLE_FILE, read_run_settings
from listwise.training.trainer import Trainer, TrainResult
from listwise.training.view import TrainView

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
        plan, source = _start(index, run, settings, preset)
    else:
        device = str(settings.get("device", "auto"))
        with open_index(index, device=device, create=False) as opened:
            plan, source = _start(opened, run, settings, preset)
    on_plan(plan)
    return _fit(Trainer(plan, run, view, make_parts=source.parts), source)


def resume_from_index(
    run: str | Path,
    view: TrainView | None = None,
    on_plan: Callable[[TrainPlan], object] = lambda plan: None,
) -> tuple[TrainResult, Comparison]:
    """Resume an interrupted run of `train_from_index`; it does not read the index."""
    run = Path(run)
    about, settings = read_run_settings(run)
    record, images = read_index_run(run)
    model = load_model(record.model, str(settings["device"]))
    if model.fingerprint != record.fingerprint:
        raise InputError(
            f"the model in {record.model} has changed since {run} was started: start a new run"
        )
    plan, source = (
        prepare(about["data"], settings, "paper", images),
        IndexTraining(model, record, images),
    )
    on_plan(plan)
    return _fit(Trainer(plan, run, view, resume=True, make_parts=source.parts), source)


def _start(
    index: Index, run: Path, settings: dict[str, Any], preset: Any
) -> tuple[TrainPlan, IndexTraining]:
    """Take from the index what the run needs, write it into the run folder, and prepare the run."""
    current = index.generation
    model = current.model
    net = model.trainable("trained")
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
    side = current.header.settings.max_side
    given = {"val_max_side": max(side, 32) if side else None} | given
    if not checked.adapter:
        given["projection"] = net.config.projection
    plan = prepare(run / TABLE_FILE, given, preset, photos.images)
    plan = replace(plan, notes=_notes(plan, photos, index.uri))
    return plan, IndexTraining(model, record, photos.images)


def _notes(plan: TrainPlan, photos: IndexPhotos, index: str) -> list[str]:
    """The notes of a plan; classes of one photo are no mistake here."""
    notes = [note for note in plan.notes if "only one photo" not in note]
    alone = int((photos.images.class_sizes() == 1).sum())
    if alone:
        notes.append(
            f"{count_of(alone, 'photo')} in no class of two or more: they are only negatives"
        )
    if photos.conflicting:
        notes.append(
            f"left out {count_of(photos.conflicting, 'photo')} whose marks or labels contradict "
            f"each other: see listwise index marks {index} --conflicts"
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


def _fit(trainer: Trainer, source: IndexTraining) -> tuple[TrainResult, Comparison]:
    """Train, compare, and make the better model that of the run."""
    result = trainer.fit()
    found = read_comparison(trainer.run)
    if found is None:
        found = _compare(trainer, source, result)
    _keep_better(trainer.run, found)
    return result, found


def _compare(trainer: Trainer, source: IndexTraining, result: TrainResult) -> Comparison:
    """Compare the trained model with that of the index, and write the comparison."""
    run, plan, old, record = trainer.run, trainer.plan, source.model, source.record
    folder = run / MODEL_FOLDER
    if not plan.config.adapter and old.whitening is not None and result.best_update:
        trainer.view.message("learning the whitening again, for the new network")
        whiten_again(folder, old, record)
    readable = {*plan.train.ids, *plan.validation.ids}
    images = source.images
    photos = images.subset([i for i, photo in enumerate(images.ids) if photo in readable])
    new = load_model(folder, str(old.device)) if result.best_update else old
    layer = run if plan.config.adapter else None
    found = compare_models(record, old, new, photos, layer)
    if not found.better:
        replace(old).save(run / OLD_FOLDER)
    write_comparison_page(run / REPORT_FILE, record, found, photos)
    # Last: it marks that the comparison and the old model are complete.
    write_text(run / COMPARISON_FILE, found.model_dump_json(indent=2) + "\n")
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


def whiten_again(folder: Path, old: Model, record: IndexRun) -> None:
    """Give the trained network in a folder a whitening with the dimensions of the old one.

    It is a PCA of photos of the index, with the power of the old one if that was a PCA, and also
    with its shrinkage if there are enough photos; otherwise with the defaults of `listwise whiten`.
    """
    assert old.whitening is not None
    info = old.whitening.info
    if info.method == "prefix":
        truncate_model(folder, old.dim)
        return
    found = [(path, box) for path, box in record.whitening if Path(path).is_file()]
    paths, boxes = (tuple(part) for part in zip(*found, strict=True)) if found else ((), ())
    photos = Images(paths, paths, boxes if any(boxes) else None)
    same = info.method == "pca"
    # Without shrinkage, n photos give fewer than n dimensions.
    enough = len(photos) > old.dim
    learn_whitening(
        folder,
        photos,
        dim=old.dim,
        power=info.power if same and info.power is not None else 0.25,
        shrinkage=(info.shrinkage or 0.0) if same and enough else "ledoit-wolf",
        max_side=record.settings.max_side or 0,
        device=str(old.device),
    )
