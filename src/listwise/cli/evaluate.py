"""`listwise evaluate`: evaluate a model on a benchmark."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from listwise.cli import options
from listwise.cli.output import open_console, print_json, say, typed_command, warn_of_unreadable
from listwise.progress import progress_bar, total_bar

if TYPE_CHECKING:
    from listwise.results import Evaluation

EXAMPLES = """Examples:
  listwise evaluate runs/a/model roxford5k           # a data set by name
  listwise evaluate runs/a/model photos.csv --split test
  listwise evaluate runs/a/model photos --against runs/b/model
  listwise evaluate runs/small roxford5k --database-model runs/large
  listwise evaluate runs/a/model roxford5k --qe --report report.html
  listwise evaluate runs/a/model roxford5k --refine diffusion
  listwise evaluate runs/a/model roxford5k --quality best
  listwise evaluate runs/a/model roxford5k --distractors distractors.parquet
  listwise evaluate runs/a/model roxford5k --dims 2048,512,128,64
  listwise evaluate runs/a/model birds.csv --levels
"""
DIMS = (
    "Also evaluate the first dimensions of the descriptors at these lengths, stored as float32, "
    "int8 and one bit per dimension."
)
LEVELS = "Also print H-AP, NDCG and the mAP of each level, for labels such as bird/sparrow."
BEST = (
    "Quality of the results: best also evaluates local features and diffusion together, as "
    "listwise search --quality best uses them."
)
EXPAND = "Also evaluate with query expansion (αQE); on by default if the model was tuned with it."

Features = Annotated[
    Path | None,
    options.path(
        "Folder for the local features of --quality best, which later evaluations reuse.",
        show_default="local-BENCHMARK-1000",
    ),
]
Distractors = Annotated[
    Path | None, options.path("Descriptor file of photos to add to the database as negatives.")
]

BenchmarkName = Annotated[
    str,
    options.argument(
        "BENCHMARK",
        "Name or folder of a data set, or labelled photos: a folder of class folders or a .csv "
        "or .parquet table.",
    ),
]
Against = Annotated[Path | None, options.path("Second model to compare with.")]
DatabaseModel = Annotated[
    Path | None,
    options.path("Model that describes the database, if MODEL was trained with it as --teacher."),
]
Refine = Annotated[
    list[str] | None,
    options.refine("Also evaluate with this re-ranking of the first results; repeat for both."),
]


def evaluate(
    model: options.Model,
    benchmark: BenchmarkName,
    against: Against = None,
    database_model: DatabaseModel = None,
    expand: Annotated[bool | None, options.flag("--qe/--no-qe", EXPAND)] = None,
    refine: Refine = None,
    quality: Annotated[str, options.quality(BEST)] = "fast",
    features: Features = None,
    distractors: Distractors = None,
    dims: Annotated[str | None, options.numbers(DIMS)] = None,
    levels: Annotated[bool, options.flag("--levels", LEVELS)] = False,
    report: options.Report = None,
    data: options.Data = None,
    split: options.Split = None,
    max_side: options.MaxSide = None,
    scales: options.Scales = None,
    power: options.Power = None,
    precision: options.Precision = None,
    device: options.Device = "auto",
    json: options.AsJson = False,
) -> None:
    """Evaluate a model on a benchmark: print mAP and other metrics, write a report."""
    console = open_console(json)

    from listwise import results

    opened = results.open_benchmark(benchmark, data, split, levels)
    photos = opened.photo_count * (2 if against or database_model else 1)
    with progress_bar(console, "computing descriptors", photos) as advance:
        result = results.evaluate(
            model,
            opened,
            against=against,
            database_model=database_model,
            expand=expand,
            refine=cast(Any, refine or ()),
            quality=cast(Any, quality),
            features=features,
            distractors=distractors,
            dims=options.parse_numbers(dims, "dims", int) if dims else (),
            levels=levels,
            max_side=max_side,
            scales=options.parse_numbers(scales, "scales") if scales else None,
            power=power,
            precision=cast(Any, precision),
            device=device,
            on_progress=advance,
        )
    warn_of_unreadable(console, result.unreadable)
    _print(console, result, json)
    if report is not None:
        with total_bar(console, "writing the report") as update:
            result.report(report, command=typed_command(), on_progress=update)
        say(console, f"wrote the report to {report}", "bold")


def _print(console: Console, result: "Evaluation", json: bool) -> None:
    times = result.milliseconds
    if json:
        name = result.benchmark.name
        sizes = [asdict(size) for size in result.sizes]
        found: dict[str, Any] = {"benchmark": name, "figures": result.rows, "milliseconds": times}
        if result.levels:
            found["levels"] = result.levels.figures
        print_json(found | ({"sizes": sizes} if sizes else {}))
        return
    typer.echo(result.table())
    if len(times) > 1:
        each = ", ".join(f"{name} {time:.1f} ms" for name, time in times.items())
        say(console, f"time per query to rank the database: {each}")
