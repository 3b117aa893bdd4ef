"""`listwise train`: train a network on labelled photos."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from listwise.cli import options
from listwise.cli.settings import given_settings, with_setting_flags

if TYPE_CHECKING:
    from listwise.training import TrainPlan, TrainResult

EXAMPLES = """Examples:
  listwise train photos                # choose settings for these photos
  listwise train photos --minutes 10   # settings that take at most ten minutes
  listwise train labels.csv --preset paper --batch-size 1024
  listwise train photos --backbone resnet50 --run-folder runs/b
  listwise train photos --adapter      # train only a linear layer, in seconds
  listwise train photos --teacher runs/large   # a small network for its index
  listwise train --resume runs/b       # resume an interrupted run
  torchrun --nproc-per-node 8 -m listwise train photos --preset paper
"""


@with_setting_flags
def train(
    data: Annotated[str | None, options.argument("PHOTOS", options.LABELLED_PHOTOS)] = None,
    run: Annotated[
        Path | None,
        # Not --run: torchrun takes that for the beginning of an option of its own.
        options.path("Folder to write the run to.", "--run-folder", show_default="runs/NAME"),
    ] = None,
    config: Annotated[Path | None, options.path("YAML file with settings.")] = None,
    preset: Annotated[
        str,
        typer.Option(
            metavar="auto|paper",
            help="Where the other settings come from: auto chooses them for the photos and the "
            "machine, paper uses the values of the paper.",
        ),
    ] = "auto",
    resume: Annotated[
        Path | None, options.path("Resume the interrupted run in this folder.")
    ] = None,
    json: options.AsJson = False,
    **flags: Any,
) -> None:
    """Train a network on labelled photos by maximizing average precision."""
    from listwise.errors import InputError
    from listwise.settings import merge, read_settings

    given = given_settings(flags)
    if resume is not None and (data or run or config or given or preset != "auto"):
        raise InputError("--resume uses the settings of the run: leave out all other options")
    if resume is None and data is None:
        raise InputError("give the photos to train on: listwise train PHOTOS")
    given = merge(read_settings(config) if config else {}, given)

    from listwise import api
    from listwise.cli.output import show_result
    from listwise.training.distributed import process_group
    from listwise.training.run.folder import RUN_FILE

    folder = resume or run or api.default_run_folder(str(data))
    with process_group() as first:
        console = Console(stderr=json, quiet=not first)
        try:
            result = _train(data, folder, console, given | {"preset": preset})
        except KeyboardInterrupt:
            started = (folder / RUN_FILE).exists()
            how = f"; resume with: listwise train --resume {folder}" if started else ""
            print(f"listwise: stopped{how}", file=sys.stderr)
            raise typer.Exit(130) from None
        if first:
            show_result(result, console, json)


def _train(
    data: str | None, folder: Path, console: Console, given: dict[str, Any]
) -> "TrainResult":
    """Train on `data`, or without it resume the run in the folder."""
    from listwise import api, training
    from listwise.cli.output import show_plan
    from listwise.training.run.view import LiveTrainView

    view = LiveTrainView(console)
    status = console.status("opening the run" if data is None else "checking the photos")

    def on_plan(plan: "TrainPlan") -> None:
        status.stop()
        show_plan(plan, console)

    with status:
        if data is not None:
            return api.train(data, folder, view=view, on_plan=on_plan, **given).result
        trainer = training.resume(folder, view)
        status.stop()
        return trainer.fit()
