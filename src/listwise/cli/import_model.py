"""`listwise import`: a network that others have released, as a model folder."""

from pathlib import Path
from typing import Annotated

import typer

from listwise.cli import options
from listwise.cli.output import note, open_console, print_json, say

EXAMPLES = options.examples("""Examples:
  listwise import Resnet-101-AP-GeM.pt models/ap-gem
  listwise import retrievalSfM120k-resnet101-gem-b80fb85.pth models/gem --whitening none
""")


def import_model(
    file: Annotated[
        Path,
        typer.Argument(help="A .pt file of naver/deep-image-retrieval or a .pth file of cirtorch."),
    ],
    folder: Annotated[Path, typer.Argument(help="The model folder to make.")],
    whitening: Annotated[
        str | None,
        typer.Option(
            help="Name of a whitening in the file, or none.", show_default="the authors' choice"
        ),
    ] = None,
    whiten_power: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Power of the variances that a PCA divides by.")
    ] = 0.25,
    json: options.AsJson = False,
) -> None:
    """Make a model folder of a released checkpoint; nothing in the file is run."""
    console = open_console(json)
    with console.status(f"reading {file.name}"):
        from listwise.descriptors.loading import import_to_folder

        model = import_to_folder(file, folder, whitening, whiten_power)
    config, dim = model.net.config, model.net.dim
    facts = {"folder": folder, "backbone": config.backbone, "pooling": config.pooling, "dim": dim}
    if json:
        print_json({**facts, "whitening": model.whitening, "whitenings": model.whitenings})
        return
    for text in model.notes:
        note(console, text)
    named = f"{config.backbone}, {config.pooling}, {dim} dimensions"
    say(console, f"{named}, whitening {model.whitening or 'none'}")
    say(console, f"the model is in {folder}", "bold")
