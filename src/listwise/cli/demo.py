"""`listwise demo`: the whole way from nothing, on drawn buildings."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from listwise.data.ground_truth import GroundTruth
    from listwise.data.images import Box
    from listwise.evaluation import ProtocolResult, RevisitedResult
    from listwise.models import RetrievalNet

EXAMPLES = """Example:

  listwise demo --folder /tmp/demo
"""

# Found by trial on two cores: small crops and few updates, for a run of some three minutes.
SETTINGS = {
    "backbone": "tf_efficientnet_lite0",
    "batch_size": 192,
    "updates": 18,
    "learning_rate": 3e-4,
    "warmup": 2,
    "validate_every": 6,
    "patience": None,
    "val_max_side": 160,
    "crops": {"size": 128, "min_area": 0.4, "rotation": 8.0},
}


def demo(
    folder: Annotated[
        Path, typer.Option(help="Where the photos and the trained network go.")
    ] = Path("listwise-demo"),
    seed: Annotated[int, typer.Option(help="Of the buildings and the training.", min=0)] = 0,
) -> None:
    """Draw toy landmarks, train on some, and search others before and after."""
    import shutil

    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from listwise.cli.run import show_plan
    from listwise.data.ground_truth import read_ground_truth
    from listwise.data.toy import TOY_GROUND_TRUTH, TOY_LABELS, make_toy_landmarks
    from listwise.models import RetrievalNet
    from listwise.training import Trainer, prepare
    from listwise.training.view import LiveView

    console = Console(highlight=False)
    photos, run = folder / "toy-landmarks", folder / "run"
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("drawing toy landmarks", total=None)
        make_toy_landmarks(
            photos,
            seed=seed,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    truth = read_ground_truth(photos / TOY_GROUND_TRUTH)
    console.print(f"toy landmarks are in [bold]{photos}[/bold]")

    plan = prepare(photos / TOY_LABELS, {**SETTINGS, "seed": seed})
    show_plan(plan, console)
    shutil.rmtree(run, ignore_errors=True)
    trainer = Trainer(plan, run, LiveView(console))
    with console.status("searching with the network as it came"):
        before, first = _search(trainer.net, photos, truth)
    result = trainer.fit()
    with console.status("searching with the trained network"):
        after, second = _search(RetrievalNet.load(result.model), photos, truth)

    table = Table(title="mAP on buildings never seen in training", title_justify="left")
    table.add_column("")
    for name in ("Easy", "Medium", "Hard"):
        table.add_column(name, justify="right")
    rows = (("ImageNet network, as it came", before), ("trained with the AP loss", after))
    for name, found in rows:
        table.add_row(name, *(f"{100 * level.mAP:.1f}" for level in _levels(found)))
    gains = zip(_levels(before), _levels(after), strict=True)
    table.add_row("gain", *(f"{100 * (b.mAP - a.mAP):+.1f}" for a, b in gains), style="bold")
    console.print(table)
    picture = folder / "before-and-after.png"
    _draw(picture, photos, truth, first, second)
    console.print(
        f"trained for {result.seconds:.0f} s; the network is in [bold]{result.model}[/bold]\n"
        f"a picture of what it finds now: [bold]{picture}[/bold]\n\n"
        "next:\n"
        "  listwise train YOUR-PHOTOS        a folder of class folders, or a .csv of path,label\n"
        f"  tensorboard --logdir {run}   loss, validation mAP, ranked lists\n"
        "  listwise train --help             every setting"
    )


def _levels(result: "RevisitedResult") -> "tuple[ProtocolResult, ...]":
    return result.easy, result.medium, result.hard


def _search(
    net: "RetrievalNet", photos: Path, truth: "GroundTruth"
) -> "tuple[RevisitedResult, NDArray[np.float32]]":
    """The benchmark's figures, and the scores [Q, N] they come from."""
    from listwise.data import Images
    from listwise.evaluation import evaluate_revisited
    from listwise.models.embed import embed_photos

    def embed(names: list[str], boxes: "tuple[Box, ...] | None") -> "NDArray[np.float32]":
        images = Images(tuple(_path(photos, n) for n in names), tuple(names), boxes)
        rows: NDArray[np.float32] = embed_photos(net, images).descriptors.numpy()
        return rows

    scores = embed(truth.queries, tuple(truth.boxes)) @ embed(truth.names, None).T
    return evaluate_revisited(scores, truth), scores


def _path(photos: Path, name: str) -> str:
    return str(photos / "jpg" / f"{name}.jpg")


def _draw(
    picture: Path,
    photos: Path,
    truth: "GroundTruth",
    before: "NDArray[np.float32]",
    after: "NDArray[np.float32]",
    queries: int = 4,
    found: int = 8,
) -> None:
    """Draw what a few evenly spread queries found before and after."""
    import numpy as np

    from listwise.pictures import Mark, Tile, ranked_sheet

    rows, captions = [], []
    for query in np.linspace(0, len(truth.queries) - 1, queries).round().astype(int):
        right = {*truth.easy[query], *truth.hard[query]}
        for caption, scores in (("before", before), ("after", after)):
            row = [Tile(_path(photos, truth.queries[query]), "query", truth.boxes[query])]
            for index in np.argsort(-scores[query], kind="stable")[:found]:
                mark: Mark = "junk" if index in truth.junk[query] else "wrong"
                mark = "right" if index in right else mark
                row.append(Tile(_path(photos, truth.names[index]), mark))
            rows.append(row)
            captions.append(caption)
    ranked_sheet(rows, captions).save(picture)
