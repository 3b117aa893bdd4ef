"""`listwise whiten`: learn the whitening of a model and keep it in the model folder."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from listwise.cli import options
from listwise.cli.output import note, open_console, print_result, stoppable, warn_of_unreadable
from listwise.errors import InputError
from listwise.progress import progress_bar

if TYPE_CHECKING:
    from listwise.descriptors import Whitening

EXAMPLES = """Examples:
  listwise whiten runs/a/model photos            # square-rooted PCA
  listwise whiten runs/a/model photos --dim 1024 --power 0.5
  listwise whiten runs/a/model photos.parquet    # a file of listwise extract
  listwise whiten runs/a/model labels.csv --supervised
  listwise whiten runs/a/model --remove

Learn from photos that resemble the database, but not from photos that you evaluate with.
"""

Power = Annotated[
    float | None,
    options.decimal(
        "Power of the variances by which whitening divides, from 0 to 1: 0.25 is the paper's "
        "square-rooted PCA, 0.5 is full whitening.",
        min=0,
        max=1,
        show_default="0.25",
    ),
]


def whiten(
    model: options.ModelFolder,
    source: Annotated[
        str | None,
        options.argument(
            "PHOTOS",
            "Folder of photos, table, .txt list, name of a data set, or descriptor file of this "
            "model.",
        ),
    ] = None,
    dim: options.Dim = None,
    power: Power = None,
    supervised: Annotated[
        bool, options.flag("--supervised", "Learn from pairs of photos with the same label.")
    ] = False,
    remove: Annotated[
        bool, options.flag("--remove", "Remove the whitening from the model.")
    ] = False,
    max_side: options.MaxSide = None,
    device: options.Device = "auto",
    json: options.AsJson = False,
) -> None:
    """Learn a whitening from photos and store it in the model."""
    console = open_console(json)
    if remove:
        if source or dim or power is not None or supervised or max_side:
            raise InputError("--remove takes only MODEL and --json: leave out the other arguments")
        from listwise.descriptors import remove_whitening

        remove_whitening(model)
        done = f"{model} no longer whitens its descriptors"
        print_result(console, json, {"model": model, "method": None}, done)
        return
    if source is None:
        raise InputError("give the photos to learn from: listwise whiten MODEL PHOTOS")

    from listwise.descriptors.learning import learn_whitening, whitening_source

    opened = whitening_source(source, supervised)
    with stoppable(), progress_bar(console, "computing descriptors", len(opened)) as advance:
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
    done = (
        f"{model} now whitens its descriptors: {dims}, learned from {info.learned_from} descriptors"
    )
    print_result(console, json, facts, done)
