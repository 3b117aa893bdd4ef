"""Prepare a training run: read the photos, hold out validation classes, choose the settings."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from listwise.data import LabelledImages, check_images, hold_out_classes
from listwise.data.catalog import labelled_of
from listwise.data.images import ORIGINAL_SIDE
from listwise.errors import InputError
from listwise.machine import Machine
from listwise.optional import requires
from listwise.plugins import CUSTOM, custom_name
from listwise.settings import TrainConfig, make_config
from listwise.training.choices import TrainPlan, choose_settings
from listwise.training.duration import plan_within_minutes
from listwise.training.objective import accepted_arguments, make_loss
from listwise.training.weights import OwnParts


def prepare(
    data: str | Path,
    given: dict[str, Any],
    preset: Literal["auto", "paper"] = "auto",
    images: LabelledImages | None = None,
) -> TrainPlan:
    """Read and check the photos, hold out validation classes, and choose all settings.

    Args:
        data: a folder of class folders, a table or a list (see `listwise.data.read_labelled`),
            or the name of a data set (see `listwise.data.catalog`).
        given: settings by name, see `TrainConfig`. `backbone` and `pooling` may be modules, and
            `loss` any callable of descriptors and labels; training updates these objects.
        preset: where all other settings come from: "auto" chooses them from the data and the
            machine, "paper" takes those of section 4.2.
        images: the photos to use, if they are only a part of `data` or were read before.

    Examples:
        >>> plan = prepare("photos", {"backbone": "resnet18"})  # doctest: +SKIP
        >>> plan.config.batch_size, plan.reasons["batch_size"]  # doctest: +SKIP
    """
    started = time.perf_counter()
    with requires("train", "training"):
        import cv2  # noqa: F401
        import tensorboard  # type: ignore[import-untyped]  # noqa: F401
        import yaml  # noqa: F401

    if preset not in ("auto", "paper"):
        raise InputError(f"`preset` must be auto or paper, not {preset!r}")
    parts, named = _take_parts(given)
    config = make_config(named)
    _check_combination(config)
    machine = Machine.detect(config.device)
    if images is None:
        images = labelled_of(
            data, split_column=config.split_column, levels=config.loss == "hierarchical-ap"
        )
    images = _training_part(images)
    images, report = check_images(images, config.strict)
    try:
        train, validation, notes = _divide(images, config, str(data))
    except InputError as error:
        if not report.broken:
            raise
        raise InputError(f"{report.lines()[0]}; {error}") from None
    longer = dict(zip(images.files(), report.sizes.max(axis=1), strict=True))
    sides = np.array([longer[file] for file in validation.files()])
    plan = TrainPlan(
        Path(data),
        train,
        validation,
        config,
        {},
        [*report.lines(), *notes],
        parts,
        decoded_bytes=3 * int(report.sizes.prod(axis=1).sum()),
        val_sides=(int(np.percentile(sides, 90, method="higher")), int(sides.max())),
    )
    choose = partial(_choose_all, plan, preset, report.sizes, machine)
    if config.minutes is None or config.adapter:  # an adapter takes seconds
        plan = choose(config)
    else:
        plan = plan_within_minutes(config, choose, time.perf_counter() - started)
    return replace(plan, spent=time.perf_counter() - started)


def _check_combination(config: TrainConfig) -> None:
    """Raise an `InputError` if settings do not work together."""
    if config.adapter and config.mined:
        raise InputError(
            f"`adapter` does not work with the mined tuples of the loss {config.loss}: choose "
            "another `loss`"
        )
    if config.teacher and (config.adapter or config.mined or config.matryoshka or config.memory):
        raise InputError(
            "`teacher` does not work with `adapter`, `matryoshka`, `memory` or a loss with mined "
            "tuples: leave these out"
        )
    if config.adapter and config.lora:
        raise InputError("`adapter` freezes the network: leave `lora` out")
    if config.adapter and config.projection:
        raise InputError("`adapter` keeps the dimensions of the network: leave `projection` out")


def _choose_all(
    plan: TrainPlan,
    preset: str,
    sizes: npt.NDArray[np.int64],
    machine: Machine,
    given: TrainConfig,
) -> TrainPlan:
    """Add every setting that was not given to the photos and notes of a plan."""
    config, reasons = given, dict[str, str]()
    if preset == "auto":
        config, reasons = choose_settings(given, plan.train, sizes, machine)
    config, notes = limit_to_data(config, plan.train)
    changed: dict[str, Any] = {"device": machine.device}
    if config.class_weights and "weights" not in accepted_arguments(
        plan.parts.loss or make_loss(config)
    ):
        changed["class_weights"] = False
        notes.append("this loss does not take weights: `class_weights` is off")
    if config.workers is None:
        changed["workers"] = machine.workers()
    config = config.model_copy(update=changed)
    plan = replace(plan, config=config, reasons=reasons)
    if plan.val_max_side != config.val_max_side and plan.val_sides[1] > ORIGINAL_SIDE:
        notes.append(f"a CPU validates photos with long sides of up to {ORIGINAL_SIDE} pixels")
    return replace(plan, notes=[*plan.notes, *notes])


def _take_parts(given: dict[str, Any]) -> tuple[OwnParts, dict[str, Any]]:
    """Return the objects among the settings, and the settings with the names of these objects."""
    modules, named = dict[str, Any](), dict(given)
    for kind in ("loss", "backbone", "pooling"):
        part = given.get(kind, "")
        if not isinstance(part, str):
            modules[kind], named[kind] = part, custom_name(part)
        elif part.startswith(CUSTOM):
            raise InputError(
                f"the {kind} of this run is your own {part.removeprefix(CUSTOM)}: "
                f"pass that object again as {kind}"
            )
    if "loss" in modules:
        accepted_arguments(modules["loss"])
    loss, teacher = modules.pop("loss", None), given.get("teacher")
    if teacher is None or isinstance(teacher, str):
        return OwnParts(loss, modules), named
    if not all(hasattr(teacher, name) for name in ("describe", "dim", "fingerprint")):
        raise InputError(
            "`teacher` must be a model, a model folder or the name of a timm backbone, not "
            f"{type(teacher).__name__}"
        )
    if given.get("projection") not in (None, teacher.dim):
        raise InputError(
            f"`teacher` has descriptors of {teacher.dim} dimensions: leave `projection` out"
        )
    named["teacher"] = str(teacher.folder or teacher.name or "a model")
    named["projection"] = teacher.dim
    return OwnParts(loss, modules, teacher), named


def limit_to_data(config: TrainConfig, train: LabelledImages) -> tuple[TrainConfig, list[str]]:
    """Reduce batch size and negatives to what the photos allow; return a note for each change."""
    others = len(train.class_names) - 1
    if config.mined is None and config.batch_size > len(train):
        note = (
            f"`batch_size` {config.batch_size} exceeds the number of training photos: "
            f"every batch has all {len(train)} of them"
        )
        return config.model_copy(update={"batch_size": len(train)}), [note]
    if config.loss == "contrastive" and config.contrastive.negatives > others:
        note = (
            f"`contrastive.negatives` {config.contrastive.negatives} exceeds the number of other "
            f"classes: every query has {others} negatives"
        )
        fewer = config.contrastive.model_copy(update={"negatives": others})
        return config.model_copy(update={"contrastive": fewer}), [note]
    return config, []


def _training_part(images: LabelledImages) -> LabelledImages:
    """Return the photos for training and validation, without the test split of a data set."""
    if images.splits is None or "val" in images.splits:
        return images
    return replace(images.of_split("train"), splits=None)


def _divide(
    images: LabelledImages, config: TrainConfig, data: str
) -> tuple[LabelledImages, LabelledImages, list[str]]:
    """Divide the images into training and validation images; return notes on the validation."""
    notes = []
    if images.splits is not None:
        train, validation = images.of_split("train"), images.of_split("val")
        shared = set(train.class_names) & set(validation.class_names)
        if shared:
            raise InputError(
                f"class {sorted(shared)[0]!r} is in both splits, but validation needs classes that "
                "are not trained on: give all photos of a class the same split"
            )
    else:
        fraction = config.val_fraction or TrainConfig().val_fraction
        train, validation = hold_out_classes(images, fraction, config.seed)
        train = train if config.val_fraction else images
        if set(train.class_names) & set(validation.class_names):
            same = "other photos of the training classes, because there are fewer than 4 classes"
            if not config.val_fraction:
                same = "photos that are trained on"
            notes.append(
                "validation mAP is too high for new classes, and the model is not calibrated: "
                f"validation uses {same}"
            )
    trained = int((train.class_sizes() > 1).sum())
    if trained < 2:
        raise InputError(
            f"{data}: training needs at least two classes with two or more photos, found {trained}"
        )
    if not (validation.class_sizes() > 1).any():
        raise InputError(f"{data}: validation needs at least one class with two or more photos")
    return train, validation, notes
