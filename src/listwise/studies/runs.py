"""The engine of the studies: runs that differ in one thing, each of which is made once.

Each run is one of `listwise.training`, in `runs/VARIANT/rate-R/seed-K` of the study's folder. A
finished run has an `outcome.json` and is not made again; one that was interrupted is resumed.
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from listwise.data import Images
from listwise.data.catalog import Benchmark
from listwise.descriptors import Model, Whitening, load_model
from listwise.files import write_text
from listwise.models import RetrievalNet
from listwise.results import describe_benchmark
from listwise.studies.definitions import HYPER_PARAMETERS, Variant
from listwise.studies.outcome import (
    Outcome,
    StudyResults,
    read_outcome,
    read_study_json,
    write_outcome,
)
from listwise.studies.plan import STUDY_FILE, StudyPlan
from listwise.training import Trainer
from listwise.training.run.folder import CHECKPOINT_FILE, MODEL_FOLDER, RUN_FILE
from listwise.training.run.view import TrainView


@dataclass(frozen=True, eq=False)
class StudyBenchmark:
    """A benchmark that a study's networks are evaluated on, and how.

    The whitening is learned on `whiten_on` and keeps `dim` dimensions, all that vary by default.
    """

    benchmark: Benchmark
    whiten_on: Images
    dim: int | None = None
    max_side: int | None = None
    workers: int | None = None

    @property
    def photo_count(self) -> int:
        """Number of photos that are described for one network."""
        return self.benchmark.photo_count + len(self.whiten_on)

    def evaluate(
        self, model: Model, on_progress: Callable[[int], object] = lambda count: None
    ) -> dict[str, float]:
        """Mean AP of a model without whitening: "Medium plain", "Medium whitened" ..."""
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
        """`evaluate`, or the figures that an earlier call for the same network left in the folder.

        `network` says which one it is, in words that differ where networks do; `model` opens it.
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
    """Follows the progress of a study; this one shows nothing."""

    def run(self, number: int, count: int, name: str) -> TrainView:
        """Called before run `number` of `count`; returns what follows its training."""
        return TrainView()

    def skipped(self, number: int, count: int, name: str) -> None:
        """Called instead of `run` if the run is finished already."""

    def describing(self, what: str, photos: int) -> AbstractContextManager[Callable[[int], object]]:
        """Called before photos are described; its context is called with numbers of them."""
        return nullcontext(lambda count: None)

    def found(self, findings: StudyResults) -> None:
        """Called with all outcomes so far, each time there is a new one."""


def run_study(
    made: StudyPlan, view: StudyView | None = None, benchmark: StudyBenchmark | None = None
) -> StudyResults:
    """Make the runs that are not finished yet, and give the outcomes of all.

    Of each variant's runs with the first seed, the learning rate that is best in validation is
    used for the other seeds. The benchmark is searched with the network of each run that was best
    in validation.
    """
    view = view or StudyView()
    made.out.mkdir(parents=True, exist_ok=True)
    write_text(made.out / STUDY_FILE, json.dumps({"study": made.study.name}) + "\n")
    findings = StudyResults(untrained=_evaluate_untrained(made, benchmark, view))
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
            model = partial(load_model, folder / MODEL_FOLDER, made.plan.config.device)
            best_network = "the best in validation"
            judged = _evaluate(benchmark, folder, variant.name, best_network, model, view)
            findings.outcomes[place] = replace(winner, kept=True, judged=judged)
            view.found(findings)
    return findings


def _name(made: StudyPlan, variant: Variant, seed: int, rate: float) -> str:
    tried = f", learning rate {rate:g}" if len(made.rates) > 1 else ""
    return f"{variant.name}, seed {seed}{tried}"


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
        hyper_parameters=HYPER_PARAMETERS.get(str(config.loss), 1),  # a custom loss: the batch size
        seconds=result.seconds,
    )
    write_outcome(folder, outcome)
    # Three times the network, and a finished run needs it no more.
    (folder / CHECKPOINT_FILE).unlink(missing_ok=True)
    return outcome


def _evaluate(
    benchmark: StudyBenchmark | None,
    folder: Path,
    what: str,
    network: str,
    model: Callable[[], Model],
    view: StudyView,
) -> dict[str, float]:
    """The figures of `StudyBenchmark.evaluate_once`; `what` is named while photos are described."""
    if benchmark is None:
        return {}
    with view.describing(f"evaluating {what}", benchmark.photo_count) as advance:
        return benchmark.evaluate_once(folder, network, model, advance)


def _evaluate_untrained(
    made: StudyPlan, benchmark: StudyBenchmark | None, view: StudyView
) -> dict[str, float]:
    config = made.plan.config
    name = f"{config.backbone}, {config.pooling}, {config.projection}, {config.weights}"

    def network() -> Model:
        torch.manual_seed(0)
        net = RetrievalNet(config.backbone, config.pooling, config.projection, config.weights)
        return Model(net.to(config.device).eval())

    what = "the untrained network"
    return _evaluate(benchmark, made.out / "untrained", what, name, network, view)
