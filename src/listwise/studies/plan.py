"""The plan of a study: its runs, their settings and checks before training; their outcomes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field

from listwise.errors import InputError
from listwise.files import FileHeader, read_json
from listwise.settings import TrainConfig, make_config, merge, read_settings
from listwise.studies.definitions import SCHEDULE, Study, TrainingSet, Variant
from listwise.training import TrainPlan, prepare
from listwise.training.choices import PASSES
from listwise.training.plan import limit_to_data
from listwise.training.run import CONFIG_FILE, RUN_FILE, read_run
from listwise.training.sampling import Indices, draw_batch

# Settings that may differ when a run is resumed, for example on another machine.
MACHINE = {"device", "workers", "micro_batch"}
STUDY_FILE = "study.json"
OUTCOME_FILE = "outcome.json"

# Chosen by trial: a study of the toy landmarks takes about five minutes on two cores.
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
    """The runs of a study.

    Attributes:
        study: the definition of the study.
        plan: photos and shared settings.
        variants: variants to compare.
        out: folder of the study.
        images: maximum number of training images per run, of a variant with effort 1.
        seeds: number of seeds.
        rates: learning rates; each variant keeps the one that is best with its first seed.
        validations: maximum number of validations per run.
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
        """Number of runs."""
        return len(self.variants) * (self.seeds + len(self.rates) - 1)

    def config(self, variant: Variant, seed: int, rate: float) -> TrainConfig:
        """Return the settings of a run, with a schedule that sees `images` training images."""
        config, _ = limit_to_data(self._requested_config(variant, seed, rate), self.plan.train)
        images = round(self.images * variant.effort)
        updates = updates_within(images, config, self.plan.train.labels)
        if updates == 0:
            raise InputError(
                f"{images} images are fewer than one update of {variant.name}, which has "
                f"{config.images_per_update} images: give more `images`, or other `variants`"
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
        """Return notes about settings of a variant that were reduced to fit the photos."""
        return limit_to_data(self._requested_config(variant, 0, self.rates[0]), self.plan.train)[1]

    def _requested_config(self, variant: Variant, seed: int, rate: float) -> TrainConfig:
        given = {"seed": seed, "learning_rate": rate, "patience": None}
        return make_config(merge(self.plan.config.model_dump(), variant.settings, given))

    def folder(self, variant: Variant, seed: int, rate: float) -> Path:
        """Return the folder of a run."""
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

    Args:
        study: the study, one of `STUDIES`.
        data: labelled photos, as in `listwise.training.prepare`.
        out: folder of the study.
        given: settings that all runs share.
        preset: source of the settings that you do not give: auto chooses them for the photos and
            the machine, paper uses the values of the paper, small suits two CPU cores.
        variants: names of the variants to compare; by default those of the study.
        images: number of training images per run; by default ten times the number of photos, or
            3072 with the preset small.
        seeds: number of runs per variant, each with a different seed; by default 3, or 2 with the
            preset small.
        rates: learning rates to try; each variant uses the one with the best validation mAP of its
            first run.
        validations: maximum number of validations per run; by default 10, or 4 with the preset
            small.
    """
    for name in (*study.varies, *SCHEDULE):
        if _has(given, name):
            raise InputError(
                f"`{name}` cannot be given: the study chooses it for each run, so that runs differ "
                "in one setting only"
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
    photos = TrainingSet(len(plan.train), len(plan.train.class_names), plan.config.batch_size)
    study_plan = StudyPlan(
        study,
        plan,
        study.variants(variants, photos),
        Path(out),
        PASSES * photos.photos if images is None else images,
        seeds or 3,
        tuple(dict.fromkeys(rates)) or (plan.config.learning_rate,),
        validations or 10,
    )
    check_folder(study_plan.out, study.name)
    for variant in study_plan.variants:
        for seed, rate in product(range(study_plan.seeds), study_plan.rates):
            config = study_plan.config(variant, seed, rate)
            check_run(study_plan.folder(variant, seed, rate), config, plan)
        plan.notes.extend(study_plan.notes(variant))
    return study_plan


def updates_within(images: int, config: TrainConfig, labels: Indices) -> int:
    """Return the largest number of updates that see at most `images` images."""
    if config.mined is not None or config.classes_per_batch is None:
        return images // config.images_per_update
    # Few classes may not fill a batch, so count the images that are drawn.
    seen = updates = 0
    size, few = config.batch_size, config.classes_per_batch
    while (seen := seen + len(draw_batch(labels, size, config.seed, updates, few))) <= images:
        updates += 1
    return updates


def _has(settings: dict[str, Any], name: str) -> bool:
    first, _, rest = name.partition(".")
    return first in settings and (not rest or _has(settings[first], rest))


def check_folder(out: Path, study: str) -> None:
    """Raise an error if the folder holds another study, whose tables would be replaced."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file: give a folder as `out`")
    path = out / STUDY_FILE
    if path.exists():
        name = read_study_json(path).get("study")
        if name is None:
            raise InputError(f"{path} was not written by a study: remove it")
        if name != study:
            raise InputError(f"{out} holds the study {name}: give another `out`")


