"""`listwise evaluate`: a model and a benchmark to the numbers that papers print."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from listwise.cli.bars import progress_bar
from listwise.cli.options import parse_numbers
from listwise.cli.output import say, warn_of_unreadable

if TYPE_CHECKING:
    from rich.console import Console

    from listwise.data.catalog import Benchmark
    from listwise.results.report import ModelResult
    from listwise.studies import Searched

EXAMPLES = """Examples:

  listwise evaluate runs/a/model roxford5k --data data           a benchmark by name

  listwise evaluate runs/a/model data/roxford5k --qe --report report.html

  listwise evaluate runs/a/model photos --against runs/b/model   your own labelled photos

  listwise evaluate runs/a/model roxford5k --distractors revisitop1m.parquet
"""


def evaluate(
    model: Annotated[Path, typer.Argument(help="A model folder.")],
    benchmark: Annotated[
        str,
        typer.Argument(
            help="A data set's name or folder, or labelled photos (class folders, .csv, .parquet)."
        ),
    ],
    against: Annotated[
        Path | None, typer.Option(help="Another model folder to compare with.")
    ] = None,
    qe: Annotated[bool, typer.Option("--qe", help="Also with query expansion (αQE).")] = False,
    distractors: Annotated[
        Path | None, typer.Option(help="Descriptor file of further photos, none of them right.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page to look at (.html).")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the data sets.")] = None,
    split: Annotated[str | None, typer.Option(help="Of labelled photos: this split alone.")] = None,
    max_side: Annotated[
        int | None, typer.Option(min=1, help="Reduce photos to this long side; never by default.")
    ] = None,
    scales: Annotated[str, typer.Option(help="Sizes each photo is seen at, with commas.")] = "1",
    power: Annotated[float, typer.Option(help="Of the mean over the scales.")] = 3.0,
    precision: Annotated[
        str | None, typer.Option(metavar="float32|bfloat16", help="How the network computes.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Search a benchmark with a model: mAP and its relatives, and a page to look at."""
    import json as encoder

    from rich.console import Console

    sizes = parse_numbers(scales, "scales")
    opened = _open_benchmark(benchmark, data, split)

    from listwise.descriptors import DescriptorFile, load_model
    from listwise.errors import InputError
    from listwise.results.evaluate import evaluate_searched, figures, search_benchmark

    if opened.kind == "labelled" and (qe or distractors is not None):
        raise InputError(
            f"{opened.name} is a labelled set: --qe and --distractors are for benchmarks whose "
            "queries are judged"
        )
    if report is not None and not report.parent.is_dir():
        raise InputError(f"{report}: there is no folder {report.parent} for the report")
    if distractors is not None and against is not None:
        raise InputError("--distractors belong to one model: leave out --against")
    more = DescriptorFile.open(distractors) if distractors else None
    console = Console(stderr=json, highlight=False)
    rows: dict[str, dict[str, dict[str, float]]] = {}
    searched: dict[str, Searched] = {}
    for name, folder in _names(model, against).items():
        network = load_model(folder, device)
        if more is not None:
            more.require(network.fingerprint)
        settings = {
            "max_side": max_side,
            "scales": sizes,
            "power": power,
            "precision": precision,
        }
        alone = opened.queries is opened.database
        photos = len(opened.database) + (0 if alone else len(opened.queries))
        with progress_bar(console, f"describing with {name}", photos) as advance:
            searched[name] = search_benchmark(network, opened, advance, **settings)
        warn_of_unreadable(console, searched[name].unreadable)
        with console.status("ranking"):
            rows[name] = figures(evaluate_searched(searched[name], distractors=more))
            if qe:
                again = evaluate_searched(searched[name], expand=True, distractors=more)
                rows[f"{name} + αQE"] = figures(again)
    if json:
        typer.echo(encoder.dumps({"benchmark": opened.name, "figures": rows}, ensure_ascii=False))
    else:
        print_table(console, opened.name, rows)
    if report is not None:
        _write(report, opened, searched, rows, len(more) if more else 0, console)
        say(console, f"the report is in {report}", "bold")


