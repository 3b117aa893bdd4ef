"""`listwise demo`: draw photos, train, search, and build an index, on toy landmarks."""

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from listwise.cli.command import command, make_app
from listwise.cli.output import Output, stoppable
from listwise.progress import total_bar

if TYPE_CHECKING:
    from listwise.demo.steps import Demo
    from listwise.results.report import Figures
    from listwise.training import TrainResult

app = make_app("Try Listwise on toy landmarks.")


@command(app, json=False)
def demo(output: Output, *, folder: Path = Path("listwise-demo"), seed: int = 0) -> None:
    """Draw toy landmarks, train on them, and compare search before and after training.

    Args:
        folder: folder for the photos, the trained model and the index.

    Example:
      listwise demo --folder /tmp/demo
    """
    from listwise.demo import make_toy_landmarks
    from listwise.demo.steps import Demo
    from listwise.descriptors import Model, load_model
    from listwise.models import RetrievalNet
    from listwise.results import describe_benchmark
    from listwise.results.report import figures_of
    from listwise.training.view import LiveTrainView

    steps = Demo(folder, seed)
    with stoppable():
        with total_bar(output.console, "drawing toy landmarks") as report:
            make_toy_landmarks(steps.photos, seed=seed, progress=report)
        output.say(f"the toy landmarks are in {steps.photos}")
        plan = steps.plan()
        output.show_plan(plan)
        trainer = steps.trainer(plan, LiveTrainView(output.console))
        assert isinstance(trainer.net, RetrievalNet)
        with output.console.status("searching with the network before training"):
            before = describe_benchmark(Model(trainer.net), steps.benchmark())
        result = trainer.fit()
        with output.console.status("building an index of the photos with the trained network"):
            after = steps.make_index(load_model(result.model, plan.config.device))
        _show_gain(output, figures_of(before.evaluate()), figures_of(after.evaluate()))
        steps.draw_matches(before, after)
    _show_next(output, steps, result)


def _show_gain(output: Output, before: "Figures", after: "Figures") -> None:
    rows = [
        (name, *(f"{100 * level['mAP']:.1f}" for level in found.values()))
        for name, found in (
            ("before training (ImageNet weights)", before),
            ("after training with the AP loss", after),
        )
    ]
    gains = (after[level]["mAP"] - before[level]["mAP"] for level in before)
    rows.append(("gain", *(f"{100 * gain:+.1f}" for gain in gains)))
    output.table(("", *before), rows, "mAP on buildings that were not used for training")


def _show_next(output: Output, steps: "Demo", result: "TrainResult") -> None:
    where = _program_folder()
    model, photos, index, run = (
        shlex.quote(str(path)) for path in (result.model, steps.photos, steps.index, steps.run)
    )
    output.say(
        f"trained in {result.seconds:.0f} s; the model is in {model}\n"
        f"search results before and after: {steps.picture}\n\n"
        "to search the photos in your browser:\n"
        f"  {where}listwise serve {index}\n\n"
        "next steps:\n"
        f"  {where}listwise evaluate {model} {photos} --report report.html\n"
        f"  {where}tensorboard --logdir {run}\n"
        f"  {where}listwise train PHOTOS    # a folder of class folders, or a table of labels"
    )


def _program_folder() -> str:
    """Return the folder to type before the name of a program, if it is not on the PATH."""
    program = Path(sys.argv[0])
    if program.name != "listwise" or shutil.which("listwise"):
        return ""
    return f"{os.path.relpath(program.parent)}{os.sep}"
