"""`listwise benchmark`: the measured comparisons."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from listwise.benchmarks.loss import Row

app = typer.Typer(help="Measure this machine: time and memory beside the alternatives.")


@app.callback()
def _group() -> None:
    pass


@app.command(
    epilog="Example:  listwise benchmark loss --sizes 256,1024,4096 --json",
)
def loss(
    sizes: Annotated[
        str, typer.Option(help="Batch sizes, with commas.")
    ] = "256,512,1024,2048,4096,8192,16384",
    dim: Annotated[int, typer.Option(help="Dimensions of a descriptor.", min=1)] = 2048,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a row.")] = False,
) -> None:
    """Forward + backward of the AP loss, its dense transcription, FastAP and SmoothAP."""
    import json as encoder

    from rich.console import Console
    from rich.table import Table

    from listwise.benchmarks import loss as benchmark
    from listwise.benchmarks.measure import machine
    from listwise.errors import InputError

    try:
        batches = sorted({int(size) for size in sizes.split(",")})
    except ValueError:
        raise InputError(f"--sizes takes whole numbers with commas, not {sizes!r}") from None
    if json:
        for row in benchmark.run(batches, dim):
            typer.echo(encoder.dumps(row.as_json()))
        return
    console = Console()
    rows: dict[tuple[str, int], benchmark.Row] = {}
    with console.status("measuring") as status:
        for row in benchmark.run(batches, dim):
            rows[row.method, row.batch] = row
            status.update(f"measured {row.method} at B = {row.batch}")
    table = Table(title=f"Forward + backward, C = {dim}, M = 20\n{machine()}")
    table.add_column("B", justify="right")
    for method in benchmark.METHODS:
        table.add_column(method, justify="right")
    for batch in batches:
        table.add_row(str(batch), *(_cell(rows[method, batch]) for method in benchmark.METHODS))
    console.print(table)


def _cell(row: "Row") -> str:
    if row.seconds is None or row.extra_bytes is None:
        return str(row.skipped)
    return f"{row.seconds:.2f} s  {row.extra_bytes / 1e6:,.0f} MB"
