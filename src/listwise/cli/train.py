"""`listwise train`: a folder of labelled photos to a network."""

from pathlib import Path
from typing import Annotated, Any

import typer

from listwise.cli.settings import given_settings, with_setting_flags

EXAMPLES = """Examples:

  listwise train photos                          settings from the photos and this machine

  listwise train labels.csv --run runs/b --preset paper --batch-size 1024

  listwise train --resume runs/b                 go on after an interruption

  torchrun --nproc-per-node 8 -m listwise train photos --preset paper
"""


@with_setting_flags
def train(
    data: Annotated[
        str | None,
        typer.Argument(help="A folder of class folders, a .csv or .parquet table, or a .txt list."),
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="Folder of the run. [dim]default: runs/NAME[/dim]")
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
        Path | None, typer.Option(help="Go on with the interrupted run in this folder.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    **flags: Any,
) -> None:
    """Train a retrieval network on labelled photos by maximising average precision."""
    from rich.console import Console

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

    from listwise.cli.run import in_processes, show_plan, show_result
    from listwise.training import Trainer, prepare
    from listwise.training import resume as resume_run
    from listwise.training.view import LiveView

    console = Console(stderr=json)
    with in_processes(given.get("device", "auto")) as first:
        view = LiveView(console) if first else None
        if resume is not None:
            trainer = resume_run(resume, view)
        else:
            plan = prepare(str(data), given, preset)  # type: ignore[arg-type]
            if first:
                show_plan(plan, console)
            trainer = Trainer(plan, run or Path("runs") / Path(str(data)).stem, view)
        result = trainer.fit()
        if first:
            show_result(result, console, json)
