"""`listwise extract`: photos to a descriptor file."""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from listwise.cli.bars import progress_bar
from listwise.cli.options import parse_numbers
from listwise.cli.output import note, say, stoppable, warn_of_unreadable

if TYPE_CHECKING:
    from rich.console import Console

    from listwise.data import Images
    from listwise.descriptors import DescriptorFile, Model

EXAMPLES = """Examples:

  listwise extract runs/a/model photos photos.parquet            original size, one scale

  listwise extract runs/a/model queries.csv queries.parquet      a table with boxes

  listwise extract runs/a/model photos out.parquet --scales 1,0.7071,0.5 --max-side 1024

  torchrun --nproc-per-node 8 -m listwise extract runs/a/model photos out.parquet

An interrupted run goes on when the same command is given again. Under torchrun each process takes
its share of the photos and writes a file of its own, out-00001-of-00008.parquet and so on.
"""


def extract(
    model: Annotated[Path, typer.Argument(help="A model folder.")],
    source: Annotated[
        str, typer.Argument(help="A folder, a table with a path column, a .txt, or a data set.")
    ],
    out: Annotated[Path, typer.Argument(help="The descriptor file to write (.parquet).")],
    max_side: Annotated[
        int | None, typer.Option(min=1, help="Reduce photos to this long side; never by default.")
    ] = None,
    scales: Annotated[str, typer.Option(help="Sizes each photo is seen at, with commas.")] = "1",
    power: Annotated[float, typer.Option(help="Of the mean over the scales.")] = 3.0,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="float32|bfloat16",
            help="How the network computes. [dim]default: bfloat16 on a GPU that has it[/dim]",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "auto",
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that decode; from the cores by default.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at the first photo that cannot be read.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write the descriptors of photos into one file, with ids and sizes."""
    import json as encoder
    import time

    from rich.console import Console

    from listwise.data.catalog import photos_of

    sizes = parse_numbers(scales, "scales")
    images = photos_of(source)
    rank, processes = _place()
    if processes > 1:
        images, out = _share(images, rank, processes), _share_of(out, rank, processes)
        if device == "auto":
            device = _own_gpu()

    from listwise.descriptors import load_model

    console = Console(stderr=json, highlight=False)
    with console.status(f"loading {model}"):
        opened = load_model(model, device)
    started = time.perf_counter()
    file = extract_with_bar(
        console,
        opened,
        images,
        out,
        max_side=max_side,
        scales=sizes,
        power=power,
        precision=precision,
        strict=strict,
        workers=workers,
    )
    seconds = time.perf_counter() - started
    unreadable = file.header.unreadable
    if json:
        result = {
            "file": str(out),
            "descriptors": len(file),
            "dim": file.dim,
            "model": file.model,
            "whitened": file.header.whitened,
            "settings": file.settings.model_dump(),
            "unreadable": unreadable,
            "seconds": round(seconds, 2),
        }
        typer.echo(encoder.dumps(result))
        return
    warn_of_unreadable(console, unreadable)
    kind = "whitened descriptors" if file.header.whitened else "descriptors"
    say(console, f"{len(file)} {kind} of {file.dim} dimensions in {out} ({seconds:.0f} s)", "bold")


def _place() -> tuple[int, int]:
    """This process among those that torchrun started: its rank, and how many there are."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _share(images: "Images", rank: int, processes: int) -> "Images":
    """A process's share of photos: a stretch of them, as long as the others'."""
    first, past = (len(images) * place // processes for place in (rank, rank + 1))
    return images.subset(range(first, past))


def _share_of(out: Path, rank: int, processes: int) -> Path:
    return out.with_name(f"{out.stem}-{rank + 1:05d}-of-{processes:05d}{out.suffix}")


def _own_gpu() -> str:
    import torch

    gpus = torch.cuda.device_count()
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % gpus}" if gpus else "cpu"


def extract_with_bar(
    console: "Console", model: "Model", images: "Images", out: Path, **settings: Any
) -> "DescriptorFile":
    """`listwise.descriptors.extract` with a progress bar, its notes above it."""
    from listwise.descriptors import extract as run

    with stoppable(), progress_bar(console, "extracting", len(images)) as advance:
        return run(
            model, images, out, on_progress=advance, on_note=partial(note, console), **settings
        )
