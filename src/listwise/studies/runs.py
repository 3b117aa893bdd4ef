"""Run a study: train every variant once per seed, and evaluate the networks.

Each run is a run of `listwise.training` in the folder `runs/VARIANT/rate-R/seed-K` of the study. A
finished run has an `outcome.json` and is not repeated; an interrupted run is resumed.
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from listwise.data import Images
from listwise.data.catalog import Benchmark
from listwise.descriptors import Model, Whitening, load_model
from listwise.files import write_text
from listwise.machine import seeded
from listwise.models import RetrievalNet
from listwise.progress import count_of, progress_bar, readable_time
from listwise.results import describe_benchmark
from listwise.settings import TrainConfig
from listwise.studies.definitions import HYPER_PARAMETERS, Variant
from listwise.studies.plan import (
    OUTCOME_FILE,
    STUDY_FILE,
    Outcome,
    StudyPlan,
    StudyResults,
    read_outcome,
    read_study_json,
)
from listwise.training import Trainer
from listwise.training.duration import TimeLeft, measure_plan
from listwise.training.run import CHECKPOINT_FILE, MODEL_FOLDER, RUN_FILE
from listwise.training.view import LiveTrainView, TrainView


@dataclass(frozen=True, eq=False)
class StudyBenchmark:
    """The benchmark of a study, and how networks are evaluated on it.

    The whitening is learned on `whiten_on` and keeps `dim` dimensions; by default all that vary.
    """

    benchmark: Benchmark
    whiten_on: Images
    dim: int | None = None
    max_side: int | None = None
    workers: int | None = None

    @property
    def photo_count(self) -> int:
        """Number of photos to describe per network."""
        return self.benchmark.photo_count + len(self.whiten_on)

    def evaluate(
        self, model: Model, on_progress: Callable[[int], object] = lambda count: None
    ) -> dict[str, float]:
        """Return the mAP of a model without and with whitening: {"Medium plain": 0.4, ...}."""
        how: Any = {"max_side": self.max_side, "workers": self.workers}
        plain = describe_benchmark(model, self.benchmark, on_progress, **how)
        others = model.describe(self.whiten_on, on_progress=on_progress, **how)
        whitening = Whitening.learn([others.descriptors], self.dim)
        return {
            f"{protocol} {kind}": result.mAP
            for kind, described in (("plain", plain), ("whitened", plain.whiten(whitening)))
            for protocol, result in described.evaluate().items()
        }

    def evaluate_once(
        self,
        folder: Path,
        network: str,
        model: Callable[[], Model],
        on_progress: Callable[[int], object] = lambda count: None,
    ) -> dict[str, float]:
        """Evaluate a model, or return the results that an earlier call stored in the folder.

        `network` is a text that identifies the network; `model` loads it.
        """
        path = folder / "judged.json"
        how: dict[str, Any] = {
            "network": network,
            "benchmark": self.benchmark.name,
            "photos": self.photo_count,
            "dim": self.dim,
            "max_side": self.max_side,
        }
        kept = read_study_json(path) if path.exists() else {}
        if kept.get("how") == how:
            return dict(kept["mAP"])
        found = self.evaluate(model(), on_progress)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"how": how, "mAP": found}, indent=2) + "\n")
        return found


class StudyView:
    """Receives the progress of a study, and shows it if it has a console."""

    console: Console | None = None

    def __init__(self, console: Console | None = None) -> None:
        self.console = console

    def run(self, number: int, count: int, name: str) -> TrainView:
        """Called before run `number` of `count`; returns the view of its training."""
        if self.console is None:
            return TrainView()
        self.console.print(f"run {number} of {count}: {name}", style="bold")
        return LiveTrainView(self.console)

    def skipped(self, number: int, count: int, name: str) -> None:
        """Called instead of `run` if the run is already finished."""
        if self.console is not None:
            self.console.print(f"run {number} of {count}: {name}: already finished", style="dim")

    def time(self, seconds: float, runs: int) -> None:
        """Called with the estimated time of the training that is left, and the number of runs."""
        if self.console is not None:
            left = f"the training of {count_of(runs, 'run')} takes about {readable_time(seconds)}"
            self.console.print(left, style="dim", highlight=False)

    def describing(self, what: str, photos: int) -> AbstractContextManager[Callable[[int], object]]:
        """Called before photos are described; yields a function of the number just described."""
        if self.console is None:
            return nullcontext(lambda count: None)
        return progress_bar(self.console, what, photos)


def run_study(
    study_plan: StudyPlan,
    view: StudyView | None = None,
    benchmark: StudyBenchmark | None = None,
    on_found: Callable[[StudyResults], object] = lambda results: None,
) -> StudyResults:
    """Train the runs that are not finished, and return the results of all runs.

    The first seed of each variant tries all learning rates; the other seeds use the one that is
    best in validation. The best network of each run is evaluated on the benchmark. `on_found` is
    called with all results so far after each run.
    """
    view = view or StudyView()
    study_plan.out.mkdir(parents=True, exist_ok=True)
    write_text(study_plan.out / STUDY_FILE, json.dumps({"study": study_plan.study.name}) + "\n")

    def evaluate(
        folder: Path, what: str, network: str, model: Callable[[], Model]
    ) -> dict[str, float]:
        """Evaluate a network once, with a progress bar that names `what`."""
        if benchmark is None:
            return {}
        with view.describing(f"evaluating {what}", benchmark.photo_count) as advance:
            return benchmark.evaluate_once(folder, network, model, advance)

    config = study_plan.plan.config
    start = f"{config.backbone}, {config.pooling}, {config.projection}, {config.weights}"
    untrained = study_plan.out / "untrained"
    results = StudyResults(
        untrained=evaluate(untrained, "the untrained network", start, partial(_untrained, config))
    )
    number, took = 0, list[float]()
    ahead = study_plan.count - len(list(study_plan.out.glob(f"runs/*/*/*/{OUTCOME_FILE}")))
    if view.console is not None and ahead > 0:
        view.time(ahead / study_plan.count * estimate_seconds(study_plan), ahead)
    best: dict[str, float] = {}
    for seed in range(study_plan.seeds):
        for variant in study_plan.variants:
            tried = [best[variant.name]] if seed else list(study_plan.rates)
            runs = []
            for rate in tried:
                number += 1
                name = _name(study_plan, variant, seed, rate)
                run = read_outcome(study_plan.folder(variant, seed, rate))
                if run is None:
                    run = _train(
                        study_plan, variant, seed, rate, view.run(number, study_plan.count, name)
                    )
                    took.append(run.seconds)
                    if left := study_plan.count - number:
                        view.time(left * sum(took) / len(took), left)
                else:
                    view.skipped(number, study_plan.count, name)
                runs.append(run.model_copy(update={"kept": False}))
                results.outcomes.append(runs[-1])
                if rate != tried[-1]:
                    on_found(results)
            winner = max(runs, key=lambda run: run.validation_map)
            best[variant.name] = winner.learning_rate
            place = results.outcomes.index(winner)
            folder = study_plan.folder(variant, seed, winner.learning_rate)
            model = partial(load_model, folder / MODEL_FOLDER, config.device)
            judged = evaluate(folder, variant.name, "the best in validation", model)
            results.outcomes[place] = winner.model_copy(update={"kept": True, "judged": judged})
            on_found(results)
    return results


def estimate_seconds(study_plan: StudyPlan) -> float:
    """Estimate how long all runs of a study train on this machine, from a trial of a few photos."""
    plan, total = study_plan.plan, 0.0
    speed, size = measure_plan(plan), plan.config.crops.size
    for variant in study_plan.variants:
        config = study_plan.config(variant, 0, study_plan.rates[0])
        made = replace(plan, config=config, speed=speed.scaled((config.crops.size / size) ** 2))
        total += TimeLeft(made, made.sizes.cost()).seconds(0) or 0.0
    return total * study_plan.count / len(study_plan.variants)


def _name(study_plan: StudyPlan, variant: Variant, seed: int, rate: float) -> str:
    tried = f", learning rate {rate:g}" if len(study_plan.rates) > 1 else ""
    return f"{variant.name}, seed {seed}{tried}"


def _train(
    study_plan: StudyPlan, variant: Variant, seed: int, rate: float, view: TrainView
) -> Outcome:
    folder = study_plan.folder(variant, seed, rate)
    config = study_plan.config(variant, seed, rate)
    begun = (folder / RUN_FILE).exists()
    trainer = Trainer(replace(study_plan.plan, config=config), folder, view, resume=begun)
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
        hyper_parameters=HYPER_PARAMETERS.get(str(config.loss), 1),  # a custom loss: the batch size
        seconds=result.seconds,
    )
    # It marks the run as finished.
    write_text(folder / OUTCOME_FILE, outcome.model_dump_json(indent=2) + "\n")
    # A checkpoint is three times as large as the network, and a finished run does not need it.
    (folder / CHECKPOINT_FILE).unlink(missing_ok=True)
    return outcome


def _untrained(config: TrainConfig) -> Model:
    """Return the network that every run starts from, but for the seed of its new layers."""
    with seeded(0, torch.device(config.device)):
        net = RetrievalNet(config.backbone, config.pooling, config.projection, config.weights)
    return Model(net.to(config.device).eval())
