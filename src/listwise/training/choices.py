"""The plan of a run, and the choice of the settings that the user did not give."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from listwise.data import LabelledImages
from listwise.data.images import ORIGINAL_SIDE
from listwise.machine import Machine
from listwise.models.backbone import SMALL_BACKBONE, patch_side
from listwise.settings import CropSettings, TrainConfig
from listwise.training.weights import OwnParts

PASSES = 10  # times each photo is seen; with more, small data sets overfit
UNEVEN = 2  # ratio of the sizes of the largest and the smallest class
_LIMITED = {True: "as in the paper", False: "without a GPU"}
SIZE_FACTOR = math.sqrt(2)  # between two photo sizes that are tried
# The largest size, as a multiple of the crops that the network was trained on.
MOST_CROPS = 4


class Speed(NamedTuple):
    """Seconds that a run takes on this machine, at one crop size.

    Attributes:
        crop: to decode and crop a photo, in addition to the network.
        image: to train the network on a crop.
        photo: to validate a photo.
    """

    crop: float
    image: float
    photo: float

    def scaled(self, pixels: float) -> "Speed":
        """Return the speed with this many times the pixels."""
        return Speed(self.crop, pixels * self.image, pixels * self.photo)


class Sizes(NamedTuple):
    """The sizes among which one is chosen: the longer side of a photo, in pixels.

    Attributes:
        start: the size in the validations of the run; 0 is the original size.
        larger: larger sizes, in the order in which they are tried.
        smaller: smaller sizes, likewise.
    """

    start: int
    larger: Sequence[int] = ()
    smaller: Sequence[int] = ()

    def cost(self) -> float:
        """Return the expected duration of the choice, as a multiple of that of a validation."""
        return sum((size / self.start) ** 2 for size in (*self.larger[:1], *self.smaller[:1]))

    def best(self, measure: Callable[[int], float]) -> int:
        """Return the size with the best mAP: go up from the start while mAP rises, or else down.

        `measure` returns the mAP at a size.
        """
        best = self.start
        for ladder in (self.larger, self.smaller):
            for size in ladder:
                if measure(size) <= measure(best):
                    break
                best = size
            if best != self.start:
                break
        return best


def sizes_to_try(config: TrainConfig, sides: tuple[int, int]) -> Sizes:
    """Return the sizes for a run: a factor of √2 apart, none larger than the validation photos.

    Args:
        config: the settings of the run.
        sides: the 90th percentile and the maximum of the longer sides of the validation photos.
    """
    usual, largest = sides
    if _on_cpu(config):
        usual, largest = min(usual, ORIGINAL_SIDE), min(largest, ORIGINAL_SIDE)
    if config.val_max_side is None:
        return Sizes(largest if largest < sides[1] else 0)
    start, crop = min(config.val_max_side, largest), config.crops.size
    step = size_step(config.backbone)
    larger = _ladder(start, SIZE_FACTOR, min(usual, MOST_CROPS * crop), step)
    return Sizes(start, [*larger], [*_ladder(min(start, usual), 1 / SIZE_FACTOR, crop, step)])


def _on_cpu(config: TrainConfig) -> bool:
    return config.device.startswith("cpu")


def size_step(backbone: str) -> int:
    """Return 32, or the side of the patches of a transformer if 32 is not a multiple of it."""
    patch = patch_side(backbone)
    return 32 if patch is None or 32 % patch == 0 else patch


def _ladder(start: int, factor: float, limit: int, step: int) -> Iterator[int]:
    """Yield multiples of `step`, each about `factor` times the one before, and then the limit."""
    bounded, size, last = (min if factor > 1 else max), float(start), start
    while True:
        size *= factor
        now = bounded(limit, step * max(1, round(size / step)))
        if math.log(now / last, factor) < 0.25:  # too close to the one before
            return
        yield now
        last = now


def size_text(chosen: int, maps: Mapping[int, float], largest: int) -> str:
    """Describe the chosen size, from the mAP by size and the longest side of validation photos."""
    if chosen == 0:
        return (
            "photos are used at their original size; the validation photos have long sides of up "
            f"to {largest} pixels"
        )
    if len(maps) == 1:
        return f"photos are used with long sides of up to {chosen} pixels, as in validation"
    values = ", ".join(
        f"{100 * value:.1f} at {size}" for size, value in sorted(maps.items()) if value
    )
    return f"photo size chosen on validation: {chosen} (mAP {values})"


@dataclass(frozen=True)
class TrainPlan:
    """The photos and settings of a training run, as `prepare` returns them.

    Attributes:
        data: the path or name that the photos were read from.
        train: the training photos.
        validation: the validation photos, of other classes.
        config: all settings.
        reasons: for each setting that was chosen automatically, the reason.
        notes: sentences to show to the user, for example about photos that cannot be read.
        parts: the objects given as settings; `config` has their names.
        decoded_bytes: the memory that all photos would take if they were decoded.
        speed: the speed of this machine, if it was measured for the setting `minutes`.
        spent: the seconds that the preparation took.
        val_sides: the 90th percentile and the maximum of the longer sides of the validation photos.
    """

    data: Path
    train: LabelledImages
    validation: LabelledImages
    config: TrainConfig
    reasons: dict[str, str]
    notes: list[str]
    parts: OwnParts = field(default_factory=OwnParts)
    decoded_bytes: int = 0
    speed: Speed | None = None
    spent: float = 0.0
    val_sides: tuple[int, int] = (0, 0)

    @property
    def sizes(self) -> Sizes:
        """The photo size of the validations, and those to try after training."""
        return sizes_to_try(self.config, self.val_sides)

    @property
    def val_max_side(self) -> int | None:
        """The long side that photos are reduced to in validation; None for their original size."""
        side = self.config.val_max_side
        return min(side or ORIGINAL_SIDE, ORIGINAL_SIDE) if _on_cpu(self.config) else side

    def fingerprint(self) -> str:
        """Return a digest of the names, labels, boxes and validation split of the photos."""
        digest = hashlib.sha256()
        for part in (self.train, self.validation):
            for i, (name, label) in enumerate(zip(part.ids, part.labels, strict=True)):
                digest.update(f"{name}\t{part.class_names[label]}\t{part.box(i)}\n".encode())
            digest.update(b"\n")
        return digest.hexdigest()


class _Choices:
    """The settings of a run; those that the user did not give are chosen, each with a reason."""

    def __init__(self, given: TrainConfig) -> None:
        self.config = given
        self.reasons: dict[str, str] = {}

    def choose(self, name: str, value: Any, reason: str) -> Any:
        """Return the user's value of a setting; if there is none, choose this value."""
        group, _, last = name.rpartition(".")
        holder: BaseModel = getattr(self.config, group) if group else self.config
        if last in holder.model_fields_set:
            return getattr(holder, last)
        changed = holder.model_copy(update={last: value})
        self.config = (
            self.config.model_copy(update={group: changed}) if group else cast(TrainConfig, changed)
        )
        self.reasons[name] = reason
        return value


