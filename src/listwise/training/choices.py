"""Settings for people who gave none: from the data and the machine, each with its reason."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from listwise.data import LabelledImages
from listwise.machine import Machine
from listwise.models.backbone import SMALL_BACKBONE
from listwise.settings import CropSettings, TrainConfig, make_config, merge

PASSES = 10  # times each photo is seen; small sets overfit beyond
_LIMITED = {True: "as in the paper", False: "without a GPU"}


class _Choices:
    """Settings that the user gave, and those chosen beside them, each with its reason."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.chosen: dict[str, Any] = {}
        self.reasons: dict[str, str] = {}

    def choose(self, name: str, value: Any, reason: str) -> Any:
        """Take the user's value if there is one, else this one."""
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
    """Fill up what the user gave with settings that suit the training images and the machine.

    `sizes` [n, 2] are widths and heights of photos like them. Returns the config, and for each
    setting chosen here the reason.
    """
    choices = _Choices(given)
    gpu = machine.device.startswith("cuda")
    if not gpu:
        reason = "no GPU is available, so a small network; the paper uses resnet101"
        choices.choose("backbone", SMALL_BACKBONE, reason)
    crop = _choose_crop(choices, sizes, gpu)
    _choose_schedule(choices, len(images), gpu)
    choices.choose("val_max_side", 2 * crop, "twice the crop size, close to the size in search")
    if gpu and machine.bfloat16:
        choices.choose("precision", "bfloat16", "this GPU computes it several times faster")
    choices.choose("device", machine.device, "a GPU is available" if gpu else "no GPU is available")
    choices.choose("workers", machine.workers(), f"{machine.cores} cores")
    return make_config(merge(choices.chosen, given)), choices.reasons


def _choose_crop(choices: _Choices, sizes: npt.NDArray[np.int64], gpu: bool) -> int:
    """The side of the crops."""
    short = int(np.median(sizes.min(axis=1)))
    limit = CropSettings().size if gpu else 224
    reason = f"half of the photos have a short side of {short} or more"
    if short > limit:
        reason += f"; at most {limit} {_LIMITED[gpu]}"
    side: int = choices.choose("crops.size", max(64, min(limit, short // 32 * 32)), reason)
    return side


def _choose_schedule(choices: _Choices, count: int, gpu: bool) -> None:
    """The batch, the number of updates, the learning rate, and when to validate and stop."""
    given = make_config(choices.given)
    if given.mined:
        batch, most = given.images_per_update, ""
    else:
        limit = TrainConfig().batch_size if gpu else 256
        # With at least two batches to a pass, batches differ.
        wanted, reason = count, f"all {count} training photos"
        if count >= 64:
            wanted = min(limit, count // 2)
            reason = (
                f"{count} training photos; half of them in a batch, at most {limit} {_LIMITED[gpu]}"
            )
        batch, most = min(choices.choose("batch_size", wanted, reason), count), " and 200 at most"
    updates = choices.choose(
        "updates",
        int(np.clip(math.ceil(PASSES * count / batch), 30, 200 if most else None)),
        f"each photo about {PASSES} times, 30 updates at least{most}",
    )
    choices.choose(
        "learning_rate",
        float(f"{1e-4 * min(1.0, math.sqrt(batch / 1024)):.2g}"),
        "1e-4 from batches of 1024 up, less for smaller ones, whose gradients are noisier",
    )
    choices.choose("warmup", min(5, updates // 10), "Adam's first steps are its least certain")
    every = choices.choose("validate_every", max(1, updates // 15), "some 15 validations in a run")
    choices.choose("patience", 5, f"stop after {5 * every} updates without a better validation")
