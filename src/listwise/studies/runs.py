"""The engine of the studies: runs that differ in one thing, each of which is made once.

Each run is one of `listwise.training`, in `runs/VARIANT/rate-R/seed-K` of the study's folder. A
finished run has an `outcome.json` and is not made again; one that was interrupted goes on.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from listwise.descriptors import Model, load_model
from listwise.errors import InputError
from listwise.files import write_text
from listwise.models import RetrievalNet
from listwise.settings import TrainConfig, make_config, merge, read_settings
from listwise.studies.judged import Judging
from listwise.studies.losses import hyper_parameters
from listwise.studies.outcome import Findings, Outcome, read_json, read_outcome, write_outcome
from listwise.studies.variants import Study, TrainingSet, Variant
from listwise.studies.view import StudyView
from listwise.training import Trainer, TrainPlan, prepare
from listwise.training.choices import PASSES
from listwise.training.plan import within
from listwise.training.run.folder import (
    CHECKPOINT_FILE,
    CONFIG_FILE,
    MODEL_FOLDER,
    RUN_FILE,
    read_run,
)
from listwise.training.run.view import TrainView
from listwise.training.sampling import Indices, draw_batch

# In units of updates, of which variants have different numbers; or the study's own.
SCHEDULE = ("updates", "warmup", "validate_every", "patience", "checkpoint_every", "seed")
# What a run may go on with on another machine.
MACHINE = {"device", "workers", "micro_batch"}
STUDY_FILE = "study.json"


@dataclass(frozen=True, eq=False)
class StudyPlan:
    """All runs of a study, before they are made.

    Args:
        study: what varies.
        plan: photos and the settings that all runs share.
        variants: the things compared.
        out: folder of the study.
        images: training images that each run sees, at most.
        seeds: how many seeds, from 0.
        rates: learning rates, of which each variant keeps the best of its first seed.
        validations: how often each run validates, at most.
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
        return make_config(asked, f"{self.study.name}, variant {variant.name}")

    def folder(self, variant: Variant, seed: int, rate: float) -> Path:
        """Where a run is made."""
        return self.out / "runs" / variant.name / f"rate-{rate:g}" / f"seed-{seed}"


def plan_study(
    study: Study,
    data: str | Path,
    out: str | Path,
    given: dict[str, Any],
    *,
    preset: Literal["auto", "paper"] = "auto",
    words: Sequence[str] | None = None,
    images: int | None = None,
    seeds: int = 3,
    rates: Sequence[float] = (),
    validations: int = 10,
) -> StudyPlan:
    """Read the photos, settle what all runs share, and check every run's settings.

    Args:
        study: what varies.
        data: labelled photos, as for `listwise.training.prepare`.
        out: folder of the study.
        given: settings for all runs.
        preset: where the other settings come from, as for `prepare`.
        words: the variants; the study's usual ones by default.
        images: training images that each run sees; ten times the photos by default.
        seeds: how many seeds.
        rates: learning rates to try with each variant; only the settings' one by default.
        validations: of each run, at most.
    """
    for name in (*study.varies, *SCHEDULE):
        if _has(given, name):
            raise InputError(
                f"{name.replace('.', '-').replace('_', '-')} cannot be given: a study sets it for "
                "each run by itself, so that runs differ in one thing alone"
            )
    if rates and "learning_rate" in given:
        raise InputError("`learning_rate` and `rates` cannot be given together")
    plan = prepare(data, given, preset)
    own = {*study.varies, *SCHEDULE, *(["learning_rate"] if rates else [])}
    reasons = {name: reason for name, reason in plan.reasons.items() if name not in own}
    plan = replace(plan, reasons=reasons)
    photos = TrainingSet(len(plan.train), len(plan.train.class_names))
    made = StudyPlan(
        study,
        plan,
        study.variants(words, photos),
        Path(out),
        PASSES * photos.photos if images is None else images,
        seeds,
        tuple(dict.fromkeys(rates)) or (plan.config.learning_rate,),
        validations,
    )
    _check_study(made)
    for variant in made.variants:
        for seed in range(seeds):
            for rate in made.rates:
                _check_run(made, variant, seed, rate)
        plan.notes.extend(made.notes(variant))
    return made