def choose_settings(
    given: TrainConfig, images: LabelledImages, sizes: npt.NDArray[np.int64], machine: Machine
) -> tuple[TrainConfig, dict[str, str]]:
    """Choose every setting that the user did not give, to suit the photos and the machine.

    Args:
        given: the settings that the user gave; these are the set fields.
        images: the training photos.
        sizes: [n, 2] widths and heights of a sample of the photos.
        machine: the machine to train on.

    Returns:
        All settings, and the reason for each one that was chosen here.
    """
    choices = _Choices(given)
    gpu = machine.device.startswith("cuda")
    if not gpu:
        reason = "no GPU is available, so the network is small; the paper uses resnet101"
        choices.choose("backbone", SMALL_BACKBONE, reason)
    crop = _choose_crop(choices, sizes, gpu)
    _choose_schedule(choices, images, gpu)
    reason = "twice the crop size; after training, other sizes are tried"
    choices.choose("val_max_side", 2 * crop, reason)
    if gpu and machine.bfloat16:
        choices.choose(
            "precision", "bfloat16", "this GPU computes several times faster in bfloat16"
        )
    choices.choose("device", machine.device, "a GPU is available" if gpu else "no GPU is available")
    choices.choose("workers", machine.workers(), f"{machine.cores} cores")
    return choices.config, choices.reasons


