"""`listwise study poolings`: off-the-shelf poolings on a benchmark."""

from pathlib import Path
from typing import Annotated

import typer

from listwise.cli import options
from listwise.cli.output import open_console, print_json, typed_command, warn_of_unreadable
from listwise.cli.study.flags import TOY, draw_toy, say_where
from listwise.errors import InputError
from listwise.progress import progress_bar

EXAMPLES = """Examples:
  listwise study poolings roxford5k --whiten-on landmarks.csv --out poolings
  listwise study poolings toy --whiten-on toy --out poolings \\
      --backbone tf_efficientnet_lite0
"""


def poolings(
    benchmark: Annotated[
        str,
        options.argument(
            "BENCHMARK", "Name or folder of a benchmark, or toy to draw toy landmarks into --out."
        ),
    ],
    whiten_on: Annotated[
        str,
        options.text("Photos to learn the whitening from: a folder, table, list or data set."),
    ],
    backbone: Annotated[str, options.text("Name of a timm model.")] = "resnet101",
    weights: Annotated[
        str,
        options.text("Weights: auto, pretrained, imagenet-package, random, or a weights file."),
    ] = "auto",
    dim: options.Dim = None,
    max_side: options.MaxSide = None,
    data: options.Data = None,
    device: options.Device = "auto",
    out: Annotated[Path | None, options.path("Folder to write a table and a plot to.")] = None,
    json: options.AsJson = False,
) -> None:
    """Compare MAC, SPoC, CroW, R-MAC and GeM without training, whitened and with αQE."""
    from listwise.data.catalog import find_dataset, photos_of
    from listwise.data.toy import TOY_LABELS

    console = open_console(json)
    toy = draw_toy(console, benchmark, out) if out is not None else None
    if out is None and benchmark == TOY and not Path(TOY).exists():
        raise InputError("give a folder with `out`, into which the toy landmarks are drawn")
    if toy and whiten_on == TOY:
        whiten_on = str(toy / TOY_LABELS)
    judged = find_dataset(toy or benchmark, data).benchmark()
    others = photos_of(whiten_on, data)

    from listwise.studies.poolings import compare_poolings, poolings_table, write_poolings

    with progress_bar(
        console, "computing descriptors", judged.photo_count + len(others)
    ) as advance:
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
            print_json(row)
    else:
        typer.echo(poolings_table(rows), nl=False)
    if out is not None:
        write_poolings(out, rows, f"{backbone} off the shelf on {judged.name}", typed_command())
        say_where(console, out)