def _open_benchmark(source: str, root: Path | None, split: str | None) -> "Benchmark":
    """A data set's own benchmark, or labelled photos searched among themselves."""
    from listwise.data import read_labelled
    from listwise.data.catalog import Benchmark, find_dataset, find_entry, recognise

    path = Path(source).expanduser()
    if find_entry(source) is None and path.exists() and recognise(path) is None:
        images = read_labelled(path, split)
        return Benchmark(path.name, "labelled", images, images)
    if split is not None:
        from listwise.errors import InputError

        raise InputError(f"--split is for your own labelled photos; {source} has its own test part")
    return find_dataset(source, root).benchmark()


def _names(model: Path, against: Path | None) -> dict[str, Path]:
    """The models by the shortest ends of their paths that tell them apart."""
    folders = [model] if against is None else [against, model]
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names) and (count > 1 or names != ["model"]):
            return dict(zip(names, folders, strict=True))
    from listwise.errors import InputError

    raise InputError("--against is the same model: give another")


def print_table(
    console: "Console", benchmark: str, rows: dict[str, dict[str, dict[str, float]]]
) -> None:
    """Print the figures of each row: name -> protocol -> metric -> value from 0 to 1."""
    from rich.table import Table

    table = Table(title=benchmark, title_justify="left")
    table.add_column("", overflow="fold")
    table.add_column("")
    for metric in next(iter(next(iter(rows.values())).values())):
        table.add_column(metric, justify="right")
    for name, protocols in rows.items():
        for protocol, found in protocols.items():
            first = protocol == next(iter(protocols))
            last = protocol == list(protocols)[-1]
            values = ("–" if v != v else f"{100 * v:.1f}" for v in found.values())
            table.add_row(name if first else "", protocol, *values, end_section=last)
    console.print(table)


def _write(
    path: Path,
    benchmark: "Benchmark",
    searched: "dict[str, Searched]",
    rows: dict[str, dict[str, dict[str, float]]],
    distractors: int,
    console: "Console",
) -> None:
    from dataclasses import replace

    from listwise.results.report import TableRow, write_report

    shown = [replace(result, figures=rows[result.name]) for result in _shown(searched)]
    notes = []
    if distractors:
        notes.append(
            f"The figures are with {distractors} distractors; curves, lists and the AP of single "
            "queries are without them."
        )

    with progress_bar(console, "making the report", 0) as advance:
        write_report(
            path,
            f"{benchmark.name}: {' and '.join(searched)}",
            shown,
            benchmark=benchmark.name,
            command=" ".join(["listwise", *sys.argv[1:]]),
            table=[TableRow(name, found) for name, found in rows.items() if name not in searched],
            notes=notes,
            on_progress=lambda done, total: advance(1),
        )


def _shown(searched: "dict[str, Searched]") -> "list[ModelResult]":
    """What the report shows of each model."""
    from listwise.data.ground_truth import GroundTruth
    from listwise.data.oxford import OxfordGroundTruth
    from listwise.results.evaluate import class_names, evaluate_classes, scores
    from listwise.results.report import (
        Gallery,
        Photos,
        labelled_results,
        oxford_result,
        revisited_result,
    )

    benchmark = next(iter(searched.values())).benchmark
    truth, queries, database = benchmark.truth, benchmark.queries, benchmark.database
    if isinstance(truth, GroundTruth):
        return [
            revisited_result(name, scores(found), truth, queries.paths, database.paths)
            for name, found in searched.items()
        ]
    if isinstance(truth, OxfordGroundTruth):
        return [
            oxford_result(name, scores(found), truth, queries.paths, database.paths)
            for name, found in searched.items()
        ]
    gallery = None
    if queries is not database:
        gallery = Gallery(
            {name: found.database for name, found in searched.items()},
            class_names(database),
            Photos(database.ids, database.paths, database.boxes),
        )
    return labelled_results(
        {name: found.queries for name, found in searched.items()},
        class_names(queries),
        Photos(queries.ids, queries.paths, queries.boxes),
        {name: evaluate_classes(found) for name, found in searched.items()},
        gallery,
    )
