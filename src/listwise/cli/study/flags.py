"""Options of the studies, and what their commands share."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from listwise.cli import options
from listwise.cli.output import say
from listwise.progress import total_bar

TOY = "toy"
Photos = Annotated[
    str,
    options.argument(
        "PHOTOS",
        "Labelled photos: a folder of class folders, a .csv or .parquet table, the name of a data "
        "set, or toy, which draws toy landmarks into --out.",
    ),
]
Images = Annotated[
    int | None,
    options.integer(
        "Number of training images per run.",
        min=1,
        show_default="ten times the number of photos; 3072 with --preset small",
    ),
]
Seeds = Annotated[
    int | None,
    options.integer(
        "Number of runs per variant, each with a different seed.",
        min=1,
        show_default="3; 2 with --preset small",
    ),
]
Rates = Annotated[
    str | None,
    options.numbers(
        "Learning rates to try, separated by commas; each variant uses the one with the best "
        "validation mAP of its first run."
    ),
]
Validations = Annotated[
    int | None,
    options.integer(
        "Maximum number of validations per run.", min=1, show_default="10; 4 with --preset small"
    ),
]
AlsoBenchmark = Annotated[
    str | None,
    options.text(
        "Also evaluate the best network of each run on this data set, given by name or folder, "
        "without and with whitening learned from the training photos."
    ),
]
Preset = Annotated[
    str,
    typer.Option(
        metavar="auto|paper|small",
        help="Source of the settings that you do not give: auto chooses them for the photos and "
        "the machine, paper uses the values of the paper, small suits two CPU cores.",
    ),
]
Config = Annotated[Path | None, options.path("YAML file with settings for all runs.")]


def draw_toy(console: Console, source: str, out: Path) -> Path | None:
    """Draw the toy landmarks into `out` if `source` is toy and no file or folder has that name."""
    if source != TOY or Path(TOY).exists():
        return None
    from listwise.data.toy import make_toy_landmarks

    with total_bar(console, "drawing toy landmarks") as update:
        return make_toy_landmarks(out / "toy-landmarks", progress=update)


def say_where(console: Console, out: Path) -> None:
    """Print which files a study wrote."""
    say(console, f"wrote results.csv, table.md and plot.svg to {out}", "bold")
