"""Compare the default recipe of Listwise with other losses, each in its usual recipe.

Every recipe trains a network from the same weights on the training classes, and is evaluated on
other classes. The runs are in the folders `runs/METHOD/seed-K` of the study. A finished run has an
`outcome.json` and is not repeated.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from listwise.data import LabelledImages, check_images
from listwise.data.catalog import labelled_of
from listwise.errors import InputError
from listwise.files import write_text
from listwise.models import RetrievalNet
from listwise.optional import requires
from listwise.settings import TrainConfig, make_config, merge
from listwise.studies.outcome import OUTCOME_FILE, read_study_json
from listwise.studies.peer_recipes import RATES, PeerRecipe, evaluate_photos, train_peer
from listwise.studies.plan import MACHINE, STUDY_FILE, check_folder, check_run
from listwise.studies.runs import StudyView
from listwise.training import Trainer, TrainPlan, prepare
from listwise.training.plan import TRAIN_SPLIT, VAL_SPLIT
from listwise.training.run.folder import CHECKPOINT_FILE, MODEL_FOLDER, RUN_FILE
from listwise.training.run.view import TrainView

NAME = "peers"
LISTWISE = "listwise"
TEST_SPLIT = "test"
NETWORK: dict[str, Any] = {"backbone": "resnet50", "projection": 512}
"""The network of all recipes, unless settings are given."""


@dataclass(frozen=True)
class Method:
    """A recipe of the study: Listwise's if `loss` is None, else a loss and its learning rate."""

    name: str
    loss: str | None = None
    rate: float = 0.0


