"""`listwise demo`: the whole way from nothing, on drawn buildings."""

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from listwise.data.catalog import Benchmark

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
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress
    from rich.table import Table

    from listwise.cli.run import show_plan
    from listwise.data.catalog import find_dataset
    from listwise.data.toy import TOY_LABELS, make_toy_landmarks
    from listwise.descriptors import Model, load_model
    from listwise.results import describe_benchmark
    from listwise.results.table import figures_of
    from listwise.training import Trainer, prepare
    from listwise.training.run.view import LiveTrainView

    console = Console(highlight=False)
    photos, run = folder / "toy-landmarks", folder / "run"
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("drawing toy landmarks", total=None)
        make_toy_landmarks(
            photos,
            seed=seed,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    benchmark = find_dataset(photos).benchmark()

    def typed(path: Path) -> str:
        return escape(shlex.quote(str(path)))

    console.print(f"toy landmarks are in [bold]{typed(photos)}[/bold]")

    plan = prepare(photos / TOY_LABELS, {**SETTINGS, "seed": seed})
    show_plan(plan, console)
    _forget_last(run, photos)
    trainer = Trainer(plan, run, LiveTrainView(console))
    with console.status("searching with the network as it came"):
        first = describe_benchmark(Model(trainer.net), benchmark)
    result = trainer.fit()
    with console.status("searching with the trained network"):
        second = describe_benchmark(load_model(result.model, plan.config.device), benchmark)
    results = first.evaluate(), second.evaluate()
    before, after = map(figures_of, results)

    table = Table(title="mAP on buildings never seen in training", title_justify="left")
    table.add_column("")
    for name in before:
        table.add_column(name, justify="right")
    rows = (("ImageNet network, as it came", before), ("trained with the AP loss", after))
    for name, found in rows:
        table.add_row(name, *(f"{100 * level['mAP']:.1f}" for level in found.values()))
    gains = (after[level]["mAP"] - before[level]["mAP"] for level in before)
    table.add_row("gain", *(f"{100 * gain:+.1f}" for gain in gains), style="bold")
    console.print(table)
    picture = folder / "before-and-after.png"
    gain = results[1]["Medium"].per_query_ap - results[0]["Medium"].per_query_ap
    _draw(picture, benchmark, _spread(gain), first.scores(), second.scores())
    index = folder / "index"
    with console.status("making an index of the photos"):
        _index(index, result.model, plan.config.device, benchmark)
    where = _where()
    console.print(
        f"trained for {result.seconds:.0f} s; "
        f"the network is in [bold]{typed(result.model)}[/bold]\n"
        f"a picture of what it finds now: [bold]{typed(picture)}[/bold]\n\n"
        "search the photos in your browser:\n"
        f"  [bold]{where}listwise serve {typed(index)}[/bold]\n\n"
        "next:\n"
        f"  {where}listwise evaluate {typed(result.model)} {typed(photos)} --report report.html\n"
        f"  {where}tensorboard --logdir {typed(run)}\n"
        f"  {where}listwise train YOUR-PHOTOS"
        "    (a folder of class folders, or a .csv of path,label)",
        soft_wrap=True,
    )


def _forget_last(run: Path, photos: Path) -> None:
    """Remove an earlier demo's run, and nothing else."""
    from listwise.training.run.folder import RUN_FILE, read_run

    if (run / RUN_FILE).exists() and Path(read_run(run)["data"]).parent == photos.resolve():
        shutil.rmtree(run)


def _index(folder: Path, model: Path, device: str, benchmark: "Benchmark") -> None:
    """Make an index of the benchmark's photos, in place of an earlier demo's."""
    from listwise.descriptors import load_model
    from listwise.errors import InputError
    from listwise.search import add_photos, create_store, header_of, open_store
    from listwise.search.engines import store_exists

    if store_exists(str(folder)):
        with open_store(folder) as index:
            made_of = index.header.model_folder
        if made_of != str(model.absolute()):
            raise InputError(f"{folder} is an index of another model: give another --folder")
        shutil.rmtree(folder)
    network = load_model(model, device)
    with create_store(folder, header_of(network)) as index:
        add_photos(index, network, benchmark.database)


def _where() -> str:
    """What goes before the names of our programs: their folder, where it is not on the path."""
    program = Path(sys.argv[0])
    if program.name != "listwise" or shutil.which("listwise"):
        return ""
    return f"{os.path.relpath(program.parent)}{os.sep}"


def _spread(gain: "NDArray[np.float64]") -> list[int]:
    """Four queries evenly spread between the one that gained least and the one that gained most."""
    import numpy as np

    places = np.linspace(0, len(gain) - 1, 6)[1:-1].round().astype(int)
    return [int(query) for query in np.argsort(gain)[places]]


def _draw(
    picture: Path,
    benchmark: "Benchmark",
    queries: list[int],
    before: "NDArray[np.float32]",
    after: "NDArray[np.float32]",
    found: int = 8,
) -> None:
    """Draw what the queries found before and after."""
    import numpy as np

    from listwise.data.sheets import Mark, Tile, ranked_sheet

    judged = benchmark.judged
    rows, captions = [], []
    for query in queries:
        right, junk = judged.positives("Medium", query), judged.junk("Medium", query)
        for caption, scores in (("before", before), ("after", after)):
            row = [Tile(benchmark.queries.paths[query], "query", judged.boxes[query])]
            for index in np.argsort(-scores[query], kind="stable")[:found]:
                mark: Mark = "junk" if index in junk else "wrong"
                mark = "right" if index in right else mark
                row.append(Tile(benchmark.database.paths[index], mark))
            rows.append(row)
            captions.append(caption)
    ranked_sheet(rows, captions).save(picture)
