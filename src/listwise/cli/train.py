"""`listwise train`: a folder of labelled photos to a network."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from listwise.cli import options
from listwise.cli.settings import given_settings, with_setting_flags

if TYPE_CHECKING:
    from listwise.training import Trainer

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
    if preset not in ("auto", "paper"):
        raise InputError(f"--preset is auto or paper, not {preset!r}")
    given = merge(read_settings(config) if config else {}, given)

    from listwise.cli.run import show_result
    from listwise.training.distributed import joined_processes
    from listwise.training.run.folder import RUN_FILE

    folder = resume or run or Path("runs") / Path(str(data)).resolve().stem
    with joined_processes() as first:
        console = Console(stderr=json, quiet=not first)
        try:
            trainer = _open(folder, console, None if resume else data, given, preset)
            result = trainer.fit()
        except KeyboardInterrupt:
            started = (folder / RUN_FILE).exists()
            how = f"; resume with: listwise train --resume {folder}" if started else ""
            print(f"listwise: stopped{how}", file=sys.stderr)
            raise typer.Exit(130) from None
        if first:
            show_result(result, console, json)


def _open(
    folder: Path, console: Console, data: str | None, given: dict[str, Any], preset: str
) -> "Trainer":
    """The trainer of a new run on `data`, or of the run in the folder."""
    from listwise.cli.run import show_plan
    from listwise.training import Trainer, prepare, resume
    from listwise.training.run.folder import check_unused
    from listwise.training.run.view import LiveTrainView

    view = LiveTrainView(console)
    if data is None:
        with console.status("opening the run"):
            return resume(folder, view)
    check_unused(folder)
    with console.status("checking the photos"):
        plan = prepare(data, given, preset)  # type: ignore[arg-type]
    show_plan(plan, console)
    with console.status(f"loading {plan.config.backbone}"):
        return Trainer(plan, folder, view)
