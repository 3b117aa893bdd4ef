"""Settings for people who gave none: from the data and the machine, each with its reason."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from listwise.data import LabelledImages
from listwise.machine import Machine
from listwise.models.choice import SMALL_BACKBONE
from listwise.settings import CropSettings, TrainConfig, make_config, merge

PASSES = 10  # times each photo is seen; small sets overfit beyond


def choose_settings(
    given: dict[str, Any],
    images: LabelledImages,
    sizes: npt.NDArray[np.int64],
    machine: Machine,
) -> tuple[TrainConfig, dict[str, str]]:
    """Fill up what the user gave with settings that suit the training images and the machine.

    Args:
        given: settings the user named; they stand.
        images: the training images.
        sizes: [n, 2] widths and heights of photos like them.
        machine: what there is to compute with.

    Returns:
        The config, and for each setting chosen here the reason.
    """
    gpu = machine.device.startswith("cuda")
    chosen: dict[str, Any] = {}
    reasons: dict[str, str] = {}

    def choose(name: str, value: Any, reason: str) -> Any:
        """Take the user's value if there is one, else this one."""
        inner = given
        *path, last = name.split(".")
        for part in path:
            inner = inner.get(part, {})
        if last in inner:
            return inner[last]
        target = chosen
        for part in path:
            target = target.setdefault(part, {})
        target[last] = value
        reasons[name] = reason
        return value

    if not gpu:
        choose("backbone", SMALL_BACKBONE, "no GPU here: a small network; resnet101 is the paper's")

    with_what = "as in the paper" if gpu else "without a GPU"
    short = int(np.median(sizes.min(axis=1)))
    limit = CropSettings().size if gpu else 224
    crop = choose(
        "crops.size",
        max(64, min(limit, short // 32 * 32)),
        f"half of the photos have a short side of {short} or more"
        + (f"; at most {limit} {with_what}" if short > limit else ""),
    )

    count = len(images)
    asked = make_config(given, "the settings")
    if asked.mined:
        batch, most = asked.images_per_update, ""
    else:
        limit = TrainConfig().batch_size if gpu else 256
        # With at least two batches to a pass, batches differ.
        batch = choose(
            "batch_size",
            min(limit, count // 2 if count >= 64 else count),
            f"{count} training photos; half of them in a batch, at most {limit} {with_what}"
            if count >= 64
            else f"all {count} training photos",
        )
        batch, most = min(batch, count), " and 200 at most"
    updates = choose(
        "updates",
        int(np.clip(math.ceil(PASSES * count / batch), 30, 200 if most else None)),
        f"each photo about {PASSES} times, 30 updates at least{most}",
    )
    choose(
        "learning_rate",
        float(f"{1e-4 * min(1.0, math.sqrt(batch / 1024)):.2g}"),
        "1e-4 from batches of 1024 up, less for smaller ones, whose gradients are noisier",
    )
    choose("warmup", min(5, updates // 10), "Adam's first steps are its least certain")
    every = choose("validate_every", max(1, updates // 15), "some 15 validations in a run")
    choose("patience", 5, f"stop after {5 * every} updates without a better validation")
    choose(
        "val_max_side", 2 * crop, "validation photos up to twice the crop, near what they are used"
    )
    if gpu and machine.bfloat16:
        choose("precision", "bfloat16", "this GPU computes it several times faster")
    choose("device", machine.device, "a GPU is here" if gpu else "no GPU is here")
    choose("workers", machine.workers(), f"{machine.cores} cores")
    return make_config(merge(chosen, given), "the settings"), reasons
