"""`listwise local extract | train`: local features of photos, and networks that make them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from listwise.cli import options
from listwise.cli.output import note, open_console, print_result, say, stoppable, warn_of_unreadable
from listwise.progress import progress_bar

EXTRACT = options.examples("""Examples:
  listwise local extract photos photos.arrow                  Hessian-affine regions, RootSIFT
  listwise local extract photos photos.arrow --delf delf      deep features of listwise local train

Run the same command again to resume an interrupted run.
""")
TRAIN = options.examples("""Examples:
  listwise local train landmarks.csv delf --weights resnet50.safetensors
  listwise local train landmarks.csv delf --weights runs/a/model --no-fine-tune
""")


def extract(
    source: options.Source,
    out: Annotated[Path, typer.Argument(help="The file to write (.arrow).")],
    delf: options.Delf = None,
    count: options.Count = None,
    device: options.Device = "auto",
    workers: options.Workers = None,
    strict: options.Strict = False,
    json: options.AsJson = False,
) -> None:
    """Write the local features of photos into one file."""
    from listwise.data.catalog import photos_of
    from listwise.local.extract import extract_features, open_extractor

    images = photos_of(source)
    console = open_console(json)
    extractor = open_extractor(delf, count, device)
    with stoppable(), progress_bar(console, "extracting", len(images)) as advance:
        file = extract_features(
            images,
            out,
            extractor,
            strict=strict,
            workers=workers,
            on_progress=advance,
            on_note=partial(note, console),
        )
    features = int(file.counts.sum())
    facts = {
        "file": out,
        "photos": len(file),
        "features": features,
        "extractor": file.header.extractor,
        "unreadable": file.header.unreadable,
    }
    if not json:
        warn_of_unreadable(console, file.header.unreadable)
    each = f"{features / max(1, len(file)):.0f} each"
    done = f"{features} features of {len(file)} photos ({each}) in {out}"
    print_result(console, json, facts, done)


def train(
    data: Annotated[str, typer.Argument(help="Labelled photos, as for listwise train.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    backbone: Annotated[str, typer.Option(help="Any ResNet of timm.")] = "resnet50",
    weights: Annotated[
        str, typer.Option(help="A file, auto, pretrained, random, or a folder of listwise train.")
    ] = "auto",
    fine_tune: Annotated[
        bool, typer.Option("--fine-tune/--no-fine-tune", help="First fine-tune the backbone.")
    ] = True,
    updates: Annotated[int, typer.Option(min=1, help="Updates of each of the two steps.")] = 2000,
    batch_size: Annotated[int, typer.Option(min=2, help="Crops per update.")] = 64,
    crop: Annotated[int, typer.Option(min=32, help="Side of a crop in pixels.")] = 448,
    seed: options.Seed = 0,
    split: options.Split = None,
    device: options.Device = "auto",
    workers: options.Workers = None,
) -> None:
    """Train deep local features with attention (DELF) from image labels."""
    from listwise.local.delf.settings import DelfTraining
    from listwise.local.delf.training import read_training_photos, train_delf
    from listwise.settings import CropSettings

    console = open_console()
    images = read_training_photos(data, split, partial(note, console))
    settings = DelfTraining(
        backbone=backbone,
        weights=weights,
        fine_tune=fine_tune,
        fine_tune_updates=updates,
        attention_updates=updates,
        batch_size=batch_size,
        crops=CropSettings(size=crop),
        seed=seed,
        device=device,
        workers=workers,
    )
    with stoppable(), _training_bars(console) as advance:
        result = train_delf(
            images, out, settings, on_progress=advance, on_note=partial(note, console)
        )
    first = result.fine_tuned_accuracy
    tuned = "" if first is None else f"{100 * first:.1f} % fine-tuned, "
    say(
        console,
        f"held-out photos classified: {tuned}{100 * result.attention_accuracy:.1f} % with "
        f"attention; the features are in {result.folder}",
        "bold",
    )


@contextmanager
def _training_bars(console: Console) -> Iterator[Any]:
    """A bar for each step of a training, with its loss."""
    from listwise.progress import make_bars

    bars: dict[str, Any] = {}
    with make_bars(console) as progress:

        def advance(found: Any) -> None:
            if found.step not in bars:
                bars[found.step] = progress.add_task(found.step, total=found.total)
            loss = "" if found.loss is None else f", loss {found.loss:.3f}"
            progress.update(
                bars[found.step], completed=found.done, description=f"{found.step}{loss}"
            )

        yield advance
