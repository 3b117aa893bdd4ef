"""`listwise train`: train a network on labelled photos."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from listwise.cli import options
from listwise.cli.settings import given_settings, with_setting_flags
from listwise.errors import InputError
from listwise.settings import merge, read_settings

if TYPE_CHECKING:
    from listwise.feedback import Comparison
    from listwise.training import TrainPlan, TrainResult

EXAMPLES = """Examples:
  listwise train photos                # choose settings for these photos
  listwise train photos --minutes 10   # settings that take at most ten minutes
  listwise train labels.csv --preset paper --batch-size 1024
  listwise train photos --backbone resnet50 --run-folder runs/b
  listwise train photos --adapter      # train only a linear layer
  listwise train photos --teacher runs/large   # imitate a larger network
  listwise train --from-index shop --adapter   # learn from marks in an index
  listwise train --resume runs/b       # resume an interrupted run
  torchrun --nproc-per-node 8 -m listwise train photos --preset paper
"""


@with_setting_flags
def train(
    data: Annotated[str | None, options.argument("PHOTOS", options.LABELLED_PHOTOS)] = None,
    from_index: Annotated[
        str | None,
        options.text(
            "Train the model of this index on the labels and marks in the index, instead of PHOTOS."
        ),
    ] = None,
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
            help="Source of the settings that you do not give: auto chooses them for the photos "
            "and the machine, paper uses the values of the paper.",
        ),
    ] = "auto",
    resume: Annotated[
        Path | None, options.path("Resume the interrupted run in this folder.")
    ] = None,
    json: options.AsJson = False,
    **flags: Any,
) -> None:
    """Train a network on labelled photos by maximizing average precision."""
    given = given_settings(flags)
    if resume and (data or from_index or run or config or given or preset != "auto"):
        raise InputError("--resume uses the settings of the run: leave out all other options")
    if resume is None and (data is None) == (from_index is None):
        raise InputError("give the photos to train on: either PHOTOS or --from-index")
    given = merge(read_settings(config) if config else {}, given)

    from listwise.data.gpu_photos import start_gpu

    start_gpu(given.get("device", "auto"))
    from listwise import api
    from listwise.training.distributed import process_group
    from listwise.training.run.folder import RUN_FILE

    folder = resume or run or api.default_run_folder(str(data or from_index))
    with process_group() as first:
        console = Console(stderr=json, quiet=not first)
        try:
            sources = {"photos": data, "from_index": from_index} if resume is None else {}
            result, found = _train(sources, folder, console, given | {"preset": preset})
        except KeyboardInterrupt:
            started = (folder / RUN_FILE).exists()
            how = f"; resume with: listwise train --resume {folder}" if started else ""
            print(f"listwise: stopped{how}", file=sys.stderr)
            raise typer.Exit(130) from None
        if first:
            _show_result(result, found, console, json)


def _train(
    sources: dict[str, Any], folder: Path, console: Console, given: dict[str, Any]
) -> "tuple[TrainResult, Comparison | None]":
    """Train on photos or from an index; without sources resume the run in the folder."""
    from listwise import api, training
    from listwise.cli.output import show_plan
    from listwise.training.run.folder import is_index_run, read_run
    from listwise.training.run.view import LiveTrainView

    view = LiveTrainView(console)
    status = console.status("checking the photos" if sources else "opening the run")

    def on_plan(plan: "TrainPlan") -> None:
        status.stop()
        show_plan(plan, console)

    with status:
        if sources:
            done = api.train(run_folder=folder, view=view, on_plan=on_plan, **sources, **given)
            return done.result, done.comparison
        if is_index_run(folder, read_run(folder)):
            from listwise.feedback import resume_from_index

            status.stop()
            return resume_from_index(folder, view)
        trainer = training.resume(folder, view)
        status.stop()
        return trainer.fit(), None


def _show_result(
    result: "TrainResult", found: "Comparison | None", console: Console, json: bool
) -> None:
    """Print the result of a run, and the comparison with the model of the index."""
    from listwise.cli.output import print_json, say
    from listwise.training.run.view import readable_time

    if json:
        print_json(vars(result) | ({"comparison": found} if found else {}))
        return
    text = (
        f"validation mAP {100 * result.first_map:.1f} -> {100 * result.best_map:.1f} "
        f"(best at update {result.best_update} of {result.updates}, "
        f"{readable_time(result.seconds)})"
    )
    if found is None:
        say(console, f"{text}\nthe model is in {result.model}", "bold")
        return
    from rich.table import Table

    from listwise.feedback.page import comparison_rows, conclusion

    say(console, text)
    table = Table("", "old model", "new model", "difference", box=None)
    for row in comparison_rows(found):
        table.add_row(*row)
    console.print(table)
    page = result.model.parent / "comparison.html"
    say(console, f"the results of the marked queries are in {page}")
    say(console, conclusion(found, result.model), "bold")
