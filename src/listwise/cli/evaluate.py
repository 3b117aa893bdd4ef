"""`listwise evaluate`: a model and a benchmark to the numbers that papers print."""

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from listwise.cli import options
from listwise.cli.output import open_console, print_json, say, typed_command, warn_of_unreadable
from listwise.progress import progress_bar, total_bar

EXAMPLES = options.examples("""Examples:
  listwise evaluate runs/a/model roxford5k --data data           a benchmark by name
  listwise evaluate runs/a/model data/roxford5k --qe --report report.html
  listwise evaluate runs/a/model photos --against runs/b/model   your own labelled photos
  listwise evaluate runs/a/model roxford5k --distractors revisitop1m.parquet
""")


def evaluate(
    model: options.Model,
    benchmark: Annotated[
        str,
        typer.Argument(
            metavar="BENCHMARK",
            help="The name or folder of a data set, or labelled photos (class folders, a .csv or "
            ".parquet table).",
        ),
    ],
    against: Annotated[Path | None, typer.Option(help="A second model to compare with.")] = None,
    expand: Annotated[
        bool, typer.Option("--qe", help="Also evaluate with α query expansion (αQE).")
    ] = False,
    distractors: Annotated[
        Path | None,
        typer.Option(help="Descriptor file of further photos to search in, all of them negatives."),
    ] = None,
    report: options.Report = None,
    data: options.Data = None,
    split: options.Split = None,
    max_side: options.MaxSide = None,
    scales: options.Scales = "1",
    power: options.Power = 3.0,
    precision: options.Precision = None,
    device: options.Device = "auto",
    json: options.AsJson = False,
) -> None:
    """Evaluate a model on a benchmark: mAP and the other figures, and an HTML report."""
    console = open_console(json)

    from listwise import results

    opened = results.open_benchmark(benchmark, data, split)
    photos = opened.photo_count * (1 if against is None else 2)
    with progress_bar(console, "describing photos", photos) as advance:
        result = results.evaluate(
            model,
            opened,
            against=against,
            expand=expand,
            distractors=distractors,
            max_side=max_side,
            scales=options.parse_numbers(scales, "scales"),
            power=power,
            precision=cast(Any, precision),
            device=device,
            on_progress=advance,
        )
    warn_of_unreadable(console, result.unreadable)
    if json:
        print_json({"benchmark": opened.name, "figures": result.rows})
    else:
        typer.echo(result.table())
    if report is not None:
        with total_bar(console, "writing the report") as update:
            result.report(report, command=typed_command(), on_progress=update)
        say(console, f"the report is in {report}", "bold")