def run_study(
    made: StudyPlan, view: StudyView | None = None, judging: Judging | None = None
) -> Findings:
    """Make the runs that are not finished yet, and give the outcomes of all.

    Of each variant's runs with the first seed, the learning rate that is best in validation goes on
    with the other seeds.

    Args:
        made: from `plan_study`.
        view: is told what happens, and each time there is a new outcome.
        judging: a benchmark to search with the network that was best in validation.
    """
    view = view or StudyView()
    made.out.mkdir(parents=True, exist_ok=True)
    write_text(made.out / STUDY_FILE, json.dumps({"study": made.study.name}) + "\n")
    findings = Findings(untrained=_judge_untrained(made, judging, view))
    number = 0
    best: dict[str, float] = {}
    for seed in range(made.seeds):
        for variant in made.variants:
            tried = [best[variant.name]] if seed else list(made.rates)
            runs = []
            for rate in tried:
                number += 1
                name = _name(made, variant, seed, rate)
                run = read_outcome(made.folder(variant, seed, rate))
                if run is None:
                    run = _train(made, variant, seed, rate, view.run(number, made.count, name))
                else:
                    view.skipped(number, made.count, name)
                runs.append(replace(run, kept=False))
                findings.outcomes.append(runs[-1])
                if rate != tried[-1]:
                    view.found(findings)
            winner = max(runs, key=lambda run: run.validation_map)
            best[variant.name] = winner.learning_rate
            place = findings.outcomes.index(winner)
            folder = made.folder(variant, seed, winner.learning_rate)
            judged = _judge(made, folder, winner, judging, view)
            findings.outcomes[place] = replace(winner, kept=True, judged=judged)
            view.found(findings)
    return findings


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


def _name(made: StudyPlan, variant: Variant, seed: int, rate: float) -> str:
    tried = f", learning rate {rate:g}" if len(made.rates) > 1 else ""
    return f"{variant.name}, seed {seed}{tried}"


def _check_study(made: StudyPlan) -> None:
    """Refuse a folder of another study: its tables would be replaced."""
    if made.out.exists() and not made.out.is_dir():
        raise InputError(f"{made.out} is a file: give a folder as `out`")
    path = made.out / STUDY_FILE
    if path.exists():
        name = read_json(path).get("study")
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
            "go on with the same command, or give another `out`"
        )
    if read_run(folder)["data_fingerprint"] != made.plan.fingerprint():
        raise InputError(f"{folder} is a run on other photos or labels: give another `out`")


def _train(made: StudyPlan, variant: Variant, seed: int, rate: float, view: TrainView) -> Outcome:
    folder = made.folder(variant, seed, rate)
    config = made.config(variant, seed, rate)
    begun = (folder / RUN_FILE).exists()
    trainer = Trainer(replace(made.plan, config=config), folder, view, resume=begun)
    result = trainer.fit()
    outcome = Outcome(
        variant=variant.name,
        value=variant.value,
        seed=seed,
        learning_rate=rate,
        validation_map=float(result.best_map),
        untrained_map=float(result.first_map),
        best_update=result.best_update,
        updates=result.updates,
        backwards=result.counts.backwards,
        forwards=result.counts.forwards,
        hyper_parameters=hyper_parameters(config),
        seconds=result.seconds,
    )
    write_outcome(folder, outcome)
    # Three times the network, and a finished run needs it no more.
    (folder / CHECKPOINT_FILE).unlink(missing_ok=True)
    return outcome


def _judge(
    made: StudyPlan, folder: Path, outcome: Outcome, judging: Judging | None, view: StudyView
) -> dict[str, float]:
    if judging is None:
        return {}
    with view.describing(f"judging {outcome.variant}", judging.photos) as advance:
        return judging.judge_once(
            folder,
            "the best in validation",
            lambda: load_model(folder / MODEL_FOLDER, made.plan.config.device),
            advance,
        )


def _judge_untrained(made: StudyPlan, judging: Judging | None, view: StudyView) -> dict[str, float]:
    """The network as it comes, on the benchmark."""
    if judging is None:
        return {}
    config = made.plan.config
    name = f"{config.backbone}, {config.pooling}, {config.projection}, {config.weights}"

    def network() -> Model:
        torch.manual_seed(0)
        net = RetrievalNet(config.backbone, config.pooling, config.projection, config.weights)
        return Model(net.to(config.device).eval())

    with view.describing("judging the untrained network", judging.photos) as advance:
        return judging.judge_once(made.out / "untrained", name, network, advance)
