"""Evaluate a model on a benchmark, optionally against another model."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, Literal

from listwise.data import LabelledImages, read_labelled
from listwise.data.catalog import Benchmark, find_dataset, find_entry, recognize
from listwise.data.labelled import label_levels
from listwise.descriptors import DescriptorFile, Model, load_model
from listwise.errors import InputError
from listwise.evaluation import HierarchicalResult, Results, evaluate_hierarchical
from listwise.pages import percent
from listwise.progress import counting
from listwise.results.describe import BenchmarkDescriptors, describe_benchmark, refuse_labels
from listwise.results.report import ModelSearch, figures_of, format_table, write_report
from listwise.results.sizes import DescriptorSize, check_dims, evaluate_sizes, format_sizes
from listwise.search.options import RefineMethod
from listwise.search.refinement import find_refinement
from listwise.settings import Precision

BEST = " + SP + diffusion"
"""End of the name of the row with local features."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The metrics of one or two models on a benchmark; `evaluate` returns one.

    Attributes:
        described: model name -> descriptors of the benchmark; the evaluated model is last.
        results: row of the table -> protocol -> result. Rows are the models and, with query
            expansion and refinement, their names + αQE, + SuperGlobal, + diffusion and + SP +
            diffusion.
        distractors: number of distractors that were added to the database.
        milliseconds: row of the table -> time per query to rank the database.
        sizes: mAP of shorter and compressed descriptors, if `dims` were given.
        levels: metrics of the evaluated model over all levels of the labels, if `levels` was given.
    """

    described: Mapping[str, BenchmarkDescriptors]
    results: Mapping[str, Results]
    distractors: int = 0
    milliseconds: Mapping[str, float] = field(default_factory=dict)
    sizes: Sequence[DescriptorSize] = ()
    levels: HierarchicalResult | None = None

    @property
    def benchmark(self) -> Benchmark:
        """The benchmark, without the photos that cannot be read."""
        return next(iter(self.described.values())).benchmark

    @property
    def figures(self) -> dict[str, dict[str, float]]:
        """Metrics of the evaluated model: protocol -> metric -> value from 0 to 1."""
        return self.rows[list(self.described)[-1]]

    @property
    def rows(self) -> dict[str, dict[str, dict[str, float]]]:
        """Metrics of every row of the table: name -> protocol -> metric -> value."""
        return {name: figures_of(found) for name, found in self.results.items()}

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Errors of the photos that cannot be read and were left out."""
        found = (error for each in self.described.values() for error in each.unreadable)
        return tuple(dict.fromkeys(found))

    def table(self) -> str:
        """Format the metrics as a plain text table, in percent."""
        parts = [format_table(self.benchmark.name, self.rows)]
        if self.levels:
            found = (f"{name} {percent(value)}" for name, value in self.levels.figures.items())
            parts.append(f"all levels of the labels: {', '.join(found)}")
        if self.sizes:
            parts.append(format_sizes(self.sizes))
        return "\n\n".join(parts)

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.table())}</pre>"

    def report(
        self,
        path: str | Path,
        *,
        command: str = "",
        on_progress: Callable[[int, int], object] = lambda done, total: None,
    ) -> Path:
        """Write an HTML report: metrics, precision-recall curves, and the results of each query.

        Args:
            path: file to write.
            command: command to show in the report.
            on_progress: called with the number of thumbnails done and in total.
        """
        benchmark, rows = self.benchmark, self.rows
        notes, results = [], self.results
        if self.distractors:
            notes.append(
                f"The metrics in the table include {self.distractors} distractors. The curves, the "
                "ranked lists and the AP of single queries do not."
            )
            results = {name: found.evaluate() for name, found in self.described.items()}
        searches = [
            ModelSearch(name, found.scores, results[name]) for name, found in self.described.items()
        ]
        return write_report(
            path,
            f"{' and '.join(self.described)} on {benchmark.name}",
            searches,
            benchmark,
            table={name: rows[name] for name in [*self.described, *rows]},
            command=command,
            notes=notes,
            on_progress=on_progress,
        )


