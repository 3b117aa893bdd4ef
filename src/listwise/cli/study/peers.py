"""`listwise study peers`: Listwise and losses of pytorch-metric-learning on your photos."""

from pathlib import Path
from typing import Annotated, Any

import typer

from listwise.cli import options
from listwise.cli.output import open_console, print_json, say, stoppable, typed_command
from listwise.cli.study import flags
from listwise.cli.study.flags import draw_toy, say_where
from listwise.settings import merge, read_settings

EXAMPLES = """Examples:
  listwise study peers photos --out peers
  listwise study peers CUB-200 --rates 3e-5,1e-4 --out peers
  listwise study peers toy --backbone tf_efficientnet_lite0 --epochs 2 \\
      --crop 64 --seeds 1 --out peers
"""


Losses = Annotated[
    str,
    options.text(
        "Losses of pytorch-metric-learning to compare Listwise with, separated by commas."
    ),
]
Rates = Annotated[
    str | None,
    options.numbers(
        "Learning rates of these losses, separated by commas; each one is a separate row.",
        show_default="3e-5 for multi-similarity, 1e-4 for proxy-anchor",
    ),
]


def peers(
    photos: flags.Photos,
    out: Annotated[Path, options.path("Folder to write runs and tables to.")],
    losses: Losses = "multi-similarity,proxy-anchor",
    rates: Rates = None,
    epochs: Annotated[int, options.integer("Number of epochs of these losses.", min=1)] = 30,
    batch: Annotated[int, options.integer("Images per update of these losses.", min=8)] = 120,
    crop: Annotated[
        int, options.integer("Side of the crops of these losses, in pixels.", min=32)
    ] = 224,
    seeds: Annotated[
        int, options.integer("Number of runs per recipe, each with a different seed.", min=1)
    ] = 3,
    backbone: Annotated[str, options.text("Name of a timm model, for all recipes.")] = "resnet50",
    weights: Annotated[
        str,
        options.text("Weights: auto, pretrained, imagenet-package, random, or a weights file."),
    ] = "auto",
    projection: Annotated[
        int, options.integer("Number of dimensions of the descriptors.", min=2)
    ] = 512,
    config: Annotated[
        Path | None, options.path("YAML file with settings of Listwise's recipe.")
    ] = None,
    data: options.Data = None,
    device: options.Device = "auto",
    workers: options.Workers = None,
    json: options.AsJson = False,
) -> None:
    """Compare Listwise with losses of pytorch-metric-learning, each in its usual recipe.

    Every recipe trains on the training classes from the same weights and is tested on other
    classes: the split test (or val) of a table, or the second half of the classes.
    """
    shared = {"backbone": backbone, "weights": weights, "projection": projection, "device": device}
    shared |= {} if workers is None else {"workers": workers}
    planned: dict[str, Any] = {
        "given": merge(shared, read_settings(config) if config else {}),
        "losses": [word.strip() for word in losses.split(",")],
        "rates": options.parse_numbers(rates, "rates") if rates else (),
        "recipe": {"epochs": epochs, "batch_size": batch, "crop": crop},
        "seeds": seeds,
        "root": data,
    }
    with stoppable():
        _run(photos, out, planned, json)


def _run(photos: str, out: Path, planned: dict[str, Any], json: bool) -> None:
    from listwise.cli.output import show_plan
    from listwise.cli.study.view import LiveStudyView
    from listwise.data.toy import TOY_LABELS
    from listwise.studies.peer_recipes import PeerRecipe
    from listwise.studies.peers import plan_peers, run_peers
    from listwise.studies.peers_outputs import peers_table, verdict, write_peers

    console = open_console(json)
    toy = draw_toy(console, photos, out)
    with console.status("checking the photos"):
        recipe = PeerRecipe(**planned.pop("recipe"))
        plan = plan_peers(toy / TOY_LABELS if toy else photos, out, recipe=recipe, **planned)
    show_plan(plan.plan, console)
    test = plan.test
    say(console, f"testing on {len(test)} photos of {len(test.class_names)} classes")
    view = LiveStudyView(console, lambda results: None)
    outcomes = run_peers(plan, view, lambda done: write_peers(plan, done, typed_command()))
    if json:
        for outcome in outcomes:
            print_json({"study": "peers", **outcome.row()})
    else:
        typer.echo(peers_table(outcomes))
        typer.echo(verdict(outcomes))
    say_where(console, out)
