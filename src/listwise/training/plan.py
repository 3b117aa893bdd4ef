"""From what the user names to what the trainer needs: images, settings and their reasons."""

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from listwise.data import LabelledImages, check_images, hold_out_classes
from listwise.data.catalog import labelled_of
from listwise.errors import InputError
from listwise.machine import Machine
from listwise.optional import requires
from listwise.plugins import CUSTOM, custom_name
from listwise.settings import TrainConfig, make_config
from listwise.training.choices import choose_settings
from listwise.training.objective import accepted_arguments, make_loss

TRAIN_SPLIT, VAL_SPLIT = "train", "val"
PARTS = ("loss", "backbone", "pooling")


@dataclass(frozen=True)
class TrainPlan:
    """What will be trained on what, and what a person should know of it.

    `reasons` says why a setting was chosen that the user did not give; `notes` are sentences.
    `parts` are the objects given as `loss`, `backbone` or `pooling`; the config has their names.
    """

    data: Path
    train: LabelledImages
    validation: LabelledImages
    config: TrainConfig
    reasons: dict[str, str]
    notes: list[str]
    parts: dict[str, Any] = field(default_factory=dict)

    def fingerprint(self) -> str:
        """Differs when names, labels or boxes of photos do, or their division into two parts."""
        digest = hashlib.sha256()
        for part in (self.train, self.validation):
            for i, (name, label) in enumerate(zip(part.ids, part.labels, strict=True)):
                digest.update(f"{name}\t{part.class_names[label]}\t{part.box(i)}\n".encode())
            digest.update(b"\n")
        return digest.hexdigest()


def prepare(
    data: str | Path, given: dict[str, Any], preset: Literal["auto", "paper"] = "auto"
) -> TrainPlan:
    """Read and check the images, hold out validation classes, and choose every setting.

    Args:
        data: a folder of class folders, a table or a list (see `listwise.data.read_labelled`),
            or a data set by name (see `listwise.data.catalog`).
        given: the settings that the user named. `backbone` and `pooling` may be modules, and
            `loss` any callable of descriptors and labels; these very objects are trained.
        preset: where the others come from: "auto" chooses them from the data and the machine,
            "paper" takes section 4.2's.
    """
    with requires("train", "training"):
        import cv2  # noqa: F401
        import tensorboard  # type: ignore[import-untyped]  # noqa: F401
        import yaml  # noqa: F401

    if preset not in ("auto", "paper"):
        raise InputError(f"`preset` is auto or paper, not {preset!r}")
    parts, named = _take_parts(given)
    config = make_config(named)
    machine = Machine.detect(config.device)
    images = _training_part(labelled_of(data, split_column=config.split_column))
    images, report = check_images(images, config.strict)
    train, validation = _divide(images, config)
    notes = report.lines()
    if (train.class_sizes() > 1).sum() < 2:
        raise InputError(
            f"{data}: training needs at least two classes of two or more photos; "
            f"there are {int((train.class_sizes() > 1).sum())}"
        )
    if not (validation.class_sizes() > 1).any():
        raise InputError(f"{data}: no validation class has two photos, so nothing can be found")
    reasons: dict[str, str] = {}
    if preset == "auto":
        # As checked: what the user wrote may be text where a number is meant.
        checked = config.model_dump(exclude_unset=True)
        config, reasons = choose_settings(checked, train, report.sizes, machine)
    config, changed = within(config, train)
    notes += changed
    if config.class_weights and "weights" not in accepted_arguments(
        parts.get("loss") or make_loss(config)
    ):
        config = config.model_copy(update={"class_weights": False})
        notes.append("this loss takes no weights: class_weights is off")
    workers = machine.workers() if config.workers is None else config.workers
    config = config.model_copy(update={"device": machine.device, "workers": workers})
    return TrainPlan(Path(data), train, validation, config, reasons, notes, parts)


def _take_parts(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The objects among the settings, and the settings with their names."""
    parts = {k: given[k] for k in PARTS if k in given and not isinstance(given[k], str)}
    named = given | {kind: custom_name(part) for kind, part in parts.items()}
    for kind in PARTS:
        name = str(named.get(kind, ""))
        if name.startswith(CUSTOM) and kind not in parts:
            raise InputError(
                f"the settings name a {kind} of your own, {name.removeprefix(CUSTOM)}: "
                f"pass that object again as {kind}"
            )
    if "loss" in parts:
        accepted_arguments(parts["loss"])
    return parts, named


def within(config: TrainConfig, train: LabelledImages) -> tuple[TrainConfig, list[str]]:
    """The config with no more images and classes than there are, and a note where it changed."""
    others = len(train.class_names) - 1
    if config.mined is None and config.batch_size > len(train):
        note = (
            f"batches of {config.batch_size} are more than there are training photos: "
            f"every batch is all {len(train)} of them"
        )
        return config.model_copy(update={"batch_size": len(train)}), [note]
    if config.loss == "contrastive" and config.contrastive.negatives > others:
        note = (
            f"{config.contrastive.negatives} negatives of different classes are more than there "
            f"are other classes: every query has {others}"
        )
        fewer = config.contrastive.model_copy(update={"negatives": others})
        return config.model_copy(update={"contrastive": fewer}), [note]
    return config, []


def _training_part(images: LabelledImages) -> LabelledImages:
    """What may be trained on and validated with; a set's own test part is left alone."""
    if images.splits is None or VAL_SPLIT in images.splits:
        return images
    return replace(images.of_split(TRAIN_SPLIT), splits=None)


def _divide(images: LabelledImages, config: TrainConfig) -> tuple[LabelledImages, LabelledImages]:
    """Training and validation images."""
    if images.splits is not None:
        train, validation = images.of_split(TRAIN_SPLIT), images.of_split(VAL_SPLIT)
        shared = set(train.class_names) & set(validation.class_names)
        if shared:
            raise InputError(
                f"class {sorted(shared)[0]!r} is in both splits: validation must be on classes "
                "that are not trained on, so give all photos of a class the same split"
            )
        return train, validation
    return hold_out_classes(images, config.val_fraction, config.seed)
