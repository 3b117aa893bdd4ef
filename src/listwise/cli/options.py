"""Options and arguments that several commands share, each declared once."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from listwise.errors import InputError
from listwise.settings import MAX_SEED


def option(metavar: str, help: str, *names: str, **settings: Any) -> Any:
    """Declare an option that takes a value; the name is the parameter's if none is given."""
    return typer.Option(*names, metavar=metavar, help=help, **settings)


# Options by the kind of their value.
path = partial(option, "PATH")
text = partial(option, "TEXT")
integer = partial(option, "INTEGER")
decimal = partial(option, "FLOAT")
numbers = partial(option, "NUMBERS")
box = partial(option, "X0,Y0,X1,Y1")
entry = partial(option, "ID")
refine = partial(option, "superglobal|diffusion")
quality = partial(option, "fast|best")


def flag(name: str, help: str) -> Any:
    """Declare a flag such as --json, or a pair such as --verify/--no-verify."""
    return typer.Option(name, help=help)


def argument(metavar: str, help: str, **settings: Any) -> Any:
    """Declare an argument."""
    return typer.Argument(metavar=metavar, help=help, **settings)


def _in_a_folder(file: Path | None) -> Path | None:
    """Refuse a file that cannot be written, before the work that it is for."""
    if file is not None and not file.parent.is_dir():
        raise InputError(f"cannot write {file}: the folder {file.parent} does not exist")
    return file


def _existing(index: str) -> str:
    """Refuse an index that does not exist, before the libraries that open one are imported."""
    if "://" not in index and not Path(index).exists():
        raise InputError(
            f"no index at {index}: create one with listwise index build {index} PHOTOS"
        )
    return index


# What a command reads.
Model = Annotated[
    str, argument("MODEL", "Model folder, run folder, ONNX file, or timm name such as resnet50.")
]
ModelFolder = Annotated[Path, argument("MODEL", "Model folder or run folder.")]
Source = Annotated[
    str,
    argument(
        "PHOTOS",
        "Folder of photos, .csv or .parquet table with a column path, .txt list of paths, or name "
        "of a data set.",
    ),
]
LABELLED_PHOTOS = (
    "Labelled photos: a folder of class folders, a .csv or .parquet table with columns path and "
    "label, a .txt list, or the name of a data set."
)
INDEX = "Index: a folder, milvus://HOST:PORT/NAME, or a .db file of milvus-lite."
IndexPlace = Annotated[str, argument("INDEX", INDEX, callback=_existing)]
AnyIndexPlace = Annotated[str, argument("INDEX", INDEX)]
IndexModel = Annotated[
    Path | None,
    path("Model folder or ONNX file, if the model has moved.", show_default="as in the index"),
]
Where = Annotated[str | None, text('Filter on attributes, such as "price < 100".')]
Data = Annotated[Path | None, path("Folder that contains the data sets.", show_default="data")]
Split = Annotated[str | None, text("Use only the photos of this split, such as test.")]

# How photos are described.
MaxSide = Annotated[
    int | None,
    integer(
        "Reduce photos whose longer side has more pixels than this; 0 keeps the original size.",
        min=0,
        show_default="the tuned size, or the original size",
    ),
]
SCALES = "Scales at which each photo is described, separated by commas: 1,0.7071,0.5."
Scales = Annotated[str | None, numbers(SCALES, show_default="the tuned scales, or 1")]
POWER = "Power of the generalized mean over the descriptors of several scales."
Power = Annotated[float | None, decimal(POWER, show_default="3")]
PRECISION = "Precision in which the network computes."
HALF = "bfloat16 on a GPU that supports it, else float32"
Precision = Annotated[str | None, option("float32|bfloat16", PRECISION, show_default=HALF)]
Dim = Annotated[
    int | None,
    integer("Number of dimensions to keep after whitening.", min=1, show_default="all"),
]
Delf = Annotated[
    Path | None,
    path(
        "Folder of deep local features (DELF) that listwise local train wrote.",
        show_default="HesAff-rSIFT instead of DELF",
    ),
]
Count = Annotated[
    int | None,
    integer(
        "Maximum number of local features per photo.",
        min=1,
        show_default="2000; 1000 with --delf",
    ),
]

# How a command runs.
Device = Annotated[
    str, text("Device: cpu, cuda, cuda:1, or auto, which uses a GPU if one is available.")
]
WORKERS = "Number of processes that decode photos."
Workers = Annotated[
    int | None, integer(WORKERS, min=0, show_default="from the number of CPU cores")
]
Strict = Annotated[bool, flag("--strict", "Stop at the first photo that cannot be read.")]
Seed = Annotated[int, integer("Seed of all random numbers.", min=0, max=MAX_SEED)]

# What a command prints and writes.
AsJson = Annotated[bool, flag("--json", "Print the result as JSON.")]
Report = Annotated[Path | None, path("Write an HTML report to this file.", callback=_in_a_folder)]


def parse_numbers(given: str, option: str, kind: type = float) -> tuple[Any, ...]:
    """Parse numbers separated by commas; `option` is the name that an error shows."""
    try:
        return tuple(kind(part) for part in given.split(","))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise InputError(f"`{option}` must be {what} separated by commas, not {given!r}") from None


def parse_box(given: str) -> tuple[float, float, float, float]:
    """Parse a box x0,y0,x1,y1 in pixels."""
    edges = parse_numbers(given, "box")
    if len(edges) != 4:
        raise InputError(f"`box` must be four numbers x0,y0,x1,y1, not {given!r}")
    return edges[0], edges[1], edges[2], edges[3]