def evaluate(
    model: Model | str | Path,
    benchmark: Benchmark | LabelledImages | str | Path,
    *,
    against: Model | str | Path | None = None,
    database_model: Model | str | Path | None = None,
    expand: bool | None = None,
    refine: RefineMethod | Sequence[RefineMethod] = (),
    quality: Literal["fast", "best"] = "fast",
    distractors: DescriptorFile | str | Path | None = None,
    dims: Sequence[int] = (),
    levels: bool = False,
    features: str | Path | None = None,
    data: str | Path | None = None,
    split: str | None = None,
    max_side: int | None = None,
    scales: Sequence[float] | None = None,
    power: float | None = None,
    precision: Precision | None = None,
    workers: int | None = None,
    device: str = "auto",
    on_progress: Callable[[int], object] | None = None,
) -> Evaluation:
    """Evaluate a model on a benchmark: mAP and the other metrics of its protocols.

    Args:
        model: a model, or the folder of a model.
        benchmark: the name or folder of a data set, labelled photos (class folders, a .csv or
            .parquet table), or the result of `open_benchmark` or `read_labelled`.
        against: second model to compare with.
        database_model: model that describes the database, if `model` was trained with it as its
            teacher.
        expand: also evaluate with query expansion (αQE); by default if the model was tuned with it.
        refine: also evaluate with this re-ranking of the first results by their global descriptors;
            several can be given.
        quality: quality of the results; best also evaluates local features and diffusion together,
            as a search with this quality uses them.
        distractors: descriptor file of photos to add to the database as negatives.
        dims: also evaluate the first dimensions of the descriptors at these lengths, such as
            512,128, stored as float32, int8 and one bit per dimension.
        levels: also compute H-AP, NDCG and the mAP of each level, for labels such as bird/sparrow.
            The time grows with the square of the number of photos.
        features: folder for the local features of `quality="best"`, which later evaluations reuse;
            by default local-BENCHMARK-1000.
        data: folder that contains the data sets; by default data.
        split: use only the photos of this split, such as test.
        max_side: reduce photos whose longer side has more pixels than this; 0 keeps the original
            size. By default the size that the model records, or 1024 on a GPU and 512 on a CPU.
        scales: scales at which each photo is described, such as 1,0.7071,0.5; by default those of a
            tuned model, or 1.
        power: power of the generalized mean over the descriptors of several scales; by default 3.
        precision: precision in which the network computes; by default bfloat16 on a GPU that
            supports it.
        workers: number of processes that decode photos; by default from the number of CPU cores.
        device: device: cpu, cuda, cuda:1, or auto, which uses a GPU if one is available.
        on_progress: called with the number of photos just described; by default a terminal shows
            a progress bar.

    Examples:
        >>> result = listwise.evaluate("runs/photos/model", "photos")   # doctest: +SKIP
        >>> result.figures["Labels"]["mAP"]                             # doctest: +SKIP
        0.87
        >>> result.report("report.html")                                # doctest: +SKIP
    """
    methods = [refine] if isinstance(refine, str) else list(refine)
    options = {f" + {find_refinement(each).label}": {"refine": each} for each in methods}
    opened = open_benchmark(benchmark, data, split, levels)
    refuse_labels(opened, bool(expand), refine, distractors)
    _check_options(opened, quality, levels, against, database_model, distractors)
    if isinstance(distractors, str | Path):
        distractors = DescriptorFile.open(distractors)
    settings = {"max_side": max_side, "scales": scales, "power": power, "precision": precision}
    photos = opened.photo_count
    described: dict[str, BenchmarkDescriptors] = {}
    results: dict[str, Results] = {}
    milliseconds: dict[str, float] = {}
    for name, source in _name_models(model, against).items():
        network = source if isinstance(source, Model) else load_model(source, device)
        if distractors is not None:
            _check_distractors(distractors, network, settings)
        teacher = None
        if source is model:
            check_dims(dims, network.dim)
            teacher = _open_teacher(database_model, network, device)
        with nullcontext(on_progress) if on_progress else counting("describing", photos) as done:
            found = describe_benchmark(network, opened, done, workers=workers, **settings)
            if teacher is not None:
                theirs = describe_benchmark(teacher, opened, done, workers=workers, **settings)
                found = replace(found, database=theirs.database)
            described[name] = found
        for suffix, how in (_expansion(network, opened, expand) | options).items():
            started = time.perf_counter()
            results[name + suffix] = described[name].evaluate(distractors=distractors, **how)
            seconds = time.perf_counter() - started
            milliseconds[name + suffix] = 1000 * seconds / max(1, len(opened.judged))
        if quality == "best":
            from listwise.results.local import evaluate_best  # its packages are an extra

            best = name + BEST
            results[best], milliseconds[best] = evaluate_best(described[name], features, workers)
    sizes = evaluate_sizes(described[name], dims)
    added = len(distractors) if distractors else 0
    of_levels = _evaluate_levels(described[name]) if levels else None
    return Evaluation(described, results, added, milliseconds, sizes, of_levels)


def _open_teacher(source: Model | str | Path | None, student: Model, device: str) -> Model | None:
    """Return the model that describes the database, if the student learned from it."""
    if source is None:
        return None
    teacher = source if isinstance(source, Model) else load_model(source, device)
    if student.teacher != teacher.fingerprint:
        raise InputError(
            f"`database_model` is {teacher.fingerprint[:12]}, but the model is not its student: "
            "train one with `teacher`"
        )
    return teacher


