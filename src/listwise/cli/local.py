"""`listwise local`: local features, their codebook and index, search and evaluation."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from listwise.cli.command import Box, command, make_app, take
from listwise.cli.output import Output, check_output, stoppable
from listwise.cli.search import print_results
from listwise.errors import validated
from listwise.progress import count_of, progress_bar, stage_bars
from listwise.settings import DelfTraining

if TYPE_CHECKING:
    from listwise.local.delf_training import DelfProgress

app = make_app(
    "Search by local features (HesAff-rSIFT or DELF) with ASMK* and spatial verification.",
    """Examples:
  listwise local extract photos photos.features
  listwise local codebook other-photos.features words.safetensors
  listwise local index shop-local photos.features --codebook words.safetensors
  listwise local search shop-local chair.jpg
""",
)


@command(app, "local.extract:open_extractor", "local.extract:extract_features", without=("images",))
def extract(output: Output, photos: str, out: Path, **options: Any) -> None:
    """Compute the local features of photos and write them to a file.

    Args:
        photos: folder of photos, .csv or .parquet table with a column path, .txt list of paths, or
            name of a data set.
        out: feature file to write (.features).

    Examples:
      listwise local extract photos photos.features              # HesAff-rSIFT
      listwise local extract photos photos.features --delf delf  # DELF

    Run the same command again to resume after an interruption.
    """
    from listwise.data.catalog import photos_of
    from listwise.local.extract import extract_features, open_extractor

    images = photos_of(photos)
    extractor = open_extractor(**take(options, "delf", "count", "device"))
    with (
        stoppable(),
        progress_bar(output.console, "extracting local features", len(images)) as advance,
    ):
        file = extract_features(
            images, out, extractor, on_progress=advance, on_note=output.note, **options
        )
    features, header = int(file.counts.sum()), file.header
    facts = {"file": out, "photos": len(file), "features": features}
    facts |= {"extractor": header.extractor, "unreadable": header.unreadable}
    output.unreadable(header.unreadable)
    each = f"{features / max(1, len(file)):.0f} each"
    done = f"wrote {features} features of {len(file)} photos ({each}) to {out}"
    output.result(facts, done, "local", "codebook", out, "CODEBOOK")


@command(app, DelfTraining, json=False, without=("crops",))
def train(
    output: Output,
    photos: str,
    out: Path,
    *,
    crop: int = 448,
    split: str | None = None,
    **options: Any,
) -> None:
    """Train deep local features with attention (DELF) from image labels.

    Args:
        photos: labelled photos: a folder of class folders, a .csv or .parquet table with columns
            path and label, a .txt list, or the name of a data set.
        out: folder to write the DELF network to.
        crop: side of the square crops, in pixels.
        split: use only the photos of this split; by default train, if it exists.

    Examples:
      listwise local train landmarks.csv delf --weights resnet50.safetensors
      listwise local train landmarks.csv delf --weights runs/a --no-fine-tune
    """
    from listwise.local.delf_training import read_training_photos, train_delf

    settings = validated(DelfTraining, {"crops": {"size": crop}, **options})
    images = read_training_photos(photos, split, output.note)
    with stoppable(), stage_bars(output.console) as report:

        def show(found: "DelfProgress") -> None:
            loss = "" if found.loss is None else f", loss {found.loss:.3f}"
            report(f"{found.step}{loss}", found.done, found.total)

        result = train_delf(images, out, settings, on_progress=show, on_note=output.note)
    first = result.fine_tuned_accuracy
    tuned = "" if first is None else f"{100 * first:.1f} % after fine-tuning, "
    output.say(
        f"accuracy on held-out photos: {tuned}{100 * result.attention_accuracy:.1f} % with "
        f"attention; the features are in {result.folder}",
        "bold",
    )
    output.next_step("local", "extract", "PHOTOS", "FEATURES", "--delf", result.folder)


@command(app, "local.codebook:learn_codebook", json=False, without=("batches", "extractor"))
def codebook(output: Output, features: list[Path], out: Path, **options: Any) -> None:
    """Learn a codebook of visual words from local features.

    Args:
        features: feature files that listwise local extract wrote.
        out: codebook to write (.safetensors).

    Example:
      listwise local codebook other-photos.features words.safetensors

    Learn from photos that resemble the database, but not from photos that you evaluate with.
    """
    from listwise.local.codebook import ITERATIONS, learn_from_files

    rounds = options.get("iterations", ITERATIONS)
    with stoppable(), progress_bar(output.console, "k-means", rounds) as advance:
        found = learn_from_files(features, out, on_iteration=lambda _: advance(1), **options)
    output.say(f"wrote {len(found)} visual words ({found.info.extractor}) to {out}", "bold")
    output.next_step("local", "index", "INDEX", "FEATURES", "--codebook", out)


@command(app, "local.asmk:change_index", without=("folder", "files"))
def index(output: Output, index: Path, features: list[Path] | None = None, **options: Any) -> None:
    """Build an ASMK* index of local features, add photos to it or remove them.

    Args:
        index: folder of the index.
        features: feature files of the photos to add.

    Examples:
      listwise local index shop-local photos.features --codebook words.safetensors
      listwise local index shop-local more.features         # add photos
      listwise local index shop-local --remove chairs/a.jpg  # remove a photo
    """
    from listwise.local.asmk import change_index
    from listwise.local.storage import FeatureFile

    files = [FeatureFile.open(path) for path in features or []]
    with stoppable(), progress_bar(output.console, "indexing", sum(map(len, files))) as advance:
        opened = change_index(index, files, on_photo=advance, **options)
    facts = opened.info()
    each = f"{facts['words_per_photo']:.0f} words and {facts['bytes_per_photo'] / 1000:.1f} kB each"
    text = f"{count_of(facts['photos'], 'photo')} in {index}, {each}"
    output.result(facts, text, "local", "search", index, "PHOTO")


@command(app, "local.asmk:search_by_photo", "local.extract:open_extractor", without=("folder",))
def search(
    output: Output,
    index: Path,
    photo: Path,
    *,
    box: Box | None = None,
    device: str = "auto",
    **options: Any,
) -> None:
    """Find the photos of an ASMK* index that are most similar to a photo.

    Args:
        index: folder that listwise local index wrote.
        photo: photo of what to find.
        box: search by this part of the photo, in pixels.

    Examples:
      listwise local search shop-local chair.jpg
      listwise local search shop-local chair.jpg --features photos.features
    """
    from listwise.data import PhotoFile
    from listwise.local.asmk import search_by_photo
    from listwise.local.extract import open_extractor

    extractor = open_extractor(**take(options, "delf", "count"), device=device)
    with output.console.status("searching"):
        hits = search_by_photo(
            index, PhotoFile(str(photo), box), extractor, device=device, **options
        )
    rows = [{"id": hit.id, "score": hit.score, "inliers": hit.inliers} for hit in hits]
    output.answer({"index": index, "results": rows})
    print_results(output, rows)


@command(app, "studies.local:evaluate_local")
def evaluate(
    output: Output,
    benchmark: str,
    *,
    codebook: Path,
    folder: Path | None = None,
    report: Path | None = None,
    **options: Any,
) -> None:
    """Evaluate local features on a benchmark: ASMK*, without and with verification.

    Examples:
      listwise local evaluate roxford5k --codebook words
      listwise local evaluate roxford5k --codebook words --models model
      listwise local evaluate roxford5k --codebook words --no-verify

    Features, descriptors and the index are stored in --folder, and later runs reuse them. The
    descriptors of --models are in its subfolder model-FINGERPRINT, which --descriptors accepts on
    any machine.
    """
    from listwise.results.report import figures_of, format_table, write_report
    from listwise.studies.local import evaluate_local

    check_output(report)
    bars = partial(progress_bar, output.console)
    with stoppable():
        judged, searches = evaluate_local(
            benchmark, codebook, folder, progress=bars, on_note=output.note, **options
        )
    figures = {search.name: figures_of(search.results) for search in searches}
    if output.json:
        output.print_json({"benchmark": judged.name, "figures": figures})
    else:
        typer.echo(format_table(judged.name, figures))
    shown = searches[-2:]  # the last search, without and with verification
    table = {search.name: figures[search.name] for search in [*shown, *searches]}
    title = f"{judged.name}: local features"
    output.report(
        report, lambda file, **how: write_report(file, title, shown, judged, table=table, **how)
    )
