"""`listwise whiten`: learn a model's whitening and keep it in the model's folder."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from listwise.data import LabelledImages
    from listwise.descriptors import DescriptorFile, Whitening
    from listwise.models import RetrievalNet

EXAMPLES = """Examples:

  listwise whiten runs/a/model photos                     square-rooted PCA, all dimensions

  listwise whiten runs/a/model photos --dim 1024 --power 0.5

  listwise whiten runs/a/model descriptors.parquet        from descriptors already extracted

  listwise whiten runs/a/model labels.csv --supervised    from pairs of the same label

  listwise whiten runs/a/model --remove

Learn from photos like those you search, but not from the ones you evaluate with.
"""


def whiten(
    model: Annotated[Path, typer.Argument(help="A model folder.")],
    source: Annotated[
        Path | None,
        typer.Argument(help="Photos (as for extract), or a descriptor file of this model."),
    ] = None,
    dim: Annotated[
        int | None, typer.Option(min=1, help="Dimensions to keep; all that vary by default.")
    ] = None,
    power: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="0.25 is the paper's, 0.5 full whitening. [dim]default: 0.25[/dim]"
        ),
    ] = None,
    supervised: Annotated[
        bool, typer.Option("--supervised", help="Learn from pairs of the same label.")
    ] = False,
    remove: Annotated[
        bool, typer.Option("--remove", help="Take the whitening out of the model.")
    ] = False,
    max_side: Annotated[
        int | None, typer.Option(min=1, help="Reduce photos to this long side; never by default.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Learn a whitening for a model; from then on it is part of the model."""
    import json as encoder

    from rich.console import Console

    from listwise.cli.output import say
    from listwise.errors import InputError

    console = Console(stderr=json, highlight=False)
    if remove:
        if source or dim or power is not None or supervised or max_side:
            raise InputError("--remove takes nothing but the model: give nothing else")
        _remove(model)
        if json:
            typer.echo(encoder.dumps({"model": str(model), "method": None}))
        else:
            say(console, f"{model} no longer whitens its descriptors", "bold")
        return
    if source is None:
        raise InputError("say what to learn from: listwise whiten MODEL PHOTOS (or --help)")
    if supervised and power is not None:
        raise InputError("--power is of the PCA: leave it out with --supervised")

    from listwise.descriptors.model import load_network

    with console.status(f"loading {model}"):
        net = load_network(model, device)
    learned = _learn(net, model, source, dim, power, supervised, max_side, console)
    learned.save(model, net.fingerprint())
    result = {**learned.info.model_dump(exclude={"format_version"}), "dim": learned.dim}
    if json:
        typer.echo(encoder.dumps({"model": str(model), **result}))
        return
    say(
        console,
        f"{model} now whitens its descriptors: {net.dim} -> {learned.dim} dimensions, learned from "
        f"{learned.info.learned_from}",
        "bold",
    )


def _remove(model: Path) -> None:
    from listwise.descriptors.whitening import WHITENING_FILE
    from listwise.errors import InputError

    path = model / WHITENING_FILE
    if not path.exists():
        raise InputError(f"{model} has no whitening to remove")
    path.unlink()


def _learn(
    net: "RetrievalNet",
    folder: Path,
    source: Path,
    dim: int | None,
    power: float | None,
    supervised: bool,
    max_side: int | None,
    console: "Console",
) -> "Whitening":
    """Learn from a descriptor file, or from photos by way of one that is removed afterwards."""
    from dataclasses import replace

    from listwise.cli.extract import extract_with_bar
    from listwise.cli.output import warn_of_unreadable
    from listwise.data import Images, LabelledImages
    from listwise.data.catalog import labelled_of, photos_of
    from listwise.descriptors import DescriptorFile, Model, Whitening
    from listwise.descriptors.storage import is_descriptor_file
    from listwise.errors import InputError

    power = 0.25 if power is None else power
    if source.is_file() and is_descriptor_file(source):
        file = DescriptorFile.open(source)
        if supervised or max_side:
            raise InputError(
                f"{source} is a descriptor file, which has no labels and is already extracted: "
                "with --supervised or --max-side give the photos"
            )
        if file.header.whitened:
            raise InputError(
                f"{source} is whitened already, and a whitening is learned from plain descriptors: "
                "give the photos"
            )
        file.require(net.fingerprint())
        with console.status(f"learning from {len(file)} descriptors"):
            return Whitening.learn(file.batches(), dim, power)
    images: Images = labelled_of(source) if supervised else photos_of(source)
    scratch = folder / "whitening.parquet"
    # A source may name one photo several times, with other boxes: positions are unique.
    numbered = replace(images, ids=tuple(str(position) for position in range(len(images))))
    file = extract_with_bar(console, Model(net), numbered, scratch, max_side=max_side)
    try:
        warn_of_unreadable(console, file.header.unreadable)
        with console.status(f"learning from {len(file)} descriptors"):
            if isinstance(images, LabelledImages):
                return _supervised(file, images, dim)
            return Whitening.learn(file.batches(), dim, power)
    finally:
        scratch.unlink()


def _supervised(file: "DescriptorFile", images: "LabelledImages", dim: int | None) -> "Whitening":
    import math

    import numpy as np

    from listwise.descriptors import Whitening, matching_pairs

    labels = images.labels[np.array([int(position) for position in file.ids])]
    # The differences of pairs must fill all dimensions, several times over.
    enough = math.ceil(8 * file.dim / len(images.class_names))
    return Whitening.learn_supervised(file.read(), matching_pairs(labels, enough, seed=0), dim)
