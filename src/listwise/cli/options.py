"""Options and arguments that several commands share, each declared once."""

from pathlib import Path
from typing import Annotated

import typer

from listwise.errors import InputError


def _in_a_folder(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written, before the work that it is for."""
    if path is not None and not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}")
    return path


def examples(text: str) -> str:
    """The epilog of a command: indented lines stay lines, others are joined to paragraphs."""
    return text.replace("\n  ", "\n\n  ")


# What a command reads.
Model = Annotated[
    str,
    typer.Argument(
        help="A model folder, the folder of a run, or a timm backbone such as resnet50."
    ),
]
ModelFolder = Annotated[
    Path, typer.Argument(metavar="MODEL", help="A model folder, or the folder of a run.")
]
Source = Annotated[
    str,
    typer.Argument(
        metavar="PHOTOS",
        help="A folder, a .csv or .parquet table with a path column, a .txt list, or the name of a "
        "data set.",
    ),
]
IndexPlace = Annotated[
    str,
    typer.Argument(
        metavar="INDEX", help="An index: a folder, milvus://host:port/name, or a .db file."
    ),
]
IndexModel = Annotated[
    Path | None, typer.Option(help="The model folder of the index.", show_default="where it was")
]
Data = Annotated[
    Path | None, typer.Option(help="Folder that holds the data sets.", show_default="data")
]
Split = Annotated[
    str | None, typer.Option(help="Use only this split of a labelled table, such as test.")
]

# How photos are described.
MaxSide = Annotated[
    int | None,
    typer.Option(
        min=1, help="Reduce photos to this long side, in pixels.", show_default="original size"
    ),
]
Scales = Annotated[
    str, typer.Option(help="Sizes at which each photo is described, separated by commas.")
]
Power = Annotated[
    float, typer.Option(help="Power of the generalized mean over the descriptors of the scales.")
]
Precision = Annotated[
    str | None,
    typer.Option(
        metavar="float32|bfloat16",
        help="Precision of the network.",
        show_default="bfloat16 on a GPU that supports it",
    ),
]
Dim = Annotated[
    int | None,
    typer.Option(min=1, help="Dimensions to keep after whitening.", show_default="all that vary"),
]
Delf = Annotated[
    Path | None,
    typer.Option(
        help="Folder of deep local features, from listwise local train.",
        show_default="HesAff-rSIFT",
    ),
]
Count = Annotated[
    int | None,
    typer.Option(
        min=1, help="Maximum number of features per photo.", show_default="2000, DELF 1000"
    ),
]

# How a command runs.
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...; auto uses a GPU if present.")]
Workers = Annotated[
    int | None,
    typer.Option(min=0, help="Processes that decode photos.", show_default="from the cores"),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Stop at the first photo that cannot be read.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of all random numbers.")]

# What a command prints and writes.
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Report = Annotated[
    Path | None, typer.Option(callback=_in_a_folder, help="Write an HTML report to this file.")
]


def parse_numbers(text: str, option: str) -> tuple[float, ...]:
    """Parse numbers separated by commas; `option` is the name that an error shows."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"`{option}` takes numbers separated by commas, not {text!r}") from None


def parse_integers(text: str, option: str) -> tuple[int, ...]:
    """Parse whole numbers separated by commas; `option` is the name that an error shows."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"`{option}` takes whole numbers separated by commas, not {text!r}"
        ) from None


def parse_box(text: str) -> tuple[float, float, float, float]:
    """Parse a box x0,y0,x1,y1 in pixels."""
    edges = parse_numbers(text, "box")
    if len(edges) != 4:
        raise InputError(f"`box` takes four numbers x0,y0,x1,y1, not {text!r}")
    return edges[0], edges[1], edges[2], edges[3]
