"""`listwise whiten`: learn the whitening of a model and keep it in the model folder."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from listwise.cli import options
from listwise.cli.output import note, open_console, print_result, stoppable, warn_of_unreadable
from listwise.errors import InputError
from listwise.progress import progress_bar

if TYPE_CHECKING:
    from listwise.descriptors import Whitening

EXAMPLES = options.examples("""Examples:
  listwise whiten runs/a/model photos                     square-rooted PCA, all dimensions
  listwise whiten runs/a/model photos --dim 1024 --power 0.5
  listwise whiten runs/a/model descriptors.parquet        from descriptors already extracted
  listwise whiten runs/a/model labels.csv --supervised    from pairs of the same label
  listwise whiten runs/a/model --remove

Learn from photos like those you search, but not from the ones you evaluate with.
""")


def whiten(
    model: options.ModelFolder,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="PHOTOS", help="Photos, as for extract, or a descriptor file of this model."
        ),
    ] = None,
    dim: options.Dim = None,
    power: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Power of the variances that the PCA divides by: 0.25 is the paper's, 0.5 full "
            "whitening.",
            show_default="0.25",
        ),
    ] = None,
    supervised: Annotated[
        bool, typer.Option("--supervised", help="Learn from pairs of the same label.")
    ] = False,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the whitening from the model.")
    ] = False,
    max_side: options.MaxSide = None,
    device: options.Device = "auto",
    json: options.AsJson = False,
) -> None:
    """Learn a whitening for a model; from then on it is part of the model."""
    console = open_console(json)
    if remove:
        if source or dim or power is not None or supervised or max_side:
            raise InputError("--remove takes nothing but the model")
        from listwise.descriptors import remove_whitening

        remove_whitening(model)
        done = f"{model} no longer whitens its descriptors"
        print_result(console, json, {"model": model, "method": None}, done)
        return
    if source is None:
        raise InputError("nothing to learn from: listwise whiten MODEL PHOTOS (or --help)")

    from listwise.descriptors.learning import learn_whitening, whitening_source

    opened = whitening_source(source, supervised)
    with stoppable(), progress_bar(console, "describing", len(opened)) as advance:
        learned = learn_whitening(
            model,
            opened,
            dim=dim,
            power=power,
            supervised=supervised,
            max_side=max_side,
            device=device,
            on_progress=advance,
            on_note=partial(note, console),
            on_unreadable=partial(warn_of_unreadable, console),
        )
    _show(model, learned, console, json)


def _show(model: Path, learned: "Whitening", console: Console, json: bool) -> None:
    info = learned.info
    facts = {"model": model, **info.model_dump(exclude={"format_version"}), "dim": learned.dim}
    dims = f"{len(learned.mean)} -> {learned.dim} dimensions"
    done = f"{model} now whitens its descriptors: {dims}, learned from {info.learned_from}"
    print_result(console, json, facts, done)
