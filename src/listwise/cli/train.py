"""`listwise train`: a folder of labelled photos to a network."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from listwise.cli import options
from listwise.cli.settings import given_settings, with_setting_flags

if TYPE_CHECKING:
    from listwise.training import TrainPlan, TrainResult

EXAMPLES = options.examples("""Examples:
  listwise train photos                          settings from the photos and this machine
  listwise train labels.csv --run-folder runs/b --preset paper --batch-size 1024
  listwise train --resume runs/b                 resume an interrupted run
  torchrun --nproc-per-node 8 -m listwise train photos --preset paper
""")


@with_setting_flags
def train(
    data: Annotated[
        str | None,
        typer.Argument(help="A folder of class folders, a .csv or .parquet table, or a .txt list."),
    ] = None,
    run: Annotated[
        Path | None,
        # Not --run: torchrun takes that for the beginning of an option of its own.
        typer.Option("--run-folder", help="Folder of the run.", show_default="runs/NAME"),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings.")] = None,
    preset: Annotated[
        str,
        typer.Option(
            metavar="auto|paper",
            help="Where settings come from that you do not give: chosen from the photos and the "
            "machine, or the paper's.",
        ),
    ] = "auto",
    resume: Annotated[
        Path | None, typer.Option(help="Resume the interrupted run in this folder.")
    ] = None,
    json: options.AsJson = False,
    **flags: Any,
) -> None:
    """Train a retrieval network on labelled photos by maximising average precision."""
    from listwise.errors import InputError
    from listwise.settings import merge, read_settings

    given = given_settings(flags)
    if resume is not None and (data or run or config or given or preset != "auto"):
        raise InputError("--resume takes everything from the run itself: give nothing else")
    if resume is None and data is None:
        raise InputError("say what to train on: listwise train FOLDER-OF-CLASS-FOLDERS (or --help)")
    given = merge(read_settings(config) if config else {}, given)

    from listwise import api
    from listwise.cli.run import show_result
    from listwise.training.distributed import joined_processes
    from listwise.training.run.folder import RUN_FILE

    folder = resume or run or api.default_run_folder(str(data))
    with joined_processes() as first:
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
    from listwise.cli.run import show_plan
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
