"""Options that several `listwise local` commands share."""

from pathlib import Path
from typing import Annotated

import typer

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
FeatureFiles = Annotated[list[Path], typer.Argument(help="Files of listwise local extract.")]
