"""The runs of a study before they are made: what they share, and whether they can be made."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from listwise.errors import InputError
from listwise.settings import TrainConfig, make_config, merge, read_settings
from listwise.studies.definitions import SCHEDULE, Study, TrainingSet, Variant
from listwise.studies.outcome import read_study_json
from listwise.training import TrainPlan, prepare
from listwise.training.choices import PASSES
from listwise.training.plan import within
from listwise.training.run.folder import CONFIG_FILE, RUN_FILE, read_run
from listwise.training.sampling import Indices, draw_batch

# What a run may be resumed with on another machine.
MACHINE = {"device", "workers", "micro_batch"}
STUDY_FILE = "study.json"

# Found by trial: the toy landmarks on two cores, a study in some five minutes.
SMALL: dict[str, Any] = {
    "backbone": "tf_efficientnet_lite0",
    "weights": "imagenet-package",
    "batch_size": 192,
    "learning_rate": 3e-4,
    "val_max_side": 96,
    "crops": {"size": 64, "min_area": 0.4, "rotation": 8.0},
}
SMALL_IMAGES, SMALL_SEEDS, SMALL_VALIDATIONS = 3072, 2, 4


@dataclass(frozen=True, eq=False)
class StudyPlan:
    """All runs of a study, before they are made; `plan` has the photos and the shared settings.

    Each run sees `images` training images and validates `validations` times, at most. Of the
    learning `rates`, each variant keeps the best of its first seed.
    """

    study: Study
    plan: TrainPlan
    variants: list[Variant]
    out: Path
    images: int
    seeds: int
    rates: tuple[float, ...]
    validations: int

    @property
    def count(self) -> int:
        """How many runs there are."""
        return len(self.variants) * (self.seeds + len(self.rates) - 1)

    def config(self, variant: Variant, seed: int, rate: float) -> TrainConfig:
        """The settings of a run: the shared ones, the variant's, and a schedule of equal images."""
        config, _ = within(self._asked(variant, seed, rate), self.plan.train)
        updates = updates_within(self.images, config, self.plan.train.labels)
        if updates == 0:
            raise InputError(
                f"{self.images} images are less than one update of {variant.name}, which takes "
                f"{config.images_per_update}: give more `images`, or other `variants`"
            )
        every = math.ceil(updates / self.validations)
        schedule = {
            "updates": updates,
            "warmup": updates // 10,
            "validate_every": every,
            "checkpoint_every": every,
        }
        return config.model_copy(update=schedule)

    def notes(self, variant: Variant) -> list[str]:
        """What of a variant's settings is more than the photos allow, and was changed."""
        return within(self._asked(variant, 0, self.rates[0]), self.plan.train)[1]

    def _asked(self, variant: Variant, seed: int, rate: float) -> TrainConfig:
        given = {"seed": seed, "learning_rate": rate, "patience": None}
        asked = merge(self.plan.config.model_dump(), variant.settings, given)
        return make_config(asked)

    def folder(self, variant: Variant, seed: int, rate: float) -> Path:
        """Where a run is made."""
        return self.out / "runs" / variant.name / f"rate-{rate:g}" / f"seed-{seed}"


def plan_study(
    study: Study,
    data: str | Path,
    out: str | Path,
    given: dict[str, Any],
    *,
    preset: Literal["auto", "paper", "small"] = "auto",
    variants: Sequence[str] | None = None,
    images: int | None = None,
    seeds: int | None = None,
    rates: Sequence[float] = (),
    validations: int | None = None,
) -> StudyPlan:
    """Read the photos, choose what all runs share, and check the settings of every run.

    `data` and `preset` are those of `listwise.training.prepare`; the preset small is for two cores.
    By default the study's usual variants are compared, each run sees ten times the photos (small:
    3072 images) and validates 10 times (small: 4), and there are 3 seeds (small: 2).
    """
    for name in (*study.varies, *SCHEDULE):
        if _has(given, name):
            raise InputError(
                f"`{name}` cannot be given: a study sets it for each run, so that runs differ in "
                "one thing alone"
            )
    if rates and "learning_rate" in given:
        raise InputError("`learning_rate` and `rates` cannot be given together")
    own = {*study.varies, *SCHEDULE, *(["learning_rate"] if rates else [])}
    if preset == "small":
        given = merge({key: value for key, value in SMALL.items() if key not in own}, given)
        images, seeds = images or SMALL_IMAGES, seeds or SMALL_SEEDS
        validations = validations or SMALL_VALIDATIONS
    plan = prepare(data, given, "paper" if preset == "paper" else "auto")
    reasons = {name: reason for name, reason in plan.reasons.items() if name not in own}
    plan = replace(plan, reasons=reasons)
    photos = TrainingSet(len(plan.train), len(plan.train.class_names))
    made = StudyPlan(
        study,
        plan,
        study.variants(variants, photos),
        Path(out),
        PASSES * photos.photos if images is None else images,
        seeds or 3,
        tuple(dict.fromkeys(rates)) or (plan.config.learning_rate,),
        validations or 10,
    )
    _check_study(made)
    for variant in made.variants:
        for seed, rate in product(range(made.seeds), made.rates):
            _check_run(made, variant, seed, rate)
        plan.notes.extend(made.notes(variant))
    return made


def updates_within(images: int, config: TrainConfig, labels: Indices) -> int:
    """How many updates see no more than so many images."""
    if config.mined is not None or config.classes_per_batch is None:
        return images // config.images_per_update
    # Few classes may not fill a batch: what is really drawn counts.
    seen = updates = 0
    size, few = config.batch_size, config.classes_per_batch
    while (seen := seen + len(draw_batch(labels, size, config.seed, updates, few))) <= images:
        updates += 1
    return updates


def _has(settings: dict[str, Any], name: str) -> bool:
    first, _, rest = name.partition(".")
    return first in settings and (not rest or _has(settings[first], rest))


def _check_study(made: StudyPlan) -> None:
    """Refuse a folder of another study: its tables would be replaced."""
    if made.out.exists() and not made.out.is_dir():
        raise InputError(f"{made.out} is a file: give a folder as `out`")
    path = made.out / STUDY_FILE
    if path.exists():
        name = read_study_json(path).get("study")
        if name is None:
            raise InputError(f"{path} was not written by a study: remove it")
        if name != made.study.name:
            raise InputError(f"{made.out} holds the study {name}: give another `out`")


def _check_run(made: StudyPlan, variant: Variant, seed: int, rate: float) -> None:
    """Refuse to mix runs of other settings or photos with those planned."""
    wanted = made.config(variant, seed, rate).model_dump(exclude=MACHINE)
    folder = made.folder(variant, seed, rate)
    if not (folder / RUN_FILE).exists():
        return
    found = make_config(read_settings(folder / CONFIG_FILE), str(folder / CONFIG_FILE))
    there = found.model_dump(exclude=MACHINE)
    other = [name for name in wanted if wanted[name] != there[name]]
    if other:
        name = other[0]
        raise InputError(
            f"{folder} is a run with other settings ({name} {there[name]}, now {wanted[name]}): "
            "run the same command again to resume it, or give another `out`"
        )
    if read_run(folder)["data_fingerprint"] != made.plan.fingerprint():
        raise InputError(f"{folder} is a run on other photos or labels: give another `out`")
