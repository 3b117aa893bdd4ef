"""Options of the studies, and what their commands share."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from listwise.cli.output import say
from listwise.progress import total_bar

TOY = "toy"
Photos = Annotated[
    str,
    typer.Argument(
        metavar="PHOTOS",
        help="Labelled photos: class folders, a .csv or .parquet table, the name of a data set, or "
        "toy, which draws toy landmarks into --out.",
    ),
]
Images = Annotated[
    int | None,
    typer.Option(
        min=1, help="Training images that each run sees.", show_default="ten times the photos"
    ),
]
Seeds = Annotated[
    int | None, typer.Option(min=1, help="Runs per variant.", show_default="3, small: 2")
]
Rates = Annotated[
    str | None,
    typer.Option(
        help="Learning rates separated by commas: each variant keeps the one that is best in "
        "validation with the first seed."
    ),
]
Validations = Annotated[
    int | None,
    typer.Option(min=1, help="Maximum validations per run.", show_default="10, small: 4"),
]
AlsoBenchmark = Annotated[
    str | None,
    typer.Option(
        help="Also search this data set, by name or folder, with the network that is best in "
        "validation: plain, and whitened on the training photos."
    ),
]
Preset = Annotated[
    str,
    typer.Option(
        metavar="auto|paper|small",
        help="Where settings come from that you do not give: chosen from the photos and the "
        "machine, the paper's, or small ones for two cores.",
    ),
]
Config = Annotated[Path | None, typer.Option(help="YAML file with settings for all runs.")]


def draw_toy(console: Console, source: str, out: Path) -> Path | None:
    """The toy landmarks, drawn into `out`, if they are meant; a folder of that name goes first."""
    if source != TOY or Path(TOY).exists():
        return None
    from listwise.data.toy import make_toy_landmarks

    with total_bar(console, "drawing toy landmarks") as update:
        return make_toy_landmarks(out / "toy-landmarks", progress=update)


def say_where(console: Console, out: Path) -> None:
    """Name the files that a study writes."""
    say(console, f"results.csv, table.md and plot.svg are in {out}", "bold")
