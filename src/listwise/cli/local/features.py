"""`listwise local extract | train`: local features of photos, and networks that make them."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from listwise.cli import options
from listwise.cli.output import note, open_console, print_result, say, stoppable, warn_of_unreadable
from listwise.progress import progress_bar

EXTRACT = """Examples:
  listwise local extract photos photos.arrow              # HesAff-rSIFT
  listwise local extract photos photos.arrow --delf delf  # DELF

Run the same command again to resume after an interruption.
"""
TRAIN = """Examples:
  listwise local train landmarks.csv delf --weights resnet50.safetensors
  listwise local train landmarks.csv delf --weights runs/a/model --no-fine-tune
"""


def extract(
    source: options.Source,
    out: Annotated[Path, options.argument("OUT", "Feature file to write (.arrow).")],
    delf: options.Delf = None,
    count: options.Count = None,
    device: options.Device = "auto",
    workers: options.Workers = None,
    strict: options.Strict = False,
    json: options.AsJson = False,
) -> None:
    """Compute the local features of photos and write them to a file."""
    from listwise.data.catalog import photos_of
    from listwise.local.extract import extract_features, open_extractor

    images = photos_of(source)
    console = open_console(json)
    extractor = open_extractor(delf, count, device)
    with stoppable(), progress_bar(console, "extracting local features", len(images)) as advance:
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
    done = f"wrote {features} features of {len(file)} photos ({each}) to {out}"
    print_result(console, json, facts, done)


def train(
    data: Annotated[str, options.argument("PHOTOS", options.LABELLED_PHOTOS)],
    out: Annotated[Path, options.argument("OUT", "Folder to write the DELF network to.")],
    backbone: Annotated[str, options.text("Name of a timm ResNet.")] = "resnet50",
    weights: Annotated[
        str,
        options.text(
            "Initial weights: auto, pretrained, random, a weights file, or a model folder."
        ),
    ] = "auto",
    fine_tune: Annotated[
        bool, options.flag("--fine-tune/--no-fine-tune", "Fine-tune the backbone first.")
    ] = True,
    updates: Annotated[
        int,
        options.integer("Number of updates to fine-tune, and again to train the attention.", min=1),
    ] = 2000,
    batch_size: Annotated[int, options.integer("Number of crops per update.", min=2)] = 64,
    crop: Annotated[int, options.integer("Side of the square crops, in pixels.", min=32)] = 448,
    seed: options.Seed = 0,
    split: Annotated[
        str | None,
        options.text("Use only the photos of this split.", show_default="train, if it exists"),
    ] = None,
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
    tuned = "" if first is None else f"{100 * first:.1f} % after fine-tuning, "
    say(
        console,
        f"accuracy on held-out photos: {tuned}{100 * result.attention_accuracy:.1f} % with "
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
