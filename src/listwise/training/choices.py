"""Choose the settings that the user did not give, from the data and the machine."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from listwise.data import LabelledImages
from listwise.machine import Machine
from listwise.models.backbone import SMALL_BACKBONE, patch_side
from listwise.settings import CropSettings, TrainConfig, make_config, merge

PASSES = 10  # times each photo is seen; with more, small data sets overfit
UNEVEN = 2  # ratio of the sizes of the largest and the smallest class
_LIMITED = {True: "as in the paper", False: "without a GPU"}


class _Choices:
    """The settings that the user gave, and the chosen ones, each with its reason."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.chosen: dict[str, Any] = {}
        self.reasons: dict[str, str] = {}

    def choose(self, name: str, value: Any, reason: str) -> Any:
        """Return the user's value of a setting; if there is none, choose this value."""
        inner, target = self.given, self.chosen
        *path, last = name.split(".")
        for part in path:
            inner = inner.get(part, {})
        if last in inner:
            return inner[last]
        for part in path:
            target = target.setdefault(part, {})
        target[last] = value
        self.reasons[name] = reason
        return value


def choose_settings(
    given: dict[str, Any], images: LabelledImages, sizes: npt.NDArray[np.int64], machine: Machine
) -> tuple[TrainConfig, dict[str, str]]:
    """Choose every setting that the user did not give, to suit the photos and the machine.

    Args:
        given: the settings that the user gave.
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
    choices.choose(
        "val_max_side", 2 * crop, "twice the crop size, which is close to the size in search"
    )
    if gpu and machine.bfloat16:
        choices.choose(
            "precision", "bfloat16", "this GPU computes several times faster in bfloat16"
        )
    choices.choose("device", machine.device, "a GPU is available" if gpu else "no GPU is available")
    choices.choose("workers", machine.workers(), f"{machine.cores} cores")
    return make_config(merge(choices.chosen, given)), choices.reasons


def _choose_crop(choices: _Choices, sizes: npt.NDArray[np.int64], gpu: bool) -> int:
    """Choose the side of the crops, and return it."""
    short = int(np.median(sizes.min(axis=1)))
    limit = CropSettings().size if gpu else 224
    reason = f"half of the photos have a short side of {short} or more"
    if short > limit:
        reason += f"; at most {limit} {_LIMITED[gpu]}"
    step = 32
    patch = patch_side(str(choices.given.get("backbone", "")))
    if patch is not None and step % patch:
        step = patch
        reason += f"; a multiple of the patches of {patch} pixels"
    largest = min(limit, short) // step * step
    side: int = choices.choose("crops.size", max(-(-64 // step) * step, largest), reason)
    return side


def _choose_schedule(choices: _Choices, images: LabelledImages, gpu: bool) -> None:
    """Choose batch size, number of updates, learning rate, and when to validate and stop."""
    given = make_config(choices.given)
    count = len(images)
    if given.adapter:
        _choose_adapter_schedule(choices, count, gpu)
        return
    if given.mined:
        batch, most = given.images_per_update, ""
    else:
        limit = TrainConfig().batch_size if gpu else 256
        # Two or more batches per pass over the photos, so that batches differ.
        wanted, reason = count, f"all {count} training photos"
        if count >= 64:
            wanted = min(limit, count // 2)
            reason = f"half of the {count} training photos, at most {limit} {_LIMITED[gpu]}"
        batch, most = min(choices.choose("batch_size", wanted, reason), count), " and at most 200"
        if not given.teacher:  # whose loss has no weights
            _choose_weights(choices, images)
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


def _choose_weights(choices: _Choices, images: LabelledImages) -> None:
    """Turn class weights off if classes differ much in size; otherwise they change little.

    This was measured for whole networks. An adapter keeps class weights.
    """
    sizes = images.class_sizes()
    least, most = int(sizes.min()), int(sizes.max())
    if most > UNEVEN * least:
        reason = f"classes have {least} to {most} photos, and validation counts every photo equally"
        choices.choose("class_weights", False, reason)


def _choose_adapter_schedule(choices: _Choices, count: int, gpu: bool) -> None:
    """Choose the schedule of a linear layer: its updates need no network, so they are cheap."""
    limit = TrainConfig().batch_size if gpu else 1024
    reason = f"all {count} training photos"
    if count > limit:
        reason = f"at most {limit} {_LIMITED[gpu]}"
    choices.choose("batch_size", min(limit, count), reason)
    updates = choices.choose("updates", 60, "enough for a linear layer")
    choices.choose("learning_rate", 3e-4, "a linear layer learns with a higher rate than a network")
    choices.choose("warmup", min(5, updates // 10), "Adam's first updates are the least reliable")
    every = choices.choose("validate_every", max(1, updates // 15), "about 15 validations per run")
    choices.choose("patience", 5, f"stop after {5 * every} updates without a better validation")
