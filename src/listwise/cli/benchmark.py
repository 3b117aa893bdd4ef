"""`listwise benchmark`: the measured comparisons."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from listwise.benchmarks import evaluation as evaluation_benchmark
    from listwise.benchmarks.loss import Row

app = typer.Typer(
    help="Measure this machine: time and memory beside the alternatives.",
    epilog="Examples:\n\nlistwise benchmark\n\nlistwise benchmark loss --sizes 256,1024,4096",
)

Device = Annotated[str, typer.Option(help="cpu, cuda ...; auto takes a GPU if there is one.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object a row.")]


@app.callback(invoke_without_command=True)
def everything(context: typer.Context, device: Device = "auto", json: Json = False) -> None:
    """Measure this machine: loss, training step, input and extraction in one table."""
    if context.invoked_subcommand is not None:
        return
    from listwise.benchmarks import summary

    _show(
        summary.run(device),
        "From photos to a training step",
        [("benchmark", "<"), ("setting", "<"), ("", "<"), ("result", ">"), ("", ">")],
        lambda line: [line.benchmark, line.setting, line.what, line.figure, line.beside],
        json,
    )


@app.command(
    epilog="Example:  listwise benchmark loss --sizes 256,1024,4096 --json",
)
def loss(
    sizes: Annotated[
        str, typer.Option(help="Batch sizes, with commas.")
    ] = "256,512,1024,2048,4096,8192,16384",
    dim: Annotated[int, typer.Option(help="Dimensions of a descriptor.", min=1)] = 2048,
    methods: Annotated[
        str | None, typer.Option(help="Some of the columns, with semicolons; all by default.")
    ] = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Forward + backward of the AP loss beside its dense transcription and others."""
    import json as encoder

    from rich.console import Console
    from rich.table import Table

    from listwise.benchmarks import loss as benchmark
    from listwise.benchmarks.measure import machine
    from listwise.errors import InputError
    from listwise.machine import Machine

    batches = _whole_numbers(sizes)
    device = "cuda" if Machine.detect(device).device.startswith("cuda") else "cpu"
    known = benchmark.methods_on(device)
    columns = known if methods is None else tuple(map(str.strip, methods.split(";")))
    if not set(columns) <= set(known):
        raise InputError(f"--methods takes some of {'; '.join(known)}, not {methods!r}")
    measured = benchmark.run(batches, dim, columns, device)
    if json:
        for row in measured:
            typer.echo(encoder.dumps(row.as_json()))
        return
    console = Console()
    rows: dict[tuple[str, int], benchmark.Row] = {}
    with console.status("measuring") as status:
        for row in measured:
            rows[row.method, row.batch] = row
            status.update(f"measured {row.method} at B = {row.batch}")
    table = Table(title=f"Forward + backward, C = {dim}, M = 20\n{machine(device)}")
    table.add_column("B", justify="right")
    for method in columns:
        table.add_column(method, justify="right")
    for batch in batches:
        table.add_row(str(batch), *(_cell(rows[method, batch]) for method in columns))
    console.print(table)


def _cell(row: "Row") -> str:
    from listwise.benchmarks.summary import milliseconds

    if row.seconds is None or row.extra_bytes is None:
        return str(row.skipped)
    return f"{milliseconds(row.seconds)}  {row.extra_bytes / 1e6:,.0f} MB"