def check_run(folder: Path, config: TrainConfig, plan: TrainPlan) -> None:
    """Raise an error if the folder holds a run with other settings or photos."""
    if not (folder / RUN_FILE).exists():
        return
    wanted = config.model_dump(exclude=MACHINE)
    found = make_config(read_settings(folder / CONFIG_FILE), str(folder / CONFIG_FILE))
    there = found.model_dump(exclude=MACHINE)
    other = [name for name in wanted if wanted[name] != there[name]]
    if other:
        name = other[0]
        raise InputError(
            f"{folder} is a run with other settings ({name} {there[name]}, now {wanted[name]}): "
            "give the same settings to resume it, or give another `out`"
        )
    if read_run(folder)["data_fingerprint"] != plan.fingerprint():
        raise InputError(f"{folder} is a run on other photos or labels: give another `out`")


class Outcome(FileHeader):
    """The outcome of a training run; mAP values are from 0 to 1.

    Attributes:
        variant: name of the variant.
        value: number of the variant on the axis of the study.
        seed: seed of the run.
        learning_rate: learning rate of the run.
        validation_map: best validation mAP.
        untrained_map: validation mAP before the first update.
        best_update: update of the best validation mAP.
        updates: number of updates.
        backwards: number of images with a gradient.
        forwards: number of images that went through the network.
        hyper_parameters: number of settings of the loss, its batches and its mining.
        seconds: duration of the run.
        kept: False if another learning rate was better in validation, which depends on other runs.
        judged: mAP of the best network on the benchmark, such as "Medium whitened", from its own
            file.
    """

    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="constants")

    variant: str
    value: int | None
    seed: int
    learning_rate: float
    validation_map: float
    untrained_map: float
    best_update: int
    updates: int
    backwards: int
    forwards: int
    hyper_parameters: int
    seconds: float
    kept: bool = True
    judged: dict[str, float] = Field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """Return the row of `results.csv`: names and values without nesting."""
        row = self.model_dump(exclude={"judged", *FileHeader.model_fields})
        return row | {column_name(name): value for name, value in self.judged.items()}


@dataclass
class StudyResults:
    """All results so far: the finished runs, and the untrained network on the benchmark."""

    outcomes: list[Outcome] = field(default_factory=list)
    untrained: dict[str, float] = field(default_factory=dict)

    @property
    def untrained_map(self) -> float:
        """Mean over the runs of the validation mAP before the first update."""
        return sum(run.untrained_map for run in self.outcomes) / len(self.outcomes)

    def kept(self, variant: str) -> list[Outcome]:
        """Return the runs of a variant with the chosen learning rate, by seed."""
        return [run for run in self.outcomes if run.kept and run.variant == variant]


def column_name(name: str) -> str:
    """Return the column of a benchmark result in `results.csv`."""
    return f"{name.lower().replace(' ', '_')}_map"


def read_outcome(run: Path) -> Outcome | None:
    """Read the outcome of a run; None if the run is not finished."""
    path = run / OUTCOME_FILE
    if not path.exists():
        return None
    return Outcome.parse(path.read_bytes(), path, "remove it, or give another `out`")


def read_study_json(path: Path) -> dict[str, Any]:
    """Read a JSON object that a study wrote."""
    return read_json(path, "was not written by a study: remove it")
