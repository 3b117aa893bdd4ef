"""Compare the default recipe of Listwise with other losses, each in its usual recipe.

Every recipe trains a network from the same weights on the training classes, and is evaluated on
other classes. The runs are in the folders `runs/METHOD/seed-K` of the study. A finished run has an
`outcome.json` and is not repeated.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from benchmarks.peer_recipes import RATES, PeerRecipe, evaluate_photos, train_peer
from listwise.data import LabelledImages, check_images
from listwise.data.catalog import labelled_of
from listwise.descriptors.choosing import TRAIN_SPLIT, VAL_SPLIT
from listwise.errors import InputError
from listwise.files import write_text
from listwise.models import RetrievalNet
from listwise.optional import requires
from listwise.progress import readable_time
from listwise.settings import TrainConfig, make_config, merge, read_settings
from listwise.studies.outputs import markdown, write_files
from listwise.studies.plan import (
    MACHINE,
    OUTCOME_FILE,
    STUDY_FILE,
    check_folder,
    check_run,
    read_study_json,
)
from listwise.studies.plots import Panel, Point, Spread
from listwise.studies.runs import StudyView
from listwise.training import Trainer, TrainPlan, prepare
from listwise.training.run import CHECKPOINT_FILE, MODEL_FOLDER, RUN_FILE
from listwise.training.view import TrainView

METRICS = ("Recall@1", "mAP@R")
TITLE = "Listwise and losses of pytorch-metric-learning"
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
    with requires("compare", "the comparison"):
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


def write_peers(peers: PeersPlan, outcomes: Sequence[PeerOutcome], command: str = "") -> None:
    """Write `results.csv`, `table.md` and `plot.svg`; `table.md` shows `command`."""
    panels = [
        Panel(f"{name}, %", [Point(m, s) for m, s in _spreads(outcomes, name).items()])
        for name in METRICS
    ]
    text = [_about(peers), peers_table(outcomes), f"{verdict(outcomes)}\n"]
    rows = [outcome.row() for outcome in outcomes]
    write_files(peers.out, TITLE, text, rows, panels, command, count=peers.count)


def peers_table(outcomes: Sequence[PeerOutcome]) -> str:
    """Format the Markdown table: one row per recipe."""
    metrics = {name: _spreads(outcomes, name) for name in METRICS}
    rows = []
    for method in metrics[METRICS[0]]:
        runs = [run for run in outcomes if run.method == method]
        row = {"recipe": method, "seeds": str(len(runs))}
        row |= {name: spreads[method].percent() for name, spreads in metrics.items()}
        row["time"] = readable_time(float(np.mean([run.seconds for run in runs])))
        for name, cost in (("updates", "updates"), ("images", "backwards")):
            row[name] = f"{np.mean([getattr(run, cost) for run in runs]):,.0f}"
        rows.append(row)
    return markdown(rows)


def verdict(outcomes: Sequence[PeerOutcome]) -> str:
    """Return one sentence that compares Listwise with the best other recipe in each metric.

    A difference that is smaller than the larger of the two deviations between seeds is called
    about equal.
    """
    parts = []
    for name in METRICS:
        others = _spreads(outcomes, name)
        ours = others.pop(LISTWISE, None)
        if ours is None or not others:
            return "The comparison needs a run of Listwise and one of another recipe."
        best = max(others, key=lambda method: others[method].mean)
        gap = ours.mean - others[best].mean
        noise = max(ours.deviation or 0.0, others[best].deviation or 0.0)
        word = "about equal to" if abs(gap) < noise else "ahead of" if gap > 0 else "behind"
        shown = f"{100 * ours.mean:.1f} against {100 * others[best].mean:.1f}"
        parts.append(f"{word} {best} in {name} ({shown})")
    times = {
        method: float(np.mean([run.seconds for run in outcomes if run.method == method]))
        for method in dict.fromkeys(run.method for run in outcomes)
    }
    own = times.pop(LISTWISE)
    fastest = min(times, key=lambda method: times[method])
    ratio = own / times[fastest]
    return f"Listwise is {' and '.join(parts)}, in {ratio:.2f} × the time of {fastest}."


def _spreads(outcomes: Sequence[PeerOutcome], name: str) -> dict[str, Spread]:
    """Return the values of a metric for each recipe, in the order of the runs."""
    return {
        method: Spread(tuple(run.figures[name] for run in outcomes if run.method == method))
        for method in dict.fromkeys(run.method for run in outcomes)
    }


def _about(peers: PeersPlan) -> str:
    """Describe in a paragraph what is compared."""
    config, recipe, plan = peers.plan.config, peers.recipe, peers.plan
    return (
        f"{config.backbone} with {config.pooling} and {config.projection} dimensions. "
        f"Test: {len(peers.test)} photos of {len(peers.test.class_names)} classes. "
        f"listwise: {len(plan.train)} training photos of {len(plan.train.class_names)} classes, "
        f"{len(plan.validation)} validation photos of {len(plan.validation.class_names)} other "
        f"classes, crops of {config.crops.size} pixels, batches of {config.batch_size}; tested on "
        f"whole photos with a long side of at most {config.val_max_side} pixels. "
        f"Other recipes: {len(peers.train)} training photos of {len(peers.train.class_names)} "
        f"classes, {recipe.epochs} epochs, batches of {recipe.batch_size}, crops of {recipe.crop} "
        f"pixels; tested on center crops of {recipe.crop} pixels of photos with a short side of "
        f"{recipe.resize}. Metrics in percent, mean ± sample standard deviation over seeds; time "
        "of the training with its validations.\n"
    )


@dataclass(frozen=True)
class PeerRow:
    """A recipe and its mean metrics, as the table shows them."""

    recipe: Annotated[str, "recipe"]
    recall: Annotated[str, "Recall@1", str]
    map_at_r: Annotated[str, "mAP@R", str]
    seconds: Annotated[float, "time", readable_time]
    updates: Annotated[float, "updates", "{:,.0f}"]
    images: Annotated[float, "images", "{:,.0f}"]


def run(
    photos: str,
    out: Path = Path("peers"),
    *,
    losses: Sequence[str] = tuple(RATES),
    rates: str | None = None,
    epochs: int = 30,
    batch: int = 120,
    crop: int = 224,
    seeds: int = 3,
    backbone: str = "resnet50",
    weights: str = "auto",
    projection: int = 512,
    config: Path | None = None,
    device: str = "auto",
    workers: int | None = None,
    on_start: Callable[[str], object] = lambda what: None,
) -> Iterator[PeerRow]:
    """Train Listwise and losses of pytorch-metric-learning, each in its usual recipe.

    Every recipe trains on the training classes from the same weights and is tested on other
    classes: the split test (or val) of a table, or the second half of the classes. Finished runs
    are not repeated. Writes results.csv, table.md and plot.svg.

    Args:
        photos: labelled photos: a folder of class folders, a table, or the name of a data set.
        out: folder to write runs and tables to.
        losses: losses to compare Listwise with.
        rates: learning rates of these losses, separated by commas; each one is a separate row.
        epochs: number of epochs of these losses.
        batch: images per update of these losses.
        crop: side of the crops of these losses, in pixels.
        seeds: number of runs per recipe, each with a different seed.
        backbone: name of a timm model, for all recipes.
        weights: weights of the backbone, as in `listwise train`.
        projection: number of dimensions of the descriptors.
        config: YAML file with settings of Listwise's recipe.
        device: cpu, cuda, cuda:1 ...; auto uses a GPU if present.
        workers: number of processes that decode photos.
        on_start: called with what is measured next.
    """
    shared = {"backbone": backbone, "weights": weights, "projection": projection, "device": device}
    shared |= {} if workers is None else {"workers": workers}
    plan = plan_peers(
        photos,
        out,
        merge(shared, read_settings(config) if config else {}),
        losses=losses,
        rates=[float(rate) for rate in rates.split(",")] if rates else (),
        recipe=PeerRecipe(epochs=epochs, batch_size=batch, crop=crop),
        seeds=seeds,
    )
    view = _Names(on_start)
    outcomes = run_peers(plan, view, lambda done: write_peers(plan, done))
    recall, map_at_r = (_spreads(outcomes, name) for name in METRICS)
    for method in recall:
        runs = [each for each in outcomes if each.method == method]
        seconds, updates, images = (
            float(np.mean([getattr(each, cost) for each in runs]))
            for cost in ("seconds", "updates", "backwards")
        )
        shown = recall[method].percent(), map_at_r[method].percent()
        yield PeerRow(method, *shown, seconds, updates, images)


class _Names(StudyView):
    """Passes the name of each run on."""

    def __init__(self, on_start: Callable[[str], object]) -> None:
        self.on_start = on_start

    def run(self, number: int, count: int, name: str) -> TrainView:
        self.on_start(f"run {number} of {count}: {name}")
        return TrainView()