@app.command(
    epilog="Example:  listwise benchmark step --backbone resnet50 --size 224 --batch 1024",
)
def step(
    backbone: Annotated[str, typer.Option(help="Any timm model.")] = "resnet101",
    size: Annotated[int, typer.Option(help="Side of the crops.", min=32)] = 800,
    batch: Annotated[int, typer.Option(help="Images of a step.", min=32)] = 4096,
    micro_batch: Annotated[
        int, typer.Option(help="Images whose graph is in memory at once.", min=1)
    ] = 128,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """A training step: one image at a time, in batches, folded, compiled."""
    from listwise.benchmarks import step as benchmark

    _show(
        benchmark.run(device, backbone, size, batch, micro_batch),
        f"Step of {batch} images, {backbone}, {size} × {size}",
        [
            ("", "<"),
            ("forward /s", ">"),
            ("with backward /s", ">"),
            ("step /s", ">"),
            ("ratio", ">"),
            ("200 steps", ">"),
            ("GPU memory", ">"),
            ("of the limit", ">"),
            ("gradient off by", ">"),
        ],
        lambda row: (
            [row.method, row.skipped]
            if row.skipped
            else [
                row.method,
                f"{row.forward:,.0f}",
                f"{row.both:,.0f}",
                f"{row.step:,.1f}",
                f"{row.ratio:.1f} ×",
                f"{row.minutes:,.1f} min",
                f"{row.peak_bytes / 1e9:.0f} GB",
                f"{100 * row.of_limit:.0f} %",
                f"{row.gradient_error:.1g}",
            ]
        ),
        json,
    )


@app.command("input", epilog="Example:  listwise benchmark input --photos 64 --size 224")
def input_side(
    photos: Annotated[int, typer.Option(help="JPEG photos to make.", min=1)] = 256,
    size: Annotated[int, typer.Option(help="Side of the crops.", min=32)] = 800,
    folder: Annotated[
        Path | None, typer.Option(help="Real photos to take instead.", exists=True)
    ] = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Photos decoded and augmented a second, by one core, by all, and by a GPU."""
    from listwise.benchmarks import input as benchmark
    from listwise.machine import Machine

    _show(
        benchmark.run(photos, size, folder=folder, device=Machine.detect(device).device),
        f"Crops of {size} × {size}",
        [("", "<"), ("workers", ">"), ("photos/s", ">"), ("ms of a core", ">")],
        lambda row: [
            row.step,
            str(row.workers or ""),
            row.skipped or ("" if row.per_second is None else f"{row.per_second:,.0f}"),
            "" if row.core_ms is None else f"{row.core_ms:.2f}",
        ],
        json,
    )


@app.command(epilog="Example:  listwise benchmark extraction --photos 64 --backbone resnet50")
def extraction(
    photos: Annotated[int, typer.Option(help="JPEG photos to make.", min=1)] = 512,
    backbone: Annotated[str, typer.Option(help="Any timm model.")] = "resnet101",
    width: Annotated[int, typer.Option(help="Of the photos.", min=32)] = 1024,
    height: Annotated[int, typer.Option(help="Of the photos.", min=32)] = 768,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """JPEG files to descriptors, beside one photo at a time in float32."""
    from listwise.benchmarks import extraction as benchmark

    _show(
        benchmark.run(device, photos, backbone, width, height),
        f"Photos of {width} × {height} through {backbone}",
        [
            ("", "<"),
            ("", "<"),
            ("photos", ">"),
            ("photos/s", ">"),
            ("ratio", ">"),
            ("least cosine", ">"),
        ],
        lambda row: [
            row.method,
            row.precision,
            f"{row.photos:,}",
            f"{row.per_second:,.1f}",
            f"{row.times_the_loop:.1f} ×",
            f"{row.cosine:.5f}",
        ],
        json,
    )


def _show(
    rows: Iterator[Any],
    title: str,
    columns: Sequence[tuple[str, str]],
    cells: Callable[[Any], list[str]],
    json: bool,
) -> None:
    """Print rows as they come in JSON, or all of them as a table with the machine below."""
    import json as encoder

    from rich.console import Console
    from rich.table import Table

    from listwise.benchmarks.measure import machine

    console = Console(stderr=json)
    table = Table(title=title)
    for name, side in columns:
        table.add_column(name, justify="right" if side == ">" else "left", no_wrap=True)
    with console.status("measuring") as status:
        for row in rows:
            table.add_row(*cells(row))
            status.update(f"measured {' '.join(cells(row)[:2])}")
            if json:
                typer.echo(encoder.dumps(row.as_json()))
    if not json:
        console.print(table)
        console.print(machine("auto"))


@app.command(
    epilog="Example:  listwise benchmark evaluation --sizes 100000 --json",
)
def evaluation(
    sizes: Annotated[
        str, typer.Option(help="Images in the database, with commas.")
    ] = "100000,1000000",
    dim: Annotated[int, typer.Option(help="Dimensions of a descriptor.", min=1)] = 2048,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where descriptors lie meanwhile (8 GB a million).", exists=True),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a row.")] = False,
) -> None:
    """Evaluation among distractors: counted ranks beside a score matrix that is sorted."""
    import json as encoder

    from rich.console import Console
    from rich.table import Table

    from listwise.benchmarks import evaluation as benchmark
    from listwise.benchmarks.measure import machine

    images = _whole_numbers(sizes)
    if json:
        for row in benchmark.run(images, dim, folder):
            typer.echo(encoder.dumps(row.as_json()))
        return
    console = Console()
    rows: dict[tuple[int, str], benchmark.Row] = {}
    with console.status("measuring") as status:
        for row in benchmark.run(images, dim, folder, status.update):
            rows[row.images, row.method] = row
    table = Table(title=f"{benchmark.QUERIES} queries, C = {dim}, files in the page cache")
    for column in ("images", "method"):
        table.add_column(column, no_wrap=True)
    for column in ("s", "MB", "Easy", "Medium", "Hard", "faster"):
        table.add_column(column, justify="right", no_wrap=True)
    pairs = [
        (row, rows[row.images, row.method.replace("listwise", "plain")]) for row in rows.values()
    ]
    for row, plain in pairs:
        table.add_row(f"{row.images:,}", row.method, *_evaluation_cells(row, plain.seconds))
    console.print(table)
    console.print(machine())
    apart = [
        abs(value - plain.figures[name])
        for row, plain in pairs
        if plain.figures
        for name, value in row.figures.items()
    ]
    console.print(f"mAPs of the two ways are at most {max(apart, default=0.0):.0e} apart")
    for row in rows.values():
        parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in row.parts.items())
        console.print(f"{row.images:,} {row.method}: {parts or row.skipped}")


def _evaluation_cells(row: "evaluation_benchmark.Row", plain_seconds: float | None) -> list[str]:
    if row.seconds is None or row.extra_bytes is None:
        return ["–"]
    faster = plain_seconds / row.seconds if plain_seconds else 1.0
    return [
        f"{row.seconds:.2f}",
        f"{row.extra_bytes / 1e6:,.0f}",
        *([f"{100 * value:.2f}" for value in row.figures.values()] or [""] * 3),
        f"{faster:.1f} ×" if "listwise" in row.method else "",
    ]


@app.command(
    epilog="Example:  listwise benchmark search --sizes 100000 --json",
)
def search(
    sizes: Annotated[
        str, typer.Option(help="Descriptors in the index, with commas.")
    ] = "100000,1000000",
    dim: Annotated[int, typer.Option(help="Dimensions of a descriptor.", min=1)] = 2048,
    server: Annotated[
        bool, typer.Option("--server/--no-server", help="Measure the server too.")
    ] = True,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where indexes lie meanwhile (20 GB a million).", exists=True),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a row.")] = False,
) -> None:
    """Search in an index beside FAISS, hnswlib and LanceDB, and the server with many clients."""
    import json as encoder

    from rich.console import Console
    from rich.table import Table

    from listwise.benchmarks import search as benchmark
    from listwise.benchmarks.measure import machine

    counts = _whole_numbers(sizes)
    console = Console(stderr=json)
    found: list[benchmark.Row] = []
    served: list[benchmark.ServerRow] = []
    with console.status("measuring") as status:
        for row in benchmark.run(counts, dim, folder, status.update):
            found.append(row)
            if json:
                typer.echo(encoder.dumps(row.as_json()))
        if server:
            status.update("the server")
            for served_row in benchmark.run_server():
                served.append(served_row)
                if json:
                    typer.echo(encoder.dumps(served_row.as_json()))
    if json:
        return
    table = Table(title=f"The ten nearest of {benchmark.QUERIES} queries, C = {dim}")
    for column in ("entries", "method"):
        table.add_column(column, no_wrap=True)
    for column in ("recall@10", "queries/s", "p50 ms", "p99 ms", "ready s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("how")
    for row in found:
        table.add_row(
            f"{row.entries:,}",
            row.method,
            f"{row.recall:.3f}",
            f"{row.per_second:.1f}",
            f"{row.p50:.1f}",
            f"{row.p99:.1f}",
            f"{row.ready:.1f}",
            row.note,
        )
    console.print(table)
    if served:
        table = Table(title="Search by photo through the server, on the same cores")
        for column in ("clients", "answers/s", "p50 ms", "p99 ms", "refused"):
            table.add_column(column, justify="right")
        for each in served:
            table.add_row(
                str(each.clients),
                f"{each.per_second:.1f}",
                f"{each.p50:.0f}",
                f"{each.p99:.0f}",
                str(each.refused),
            )
        console.print(table)
    console.print(machine())


@app.command(
    epilog="Example:  listwise benchmark local --photos 1000 --json",
)
def local(
    photos: Annotated[int, typer.Option(help="Photos in the index.", min=20)] = 5000,
    features: Annotated[int, typer.Option(help="Local features of a photo.", min=1)] = 2000,
    words: Annotated[int, typer.Option(help="Visual words.", min=2)] = 65_536,
    folder: Annotated[
        Path | None, typer.Option(help="Where the index lies meanwhile.", exists=True)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a row.")] = False,
) -> None:
    """Local features: extraction, words, inverted file and queries beside the package asmk."""
    import json as encoder

    from rich.console import Console
    from rich.table import Table

    from listwise.benchmarks import local as benchmark
    from listwise.benchmarks.measure import machine

    console = Console(stderr=json)
    table = Table(title=f"{photos:,} photos of {features} features, {words:,} words")
    table.add_column("step", no_wrap=True)
    for column in ("listwise", "asmk", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    with console.status("measuring") as status:
        for row in benchmark.run(photos, features, words, folder, status.update):
            if json:
                typer.echo(encoder.dumps(row.as_json()))
            ratio = "" if row.asmk is None else f"{row.asmk / row.listwise:.1f} ×"
            table.add_row(
                row.step,
                f"{row.listwise:,.4g} {row.unit}",
                row.skipped or ("" if row.asmk is None else f"{row.asmk:,.4g} {row.unit}"),
                ratio,
                ", ".join(f"{name} {value:.2g}" for name, value in row.figures.items()),
            )
    if not json:
        console.print(table)
        console.print(machine())


def _whole_numbers(sizes: str) -> list[int]:
    from listwise.errors import InputError

    try:
        return sorted({int(size) for size in sizes.split(",")})
    except ValueError:
        raise InputError(f"--sizes takes whole numbers with commas, not {sizes!r}") from None
