"""Choose settings with which a run ends within the minutes that the user gave."""

import math
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from listwise.data import LabelledImages
from listwise.errors import InputError
from listwise.settings import TrainConfig, merge
from listwise.training.distributed import world
from listwise.training.duration import (
    PLANNED_PART,
    Effort,
    Speed,
    Trial,
    between,
    effort_of,
    efforts,
    fit_effort,
    reductions,
    run_seconds,
    workload_of,
)
from listwise.training.run.view import readable_time

# Photos that the teacher describes in a trial.
TEACHER_PHOTOS = 8
# The setting of each field of an `Effort`.
SETTINGS = {
    "updates": "updates",
    "crop": "crops.size",
    "batch": "batch_size",
    "validate_every": "validate_every",
}


class Choice(NamedTuple):
    """All settings, the reason for each chosen one, and notes for the user."""

    config: TrainConfig
    reasons: dict[str, str]
    notes: list[str]


class TimedChoice(NamedTuple):
    """A `Choice` that ends within the time, and the measured speed of this machine."""

    config: TrainConfig
    reasons: dict[str, str]
    notes: list[str]
    speed: Speed


def within_minutes(
    config: TrainConfig,
    given: dict[str, Any],
    choose: Callable[[dict[str, Any]], Choice],
    parts: dict[str, Any],
    train: LabelledImages,
    validation: LabelledImages,
    spent: float,
) -> TimedChoice | None:
    """Choose settings with which the run takes at most `config.minutes`.

    Args:
        config: all settings, as chosen without a limit.
        given: the settings that the user gave; they are never changed.
        choose: returns all settings if these are given.
        parts: the objects that were given as backbone, pooling, loss or teacher.
        train: the training photos.
        validation: the validation photos.
        spent: the seconds that have passed already.

    Returns:
        The settings; None if the user gave all settings that could be changed.

    Raises:
        InputError: the shortest run takes longer, or there are several processes.
    """
    assert config.minutes is not None
    if world()[1] > 1:
        raise InputError("`minutes` works in a single process: give `updates` instead")
    fixed = _fixed(config, given)
    if {"updates", "crop", "batch"} <= fixed:
        return None
    if config.compile == "auto":  # compiling takes a minute or two, which no trial measures
        given = given | {"compile": "no"}
    default, work = effort_of(config), workload_of(config, parts, len(train), len(validation))
    trial = Trial.of_settings(config, parts, train, validation)
    large = small = trial.measure(config)
    if "teacher" in parts:  # it describes all photos, and then the network those for training
        spent += _teacher_seconds(parts["teacher"], train, len(train) + len(validation))
        spent += large.photo * len(train)
    limit = PLANNED_PART * (60 * config.minutes - spent)

    def seconds_of(effort: Effort) -> float:
        return run_seconds(effort, between(large, small, effort.crop), work)

    chosen = default if seconds_of(default) <= limit else None
    *_, least = efforts(default, fixed)
    if chosen is None:
        if least.crop < default.crop:
            small = trial.measure(choose(merge(given, _settings(least))).config)
        chosen = fit_effort(default, fixed, limit, seconds_of)
    if chosen is None:
        needed = math.ceil((seconds_of(least) / PLANNED_PART + spent) / 60)
        raise InputError(
            f"the shortest training of these photos on this machine takes about {needed} min: "
            f"give `minutes` {needed} or more"
            + ("" if parts.get("backbone") else ", or a smaller `backbone`")
        )
    found = choose(merge(given, _settings(chosen)) if chosen != default else given)
    reasons = dict(found.reasons)
    for field, name in SETTINGS.items():
        before, now = getattr(default, field), getattr(chosen, field)
        if before != now:
            reasons[name] = f"to end within {config.minutes:g} min; {before} without this limit"
    note = _note(config.minutes, default, chosen, seconds_of(chosen))
    speed = between(large, small, chosen.crop)
    return TimedChoice(found.config, reasons, [*found.notes, note], speed)


def _teacher_seconds(teacher: Any, train: LabelledImages, photos: int) -> float:
    """Estimate the seconds in which a teacher describes photos, from a few training photos."""
    count = min(TEACHER_PHOTOS + 1, len(train))
    sample = train.subset(np.linspace(0, len(train) - 1, count).astype(int))
    teacher.describe(sample.subset([0]), on_progress=lambda done: None)  # prepares the network
    started = perf_counter()
    teacher.describe(sample.subset(range(1, count)), on_progress=lambda done: None)
    return (perf_counter() - started) / (count - 1) * photos


def _fixed(config: TrainConfig, given: dict[str, Any]) -> frozenset[str]:
    """Return the fields of an `Effort` that the user gave, or that mined tuples determine."""
    fixed = {"batch"} if config.mined else set[str]()
    for field, name in SETTINGS.items():
        group, _, last = name.rpartition(".")
        if last in (given.get(group, {}) if group else given):
            fixed.add(field)
    return frozenset(fixed)


def _settings(effort: Effort) -> dict[str, Any]:
    return {
        "updates": effort.updates,
        "batch_size": effort.batch,
        "validate_every": effort.validate_every,
        "crops": {"size": effort.crop},
    }


def _note(minutes: float, default: Effort, chosen: Effort, seconds: float) -> str:
    less = reductions(default, chosen)
    if not less:
        needed = readable_time(seconds)
        return f"the run takes about {needed} of the {minutes:g} min: nothing is reduced"
    return f"to end within {minutes:g} min: {', '.join(less)}"
