"""`listwise tune`: choose the settings of a model by its mAP on validation photos."""

from functools import partial
from typing import Annotated

import typer

from listwise.cli import options
from listwise.cli.output import note, open_console, print_json, say, stoppable

EXAMPLES = """Examples:
  listwise tune runs/a/model photos.csv      # validated on the split val
  listwise tune runs/a/model validation      # a folder of class folders
  listwise tune runs/a/model photos.csv --max-side 1024 --max-cost 3

Use photos of things that the model was not trained on. The settings are stored in the model, and
apply wherever you give none. If an index uses the model, tune a copy of the folder: a new GeM power
or whitening changes the descriptors. Then run listwise index upgrade with the copy.
"""


def tune(
    model: options.ModelFolder,
    photos: Annotated[str, options.argument("PHOTOS", options.LABELLED_PHOTOS)],
    max_side: options.MaxSide = None,
    max_cost: Annotated[
        float | None,
        options.decimal(
            "Maximum pixels of a photo at all scales together, as a multiple of one scale.",
            min=1,
            show_default="no limit",
        ),
    ] = None,
    device: options.Device = "auto",
    workers: options.Workers = None,
    json: options.AsJson = False,
) -> None:
    """Choose scales, GeM power, whitening and αQE of a model by its mAP on validation photos."""
    console = open_console(json)

    from listwise import results

    with stoppable(""):
        found = results.tune(
            model,
            photos,
            max_side=max_side,
            max_cost=max_cost,
            device=device,
            workers=workers,
            on_note=partial(note, console),
        )
    if json:
        print_json(
            {
                "model": model,
                "changed": found.changed,
                "settings": found.model.tuned,
                "start_map": found.start_map,
                "validation_map": found.validation_map,
                "start_seconds": found.start_seconds,
                "seconds": found.seconds,
                "steps": found.steps,
            }
        )
        return
    typer.echo(found.table())
    photos_per_class = f"{found.queries} photos of {found.classes} classes"
    milliseconds = f"{1000 * found.start_seconds:.1f} -> {1000 * found.seconds:.1f} ms per photo"
    say(
        console,
        f"validation mAP {100 * found.start_map:.1f} -> {100 * found.validation_map:.1f} "
        f"({photos_per_class}), time of the network {milliseconds}",
    )
    done = f"the settings are stored in {model}" if found.changed else f"{model} is unchanged"
    say(console, done if found.changed else f"no other setting is clearly better: {done}", "bold")
