"""`listwise demo`: draw photos, train, search, and build an index, on toy landmarks."""

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from listwise.cli import options
from listwise.cli.output import open_console, stoppable
from listwise.progress import total_bar

if TYPE_CHECKING:
    from listwise.results.table import Figures
    from listwise.studies.demo import Demo
    from listwise.training import TrainResult

EXAMPLES = """Example:
  listwise demo --folder /tmp/demo
"""


def demo(
    folder: Annotated[
        Path, options.path("Folder for the photos, the trained model and the index.")
    ] = Path("listwise-demo"),
    seed: options.Seed = 0,
) -> None:
    """Draw toy landmarks, train on them, and compare search before and after training."""
    from listwise.cli.output import show_plan
    from listwise.descriptors import Model, load_model
    from listwise.results.table import figures_of
    from listwise.studies.demo import Demo
    from listwise.training.run.view import LiveTrainView

    console = open_console()
    steps = Demo(folder, seed)
    with stoppable("run the same command again"):
        with total_bar(console, "drawing toy landmarks") as report:
            steps.draw_photos(report)
        console.print(f"the toy landmarks are in [bold]{_typed(steps.photos)}[/bold]")
        plan = steps.plan()
        show_plan(plan, console)
        trainer = steps.trainer(plan, LiveTrainView(console))
        with console.status("searching with the network before training"):
            before = steps.describe(Model(trainer.net))
        result = trainer.fit()
        with console.status("building an index of the photos with the trained network"):
            after = steps.make_index(load_model(result.model, plan.config.device))
        _show_gain(console, figures_of(before.evaluate()), figures_of(after.evaluate()))
        steps.draw_matches(before, after)
    _show_next(console, steps, result)


def _show_gain(console: Console, before: "Figures", after: "Figures") -> None:
    table = Table(title="mAP on buildings that were not used for training", title_justify="left")
    table.add_column("")
    for level in before:
        table.add_column(level, justify="right")
    rows = (
        ("before training (ImageNet weights)", before),
        ("after training with the AP loss", after),
    )
    for name, found in rows:
        table.add_row(name, *(f"{100 * level['mAP']:.1f}" for level in found.values()))
    gains = (after[level]["mAP"] - before[level]["mAP"] for level in before)
    table.add_row("gain", *(f"{100 * gain:+.1f}" for gain in gains), style="bold")
    console.print(table)


def _show_next(console: Console, steps: "Demo", result: "TrainResult") -> None:
    where, model = _program_folder(), _typed(result.model)
    console.print(
        f"trained in {result.seconds:.0f} s; the model is in [bold]{model}[/bold]\n"
        f"search results before and after: [bold]{_typed(steps.picture)}[/bold]\n\n"
        "to search the photos in your browser:\n"
        f"  [bold]{where}listwise serve {_typed(steps.index)}[/bold]\n\n"
        "next steps:\n"
        f"  {where}listwise evaluate {model} {_typed(steps.photos)} --report report.html\n"
        f"  {where}tensorboard --logdir {_typed(steps.run)}\n"
        f"  {where}listwise train PHOTOS    # a folder of class folders, or a table of labels",
        soft_wrap=True,
    )


def _typed(path: Path) -> str:
    """Quote a path for a shell."""
    return escape(shlex.quote(str(path)))


def _program_folder() -> str:
    """Return the folder to type before the name of a program, if it is not on the PATH."""
    program = Path(sys.argv[0])
    if program.name != "listwise" or shutil.which("listwise"):
        return ""
    return f"{os.path.relpath(program.parent)}{os.sep}"
