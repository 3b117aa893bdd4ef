"""`listwise whiten`: learn the whitening of a model and keep it in the model folder."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from listwise.cli import options
from listwise.cli.output import note, open_console, print_result, stoppable, warn_of_unreadable
from listwise.errors import InputError
from listwise.progress import progress_bar

if TYPE_CHECKING:
    from listwise.descriptors import Whitening
    from listwise.descriptors.choosing import WhiteningChoice

EXAMPLES = """Examples:
  listwise whiten runs/a/model labels.csv        # chosen on validation photos
  listwise whiten runs/a/model photos --dim 1024 --power 0.25 --shrinkage 0
  listwise whiten runs/a/model photos.parquet    # a file of listwise extract
  listwise whiten runs/a/model labels.csv --supervised
  listwise whiten runs/a/model --dim 128         # keep the first 128 dimensions
  listwise whiten runs/a/model --remove

Learn from photos that resemble the database, but not from photos that you evaluate with. With
labels, dimension, power and shrinkage are chosen by mAP on the split val of a table, or on classes
that are held out. If no whitening helps, none is stored, unless you give one of these.
"""

_fraction = partial(options.decimal, min=0, max=1)
Power = Annotated[
    float | None,
    _fraction(
        "Whitening divides by the variances to this power, from 0 to 1: 0.25 is the paper's "
        "square-rooted PCA, 0.5 is full whitening.",
        show_default="chosen by validation; 0.25 without labels",
    ),
]
Shrinkage = Annotated[
    float | None,
    _fraction(
        "Move the variances towards their mean: 0 leaves them, 1 makes them equal.",
        show_default="chosen by validation; without labels, the estimate of Ledoit and Wolf",
    ),
]
Dim = Annotated[
    int | None,
    options.integer(
        "Number of dimensions to keep.",
        min=1,
        show_default="chosen by validation; all without labels",
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
    dim: Dim = None,
    power: Power = None,
    shrinkage: Shrinkage = None,
    supervised: Annotated[
        bool, options.flag("--supervised", "Learn from pairs of photos with the same label.")
    ] = False,
    remove: Annotated[bool, options.flag("--remove", "Remove the whitening.")] = False,
    max_side: options.MaxSide = None,
    device: options.Device = "auto",
    json: options.AsJson = False,
) -> None:
    """Learn a whitening from photos and store it in the model."""
    console = open_console(json)
    if remove and (source or supervised or {dim, power, shrinkage, max_side} != {None}):
        raise InputError("--remove takes only MODEL and --json: leave out the other arguments")
    if source is None:
        if not remove and (dim is None or supervised or {power, shrinkage, max_side} != {None}):
            raise InputError("give the photos to learn from: listwise whiten MODEL PHOTOS")
        _shorten(model, dim, console, json)
        return

    from listwise.descriptors.learning import learn_whitening, whitening_source

    opened = whitening_source(source, supervised)
    choices: list[WhiteningChoice] = []
    how: dict[str, Any] = {"dim": dim, "power": power, "shrinkage": shrinkage}
    with stoppable(), progress_bar(console, "computing descriptors", len(opened)) as advance:
        learned = learn_whitening(
            model,
            opened,
            **how,
            supervised=supervised,
            max_side=max_side,
            device=device,
            on_progress=advance,
            on_note=partial(note, console),
            on_choice=choices.append,
            on_unreadable=partial(warn_of_unreadable, console),
        )
    for choice in [] if json else choices:
        typer.echo(f"{choice.table()}\n{choice}")
    _show(model, learned, choices, console, json)


def _shorten(model: Path, dim: int | None, console: Console, json: bool) -> None:
    """Keep the first dimensions of the descriptors of a model; None removes its whitening."""
    from listwise.descriptors.learning import remove_whitening, truncate_model

    facts: dict[str, Any] = {"model": model, "method": None}
    done = f"{model} no longer whitens its descriptors"
    if dim is None:
        remove_whitening(model, partial(note, console))
    else:
        facts |= {"method": truncate_model(model, dim).info.method, "dim": dim}
        done = f"{model} now keeps the first {dim} dimensions of its descriptors"
    print_result(console, json, facts, done)


def _show(
    model: Path,
    learned: "Whitening | None",
    choices: "list[WhiteningChoice]",
    console: Console,
    json: bool,
) -> None:
    maps = {}
    for choice in choices:
        maps = {"plain_map": choice.start_map, "validation_map": choice.best.validation_map}
    if learned is None:
        from listwise.descriptors.learning import has_whitening

        done = f"no whitening is clearly better than none: {model} is unchanged"
        if has_whitening(model):
            done += "; it keeps its earlier whitening: remove it with --remove"
        print_result(console, json, {"model": model, "method": None, **maps}, done)
        return
    if choices and choices[0].gain.value < 0:
        note(console, "the validation mAP is lower than without whitening")
    kept = learned.info.model_dump(exclude={"format_version"})
    dims = f"{len(learned.mean)} -> {learned.dim} dimensions"
    done = f"{model} now whitens its descriptors: {dims}, learned from {kept['learned_from']} "
    facts = {"model": model, **kept, "dim": learned.dim, **maps}
    print_result(console, json, facts, f"{done}descriptors")
