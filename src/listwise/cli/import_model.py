"""`listwise import`: convert a released checkpoint to a model folder."""

from pathlib import Path
from typing import Annotated

from listwise.cli import options
from listwise.cli.output import note, open_console, print_json, say

EXAMPLES = """Examples:
  listwise import Resnet-101-AP-GeM.pt models/ap-gem
  listwise import retrievalSfM120k-resnet101-gem-b80fb85.pth models/gem
"""


def import_model(
    file: Annotated[
        Path,
        options.argument(
            "FILE", "Checkpoint: a .pt file of deep-image-retrieval or .pth of cirtorch."
        ),
    ],
    folder: Annotated[Path, options.argument("FOLDER", "Model folder to write.")],
    whitening: Annotated[
        str | None,
        options.text(
            "Name of a whitening in the checkpoint, or none.", show_default="the authors' choice"
        ),
    ] = None,
    whiten_power: Annotated[
        float,
        options.decimal(
            "Whitening divides by the variances to this power, from 0 to 1.", min=0, max=1
        ),
    ] = 0.25,
    json: options.AsJson = False,
) -> None:
    """Convert a released checkpoint to a model folder, without running code from it."""
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
