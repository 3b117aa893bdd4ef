"""`listwise demo`: draw photos, train, search, and make an index, on toy landmarks."""

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
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

EXAMPLES = options.examples("""Example:
  listwise demo --folder /tmp/demo
""")


def demo(
    folder: Annotated[
        Path, typer.Option(help="Folder for the photos, the trained network and the index.")
    ] = Path("listwise-demo"),
    seed: options.Seed = 0,
) -> None:
    """Draw toy landmarks, train on some, and search others before and after."""
    from listwise.cli.run import show_plan
    from listwise.descriptors import Model, load_model
    from listwise.results.table import figures_of
    from listwise.studies.demo import Demo
    from listwise.training.run.view import LiveTrainView

    console = open_console()
    steps = Demo(folder, seed)
    with stoppable("run the same command again"):
        with total_bar(console, "drawing toy landmarks") as report:
            steps.draw_photos(report)
        console.print(f"toy landmarks are in [bold]{_typed(steps.photos)}[/bold]")
        plan = steps.plan()
        show_plan(plan, console)
        trainer = steps.trainer(plan, LiveTrainView(console))
        with console.status("searching with the network before training"):
            before = steps.search(Model(trainer.net))
        result = trainer.fit()
        with console.status("searching with the trained network"):
            model = load_model(result.model, plan.config.device)
            after = steps.search(model)
        _show_gain(console, figures_of(before.evaluate()), figures_of(after.evaluate()))
        steps.draw_matches(before, after)
        with console.status("making an index of the photos"):
            steps.make_index(model)
    _show_next(console, steps, result)


def _show_gain(console: Console, before: "Figures", after: "Figures") -> None:
    table = Table(title="mAP on buildings never seen in training", title_justify="left")
    table.add_column("")
    for level in before:
        table.add_column(level, justify="right")
    rows = (("ImageNet network, before training", before), ("trained with the AP loss", after))
    for name, found in rows:
        table.add_row(name, *(f"{100 * level['mAP']:.1f}" for level in found.values()))
    gains = (after[level]["mAP"] - before[level]["mAP"] for level in before)
    table.add_row("gain", *(f"{100 * gain:+.1f}" for gain in gains), style="bold")
    console.print(table)


def _show_next(console: Console, steps: "Demo", result: "TrainResult") -> None:
    where, model = _program_folder(), _typed(result.model)
    console.print(
        f"trained for {result.seconds:.0f} s; the network is in [bold]{model}[/bold]\n"
        f"a picture of what it finds now: [bold]{_typed(steps.picture)}[/bold]\n\n"
        "search the photos in your browser:\n"
        f"  [bold]{where}listwise serve {_typed(steps.index)}[/bold]\n\n"
        "next:\n"
        f"  {where}listwise evaluate {model} {_typed(steps.photos)} --report report.html\n"
        f"  {where}tensorboard --logdir {_typed(steps.run)}\n"
        f"  {where}listwise train YOUR-PHOTOS"
        "    (a folder of class folders, or a .csv of path,label)",
        soft_wrap=True,
    )


def _typed(path: Path) -> str:
    """A path as one types it in a shell."""
    return escape(shlex.quote(str(path)))


def _program_folder() -> str:
    """What to type before the name of a program: its folder, where it is not on the path."""
    program = Path(sys.argv[0])
    if program.name != "listwise" or shutil.which("listwise"):
        return ""
    return f"{os.path.relpath(program.parent)}{os.sep}"
