"""`listwise import`: a network that other people have released, as a model folder."""

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  listwise import Resnet-101-AP-GeM.pt models/ap-gem

  listwise import retrievalSfM120k-resnet101-gem-b80fb85.pth models/gem --whitening none
"""


def import_model(
    file: Annotated[
        Path, typer.Argument(help="A .pt file of naver's or a .pth file of cirtorch's.")
    ],
    folder: Annotated[Path, typer.Argument(help="The model folder to make.")],
    whitening: Annotated[
        str | None,
        typer.Option(help="Which of the file's whitenings, or none. [dim]default: the authors'[/]"),
    ] = None,
    whiten_power: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Power of the variances a PCA divides by.")
    ] = 0.25,
    json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Make a model folder of a released checkpoint; nothing in the file is run."""
    import json as encoder

    from rich.console import Console

    from listwise.errors import InputError

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is there already: give a new folder")
    console = Console(stderr=json, highlight=False, markup=False, soft_wrap=True)
    with console.status(f"reading {file.name}"):
        from listwise.descriptors.whitening import Whitening, WhiteningInfo
        from listwise.models.imported import import_model as read

        model = read(file, whitening, whiten_power)
        folder.mkdir(parents=True, exist_ok=True)
        # The network's config is written last: a folder that has it is complete.
        if model.whitening_mean is not None and model.whitening_projection is not None:
            info = WhiteningInfo(method="imported", power=model.whitening_power)
            Whitening(model.whitening_mean, model.whitening_projection, info).save(
                folder, model.net.fingerprint()
            )
        model.net.save(folder)
    config = model.net.config
    if json:
        answer = {
            "folder": str(folder),
            "backbone": config.backbone,
            "pooling": config.pooling,
            "dim": model.net.dim,
            "whitening": model.whitening,
            "whitenings": model.whitenings,
        }
        print(encoder.dumps(answer))
        return
    for note in model.notes:
        console.print(f"note: {note}", style="yellow")
    console.print(
        f"{config.backbone}, {config.pooling}, {model.net.dim} dimensions, whitening "
        f"{model.whitening or 'none'}"
    )
    console.print(f"the model is in {folder}", style="bold")