def _choose_crop(choices: _Choices, sizes: npt.NDArray[np.int64], gpu: bool) -> int:
    """Choose the side of the crops, and return it."""
    short = int(np.median(sizes.min(axis=1)))
    limit = CropSettings().size if gpu else 224
    reason = f"half of the photos have a short side of {short} or more"
    if short > limit:
        reason += f"; at most {limit} {_LIMITED[gpu]}"
    step = size_step(choices.config.backbone)
    if step != 32:
        reason += f"; a multiple of the patches of {step} pixels"
    largest = min(limit, short) // step * step
    side: int = choices.choose("crops.size", max(-(-64 // step) * step, largest), reason)
    return side


def _choose_schedule(choices: _Choices, images: LabelledImages, gpu: bool) -> None:
    """Choose batch size, number of updates, learning rate, and when to validate and stop."""
    given, count = choices.config, len(images)
    if given.adapter:  # its updates need no network, so they are cheap
        limit = TrainConfig().batch_size if gpu else 1024
        reason = f"all {count} training photos"
        if count > limit:
            reason = f"at most {limit} {_LIMITED[gpu]}"
        choices.choose("batch_size", min(limit, count), reason)
        updates = choices.choose("updates", 60, "enough for a linear layer")
        reason = "a linear layer learns with a higher rate than a network"
        choices.choose("learning_rate", 3e-4, reason)
    else:
        batch, most = given.images_per_update, ""
        if not given.mined:
            batch, most = min(_choose_batch(choices, images, gpu), count), " and at most 200"
        updates = choices.choose(
            "updates",
            int(np.clip(math.ceil(PASSES * count / batch), 30, 200 if most else None)),
            f"each photo is seen about {PASSES} times, in at least 30 updates{most}",
        )
        choices.choose(
            "learning_rate",
            float(f"{1e-4 * min(1.0, math.sqrt(batch / 1024)):.2g}"),
            "1e-4 for batches of 1024 or more; less for smaller ones, whose gradients are noisier",
        )
    choices.choose("warmup", min(5, updates // 10), "Adam's first updates are the least reliable")
    every = choices.choose("validate_every", max(1, updates // 15), "about 15 validations per run")
    choices.choose("patience", 5, f"stop after {5 * every} updates without a better validation")


def _choose_batch(choices: _Choices, images: LabelledImages, gpu: bool) -> int:
    """Choose the batch size and whether classes are weighted, and return the batch size.

    Class weights change little unless classes differ much in size. This was measured for whole
    networks; an adapter keeps class weights, and the loss of a teacher has none.
    """
    count, limit = len(images), TrainConfig().batch_size if gpu else 256
    # Two or more batches per pass over the photos, so that batches differ.
    wanted, reason = count, f"all {count} training photos"
    if count >= 64:
        wanted = min(limit, count // 2)
        reason = f"half of the {count} training photos, at most {limit} {_LIMITED[gpu]}"
    batch: int = choices.choose("batch_size", wanted, reason)
    sizes = images.class_sizes()
    least, most = int(sizes.min()), int(sizes.max())
    if most > UNEVEN * least and not choices.config.teacher:
        reason = f"classes have {least} to {most} photos, and validation counts every photo equally"
        choices.choose("class_weights", False, reason)
    return batch