@dataclass(frozen=True)
class PeerOutcome:
    """The outcome of a run of the study.

    Attributes:
        method: name of the recipe.
        seed: seed of the run.
        seconds: duration of the training, with its validations but without the test.
        updates: number of updates.
        backwards: number of images with a gradient.
        figures: mAP, mAP@R and Recall@k on the test classes, from 0 to 1.
    """

    method: str
    seed: int
    seconds: float
    updates: int
    backwards: int
    figures: dict[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """Return the row of `results.csv`: names and values without nesting."""
        row = asdict(self)
        figures: dict[str, float] = row.pop("figures")
        return row | figures


@dataclass(frozen=True, eq=False)
class PeersPlan:
    """The runs of the study.

    Attributes:
        plan: photos and settings of Listwise's recipe; its validation photos are of training
            classes.
        train: all photos of the training classes, which the other recipes train on.
        test: the photos of the test classes.
        methods: the recipes to compare.
        recipe: how the other losses are trained.
        seeds: number of seeds.
        out: folder of the study.
    """

    plan: TrainPlan
    train: LabelledImages
    test: LabelledImages
    methods: tuple[Method, ...]
    recipe: PeerRecipe
    seeds: int
    out: Path

    @property
    def count(self) -> int:
        """Number of runs."""
        return len(self.methods) * self.seeds

    def config(self, seed: int) -> TrainConfig:
        """Return the settings of Listwise's recipe for a seed."""
        return self.plan.config.model_copy(update={"seed": seed})

    def folder(self, method: Method, seed: int) -> Path:
        """Return the folder of a run."""
        return self.out / "runs" / method.name / f"seed-{seed}"

    def settings(self, method: Method, seed: int) -> dict[str, Any]:
        """Return everything that the outcome of a run depends on, as in its `outcome.json`."""
        used: dict[str, Any] = self.config(seed).model_dump(mode="json", exclude=MACHINE)
        if method.loss:
            network = ("backbone", "pooling", "projection", "weights", "precision")
            used = {name: used[name] for name in network}
            used |= {"loss": method.loss, "rate": method.rate, **asdict(self.recipe)}
        photos = replace(self.plan, train=self.train, validation=self.test).fingerprint()
        return used | {"photos": photos}


def plan_peers(
    data: str | Path,
    out: str | Path,
    given: dict[str, Any] | None = None,
    *,
    losses: Sequence[str] | None = None,
    rates: Sequence[float] = (),
    recipe: PeerRecipe | None = None,
    seeds: int = 3,
    root: str | Path | None = None,
) -> PeersPlan:
    """Read the photos, divide the classes, and choose the settings of all runs.

    The split `test` (or `val`, if no photo has the split `test`) has the test classes. Without
    splits, the second half of the classes in alphabetical order are test classes.

    Args:
        data: labelled photos, as in `listwise.training.prepare`.
        out: folder of the study.
        given: settings of Listwise's recipe; the others use its network, device, precision and
            workers.
        losses: names in `RATES`; by default all.
        rates: learning rates of the losses; each one is a separate row. By default, each loss uses
            its rate in `RATES`.
        recipe: how the losses are trained.
        seeds: number of seeds.
        root: folder that contains the data sets.
    """
    with requires("compare", "the study peers"):
        import pytorch_metric_learning  # noqa: F401
    settings = merge(NETWORK, given or {})
    if "seed" in settings:
        raise InputError("`seed` cannot be given: the study chooses it for each run")
    config = make_config(settings)
    everything = labelled_of(data, root, split_column=config.split_column)
    train, test = divide_classes(everything, str(data))
    train, _ = check_images(train, config.strict)
    test, report = check_images(test, config.strict)
    if not (test.class_sizes() > 1).any():
        raise InputError(f"{data}: no test class has two or more photos")
    plan = prepare(data, settings, images=train)
    plan.notes.extend(report.lines())
    methods = (Method(LISTWISE), *_peer_methods(losses or list(RATES), rates))
    peers = PeersPlan(plan, train, test, methods, recipe or PeerRecipe(), seeds, Path(out))
    check_folder(peers.out, NAME)
    for method in methods:
        for seed in range(seeds):
            _check(peers, method, seed)
    return peers


def divide_classes(images: LabelledImages, name: str) -> tuple[LabelledImages, LabelledImages]:
    """Return the photos of the training classes and of the test classes."""
    if images.splits is None:
        half = (len(images.class_names) + 1) // 2
        first = np.flatnonzero(images.labels < half)
        return images.subset(first), images.subset(np.flatnonzero(images.labels >= half))
    tested = next((s for s in (TEST_SPLIT, VAL_SPLIT) if s in images.splits), None)
    if tested is None:
        raise InputError(f"{name}: no photo has the split test or val, which the study tests on")
    test = replace(images.of_split(tested), splits=None)
    train = images.of_split(TRAIN_SPLIT)
    if tested == TEST_SPLIT and VAL_SPLIT in images.splits:
        kept = [i for i, split in enumerate(images.splits) if split in (TRAIN_SPLIT, VAL_SPLIT)]
        train = images.subset(kept)
    else:
        train = replace(train, splits=None)
    shared = set(train.class_names) & set(test.class_names)
    if shared:
        raise InputError(
            f"{name}: class {sorted(shared)[0]!r} has training and test photos, but the study "
            "tests on classes that are not trained on: give all photos of a class the same split"
        )
    return train, test


def _peer_methods(losses: Sequence[str], rates: Sequence[float]) -> list[Method]:
    methods = []
    for loss in losses:
        if loss not in RATES:
            raise InputError(f"`losses` contains {loss!r}: choose from {', '.join(RATES)}")
        for rate in rates or (RATES[loss],):
            name = f"{loss}-{rate:g}" if len(rates) > 1 else loss
            methods.append(Method(name, loss, rate))
    if len({method.name for method in methods}) < len(methods):
        raise InputError("`losses` or `rates` contains a value twice")
    return methods


def _check(peers: PeersPlan, method: Method, seed: int) -> None:
    """Raise an error if a run in the folder has other settings or photos."""
    folder = peers.folder(method, seed)
    if method.loss is None:
        check_run(folder, peers.config(seed), peers.plan)
    path = folder / OUTCOME_FILE
    if path.exists() and read_study_json(path).get("settings") != peers.settings(method, seed):
        raise InputError(
            f"{folder} is a run with other settings or photos: give the same settings to resume "
            "the study, or give another `out`"
        )


def run_peers(
    peers: PeersPlan,
    view: StudyView | None = None,
    on_outcome: Callable[[list[PeerOutcome]], object] = lambda outcomes: None,
) -> list[PeerOutcome]:
    """Train and test the runs that are not finished, and return the outcomes of all runs.

    `on_outcome` is called with all outcomes so far after each run.
    """
    view = view or StudyView()
    peers.out.mkdir(parents=True, exist_ok=True)
    write_text(peers.out / STUDY_FILE, json.dumps({"study": NAME}) + "\n")
    outcomes: list[PeerOutcome] = []
    number = 0
    for seed in range(peers.seeds):
        for method in peers.methods:
            number += 1
            name = f"{method.name}, seed {seed}"
            path = peers.folder(method, seed) / OUTCOME_FILE
            if path.exists():
                view.skipped(number, peers.count, name)
                outcome = PeerOutcome(**read_study_json(path)["outcome"])
            else:
                outcome = _run(peers, method, seed, view, view.run(number, peers.count, name))
                settings = peers.settings(method, seed)
                content = {"settings": settings, "outcome": asdict(outcome)}
                write_text(path, json.dumps(content, indent=2) + "\n")
                # Until the outcome is written, a killed study resumes from the checkpoint.
                (path.parent / CHECKPOINT_FILE).unlink(missing_ok=True)
            outcomes.append(outcome)
            on_outcome(outcomes)
    return outcomes


def _run(
    peers: PeersPlan, method: Method, seed: int, view: StudyView, train_view: TrainView
) -> PeerOutcome:
    """Train and test one network."""
    config, folder = peers.config(seed), peers.folder(method, seed)
    if method.loss is None:
        begun = (folder / RUN_FILE).exists()
        trainer = Trainer(replace(peers.plan, config=config), folder, train_view, resume=begun)
        result = trainer.fit()
        net, recipe = RetrievalNet.load(folder / MODEL_FOLDER, config.device), None
        seconds, counts = result.seconds, result.counts
    else:
        recipe = peers.recipe
        trained = train_peer(
            method.loss,
            method.rate,
            peers.train,
            config,
            recipe,
            seed,
            train_view,
            decoded_bytes=peers.plan.decoded_bytes,
        )
        net, seconds, counts = trained.net, trained.seconds, trained.counts
        net.save(folder / MODEL_FOLDER)
    with view.describing(f"testing {method.name}", len(peers.test)) as advance:
        figures = evaluate_photos(net, peers.test, config, recipe, advance)
    return PeerOutcome(method.name, seed, seconds, counts.updates, counts.backwards, figures)