def _check_options(
    benchmark: Benchmark,
    quality: str,
    levels: bool,
    against: object,
    database_model: object,
    distractors: object,
) -> None:
    """Refuse an unknown quality, and options that the benchmark or each other do not allow."""
    if quality not in ("fast", "best"):
        raise InputError(f"`quality` must be fast or best, not {quality!r}")
    if quality == "best" and (benchmark.labelled or distractors is not None):
        raise InputError(
            "`quality` best is for benchmarks whose queries are judged photo by photo, without "
            "`distractors`"
        )
    if distractors is not None and against is not None:
        raise InputError("`distractors` belong to one model: leave out `against`")
    if levels and database_model is not None:
        raise InputError("`levels` are metrics of one model: leave out `database_model`")
    images = benchmark.database
    own = isinstance(images, LabelledImages) and images is benchmark.queries
    names = images.class_names if isinstance(images, LabelledImages) else ()
    if levels and (not own or label_levels(names).shape[1] == 1):
        raise InputError(
            f"the labels of {benchmark.name} have no levels: give labels such as bird/sparrow, or "
            "leave out `levels`"
        )


def _evaluate_levels(described: BenchmarkDescriptors) -> HierarchicalResult:
    """Compute the metrics of labels with levels, such as bird/sparrow."""
    images = described.benchmark.database
    assert isinstance(images, LabelledImages)
    groups = label_levels(images.class_names)[images.labels]
    return evaluate_hierarchical(described.database, groups)


def _check_distractors(file: DescriptorFile, model: Model, settings: dict[str, Any]) -> None:
    """Refuse descriptors of another model or with other settings."""
    file.require(model.fingerprint)
    theirs, ours = file.settings.without_precision(), model.settings(**settings).without_precision()
    if theirs != ours:
        raise InputError(
            f"{file.path} was made with {theirs}, but the photos are described with {ours}: "
            f"extract them again with listwise extract MODEL PHOTOS {file.path} {ours}"
        )


def _expansion(model: Model, benchmark: Benchmark, expand: bool | None) -> dict[str, Any]:
    """Return the rows without and, if wanted, with α query expansion: suffixes and options."""
    tuned = None if model.tuned is None else model.tuned.expansion
    wanted = tuned is not None and not benchmark.labelled if expand is None else expand
    return {"": {}} | ({" + αQE": {"expand": tuned or True}} if wanted else {})


def open_benchmark(
    source: Benchmark | LabelledImages | str | Path,
    data: str | Path | None = None,
    split: str | None = None,
    levels: bool = False,
) -> Benchmark:
    """Open a benchmark: a data set by name or folder, or labelled photos.

    Each labelled photo is searched among all the others.

    Args:
        source: the name or folder of a data set, labelled photos (class folders, a .csv or .parquet
            table), or the result of `read_labelled`.
        data: folder that holds the data sets; `data` by default.
        split: use only this split of labelled photos.
        levels: in a folder, all folders of the path of a photo are the levels of its label.

    Examples:
        >>> open_benchmark("roxford5k", data="data").photo_count   # doctest: +SKIP
        5063
    """
    if isinstance(source, Benchmark):
        return source
    if isinstance(source, LabelledImages):
        images = source if split is None else source.of_split(split)
        return Benchmark.of_labels("labelled photos", images)
    path = Path(source).expanduser()
    if find_entry(str(source)) is None and path.exists() and recognize(path) is None:
        return Benchmark.of_labels(path.name, read_labelled(path, split, levels=levels))
    if split is not None:
        raise InputError(
            f"`split` is for your own labelled photos: leave it out, {source} has its own test set"
        )
    return find_dataset(source, data).benchmark()


def _name_models(
    model: Model | str | Path, against: Model | str | Path | None
) -> dict[str, Model | str | Path]:
    """Name models by the shortest different ends of their folders' paths.

    The folder `model` of a run has the name of the run.
    """
    models = {"model": model} if against is None else {"other model": against, "model": model}
    places = [
        (each.folder or each.name or name) if isinstance(each, Model) else Path(each).resolve()
        for name, each in models.items()
    ]
    paths = [Path(place).parts for place in places]
    runs = [part[:-1] if len(part) > 1 and part[-1] == "model" else part for part in paths]
    for count in range(1, max(map(len, runs)) + 1):
        names = ["/".join(run[-count:]) for run in runs]
        if len(set(names)) == len(names):
            return dict(zip(names, models.values(), strict=True))
    raise InputError("`against` is the same model: give another model")
