"""`listwise study`: the paper's comparisons, on anybody's data."""

from pathlib import Path
from typing import Annotated

import typer

from listwise.cli.bars import counting
from listwise.cli.extract import warn_of_unreadable

app = typer.Typer(
    help="The paper's comparisons, on your data.",
    epilog="Example:  listwise study poolings roxford5k --whiten-on landmarks.csv",
)


@app.callback()
def _group() -> None:
    pass


@app.command(
    epilog="Example:  listwise study poolings roxford5k --whiten-on landmarks.csv "
    "--backbone resnet50 --weights resnet50.safetensors"
)
def poolings(
    benchmark: Annotated[str, typer.Argument(help="A judged benchmark: its name or folder.")],
    whiten_on: Annotated[
        str,
        typer.Option(help="Photos to learn the whitening on: a folder, table, list or data set."),
    ],
    backbone: Annotated[str, typer.Option(help="Any timm model.")] = "resnet101",
    weights: Annotated[
        str, typer.Option(help="A file, auto, pretrained, imagenet-package or random.")
    ] = "auto",
    dim: Annotated[
        int | None, typer.Option(min=1, help="Dimensions that the whitening keeps.")
    ] = None,
    max_side: Annotated[
        int | None, typer.Option(min=1, help="Reduce photos to this long side; never by default.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the data sets.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a row.")] = False,
) -> None:
    """Off-the-shelf MAC, SPoC, CroW, R-MAC and GeM: plain, whitened, whitened + αQE."""
    import json as encoder
    from dataclasses import asdict

    from rich.console import Console

    from listwise.data.catalog import find_dataset, photos_of
    from listwise.errors import InputError

    judged = find_dataset(benchmark, data).benchmark()
    if judged.kind == "labelled":
        raise InputError(f"{benchmark} is a labelled set: this study takes a judged benchmark")
    others = photos_of(whiten_on, data)

    from listwise.studies.poolings import compare_poolings

    console = Console(stderr=json, highlight=False)
    photos = len(judged.queries) + len(judged.database) + len(others)
    with counting(console, "describing", photos) as advance:
        rows = compare_poolings(
            judged,
            others,
            backbone,
            weights,
            dim=dim,
            max_side=max_side,
            device=device,
            on_progress=advance,
            on_unreadable=lambda errors: warn_of_unreadable(console, errors),
        )
    if json:
        for row in rows:
            typer.echo(encoder.dumps(asdict(row), ensure_ascii=False))
        return
    protocols = list(rows[0].mean_average_precision)
    typer.echo(f"| pooling | | {' | '.join(protocols)} |")
    typer.echo(f"|---|---|{'---:|' * len(protocols)}")
    for row in rows:
        values = " | ".join(f"{100 * row.mean_average_precision[p]:.1f}" for p in protocols)
        typer.echo(f"| {row.pooling} | {row.variant} | {values} |")
