"""`listwise extract`, `whiten`, `tune` and `evaluate`: commands for a model."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from listwise.cli.command import command, make_app
from listwise.cli.output import Output, check_output, stoppable
from listwise.errors import InputError
from listwise.progress import progress_bar

if TYPE_CHECKING:
    from listwise.descriptors.learning import LearnedWhitening
    from listwise.results import Evaluation

app = make_app("Compute descriptors with a model, and improve and evaluate it.")


@command(app, "descriptors.extract:extract")
def extract(
    output: Output, model: str, photos: str, out: Path, *, device: str = "auto", **options: Any
) -> None:
    """Compute the descriptors of photos and write them to a file.

    Args:
        model: model folder, run folder, ONNX file, or timm name such as resnet50.
        photos: folder of photos, .csv or .parquet table with a column path, .txt list of paths, or
            name of a data set.
        out: descriptor file to write (.parquet).

    Examples:
      listwise extract runs/a/model photos photos.parquet
      listwise extract runs/a/model queries.csv queries.parquet
      listwise extract resnet50 photos out.parquet --scales 1,0.7071
      torchrun --nproc-per-node 8 -m listwise extract resnet50 photos out.parquet

    Run the same command again to resume after an interruption. Under torchrun each process
    describes its share of the photos and writes its own file: out-00001-of-00008.parquet and so on.
    """
    from listwise.data.catalog import photos_of

    images = photos_of(photos)

    from listwise.descriptors import Shard, load_model
    from listwise.descriptors import extract as extract_photos

    shard = Shard.from_torchrun()
    images = shard.images(images)
    with output.console.status(f"loading {model}"):
        opened = load_model(model, shard.device(device))
    started = time.perf_counter()
    with stoppable(), progress_bar(output.console, "computing descriptors", len(images)) as advance:
        file = extract_photos(
            opened, images, shard.file(out), on_progress=advance, on_note=output.note, **options
        )
    seconds = time.perf_counter() - started
    header = file.header
    facts = {
        "file": file.path,
        "descriptors": len(file),
        "dim": file.dim,
        "model": file.model,
        "whitened": header.whitened,
        "settings": file.settings,
        "unreadable": header.unreadable,
        "seconds": round(seconds, 2),
    }
    output.unreadable(header.unreadable)
    kind = "whitened descriptors" if header.whitened else "descriptors"
    done = f"wrote {len(file)} {kind} of {file.dim} dimensions to {file.path} ({seconds:.0f} s)"
    done += f"\ndescribed {file.settings.size_text()}"
    output.result(facts, done, "whiten", model, file.path)


@command(app, "descriptors.learning:learn_whitening", without=("folder", "source"))
def whiten(
    output: Output, model: Path, photos: str | None = None, *, remove: bool = False, **options: Any
) -> None:
    """Learn a whitening from photos and store it in the model.

    Args:
        model: model folder or run folder.
        photos: folder of photos, table, .txt list, name of a data set, or descriptor file of this
            model.
        remove: remove the whitening.

    Examples:
      listwise whiten runs/a/model labels.csv        # chosen on validation photos
      listwise whiten runs/a/model photos --dim 1024 --power 0.25 --shrinkage 0
      listwise whiten runs/a/model photos.parquet    # a file of listwise extract
      listwise whiten runs/a/model labels.csv --supervised
      listwise whiten runs/a/model --dim 128         # keep 128 dimensions
      listwise whiten runs/a/model --remove

    Learn from photos that resemble the database, but not from photos that you evaluate with. With
    labels, dimension, power and shrinkage are chosen by mAP on the split val of a table, or on
    classes that are held out. If no whitening helps, the model does not change, unless you give
    --dim, --power or --shrinkage.
    """
    if remove and (photos or options):
        raise InputError("`remove` takes only MODEL and `json`: leave out the other arguments")
    if photos is None:
        if not remove and list(options) != ["dim"]:
            raise InputError("give the photos to learn from: listwise whiten MODEL PHOTOS")
        _shorten(model, options.get("dim"), output)
        return

    from listwise.descriptors.learning import learn_whitening, whitening_source

    opened = whitening_source(photos, options.get("supervised", False))
    with stoppable(), progress_bar(output.console, "computing descriptors", len(opened)) as advance:
        found = learn_whitening(model, opened, on_progress=advance, on_note=output.note, **options)
    output.unreadable(found.unreadable)
    if found.choice is not None and not output.json:
        typer.echo(f"{found.choice.table()}\n{found.choice}")
    _show_whitening(model, found, output)


def _shorten(model: Path, dim: int | None, output: Output) -> None:
    """Keep the first dimensions of the descriptors of a model; None removes its whitening."""
    from listwise.descriptors.learning import remove_whitening, truncate_model

    facts: dict[str, Any] = {"model": model, "method": None}
    done = f"{model} no longer whitens its descriptors"
    if dim is None:
        remove_whitening(model, output.note)
    else:
        facts |= {"method": truncate_model(model, dim).info.method, "dim": dim}
        done = f"{model} now keeps the first {dim} dimensions of its descriptors"
    output.result(facts, done, "evaluate", model, "PHOTOS")


def _show_whitening(model: Path, found: "LearnedWhitening", output: Output) -> None:
    learned, choice, _ = found
    maps = {}
    if choice is not None:
        maps = {"plain_map": choice.start_map, "validation_map": choice.validation_map}
    if learned is None:
        from listwise.descriptors.learning import has_whitening

        done = f"no whitening is clearly better than none: {model} is unchanged"
        if has_whitening(model):
            done += "; it keeps its earlier whitening: remove it with --remove"
        output.result({"model": model, "method": None, **maps}, done)
        return
    if choice is not None and choice.gain.value < 0:
        output.note("the validation mAP is lower than without whitening")
    kept = learned.info.model_dump()
    dims = f"{len(learned.mean)} -> {learned.dim} dimensions"
    done = f"{model} now whitens its descriptors: {dims}, learned from {kept['learned_from']} "
    facts = {"model": model, **kept, "dim": learned.dim, **maps}
    output.result(facts, f"{done}descriptors", "evaluate", model, "PHOTOS")


@command(app, "results.tuning:tune")
def tune(output: Output, model: Path, photos: str, **options: Any) -> None:
    """Choose scales, GeM power, whitening and αQE of a model by its mAP on validation photos.

    Args:
        model: model folder or run folder.

    Examples:
      listwise tune runs/a/model photos.csv      # validated on the split val
      listwise tune runs/a/model validation      # a folder of class folders
      listwise tune runs/a/model photos.csv --max-side 1024 --max-cost 3

    Use photos of things that the model was not trained on. The settings are stored in the model,
    and apply wherever you give none. If an index uses the model, tune a copy of the folder: a new
    GeM power or whitening changes the descriptors. Then run listwise index upgrade with the copy.
    """
    from listwise import results

    with stoppable(""):
        found = results.tune(model, photos, on_note=output.note, **options)
    names = ("start_map", "validation_map", "start_seconds", "seconds", "steps")
    facts = {"model": model, "changed": found.changed, "settings": found.model.tuned}
    output.answer(facts | {name: getattr(found, name) for name in names})
    typer.echo(found.table())
    from listwise.descriptors.choosing import searched_in

    photos_per_class = f"{found.queries} photos of {found.classes} classes"
    photos_per_class += searched_in(found.parts)
    milliseconds = f"{1000 * found.start_seconds:.1f} -> {1000 * found.seconds:.1f} ms per photo"
    output.say(
        f"validation mAP {100 * found.start_map:.1f} -> {100 * found.validation_map:.1f} "
        f"({photos_per_class}), time of the network {milliseconds}"
    )
    done = f"the settings are stored in {model}" if found.changed else f"{model} is unchanged"
    output.say(done if found.changed else f"no other setting is clearly better: {done}", "bold")
    output.next_step("index", "build", "INDEX", "PHOTOS", "--model", model)


@command(app, "descriptors.model:Model.calibrate")
def calibrate(
    output: Output, model: Path, photos: str, *, device: str = "auto", **options: Any
) -> None:
    """Fit the probability that two photos show the same thing, and store it in the model.

    Args:
        model: model folder or run folder.
        photos: labelled photos: a folder of class folders, a .csv or .parquet table, or a .txt
            list.

    Examples:
      listwise calibrate runs/a/model validation
      listwise search shop chair.jpg --min-probability 0.9

    Use photos of things that the model was not trained on. listwise train calibrates the model of a
    run on its validation photos. Calibrate again after listwise whiten or listwise tune.
    """
    from listwise.descriptors.loading import find_model_folder, load_folder

    folder = find_model_folder(model)
    with stoppable(""):
        calibrated = load_folder(folder, device).calibrate(photos, **options)
    calibrated.save(folder)
    found = calibrated.calibration
    assert found is not None
    half, most = found.score(0.5), found.score(0.9)
    done = (
        f"{model} is calibrated: score {half:.3f} means a probability of 50 %, {most:.3f} of 90 %\n"
        f"{found.reliability()}"
    )
    output.result({"model": model, **found.model_dump()}, done)


@command(app, "results.evaluate:evaluate")
def evaluate(
    output: Output, model: str, benchmark: str, *, report: Path | None = None, **options: Any
) -> None:
    """Evaluate a model on a benchmark: print mAP and other metrics, write a report.

    Args:
        model: model folder, run folder, ONNX file, or timm name such as resnet50.
        benchmark: name or folder of a data set, or labelled photos: a folder of class folders or a
            .csv or .parquet table.
        report: write an HTML report to this file.

    Examples:
      listwise evaluate runs/a/model roxford5k           # a data set by name
      listwise evaluate runs/a/model photos.csv --split test
      listwise evaluate runs/a/model photos --against runs/b/model
      listwise evaluate runs/small roxford5k --database-model runs/large
      listwise evaluate runs/a/model roxford5k --expand --report report.html
      listwise evaluate runs/a/model roxford5k --refine diffusion
      listwise evaluate runs/a/model roxford5k --quality best
      listwise evaluate runs/a/model roxford5k --distractors distractors.parquet
      listwise evaluate runs/a/model roxford5k --dims 2048,512,128,64
      listwise evaluate runs/a/model birds.csv --levels
    """
    check_output(report)

    from listwise import results

    opened = results.open_benchmark(
        benchmark, options.get("data"), options.get("split"), options.get("levels", False)
    )
    models = 2 if {"against", "database_model"} & set(options) else 1
    with progress_bar(
        output.console, "computing descriptors", opened.photo_count * models
    ) as advance:
        result = results.evaluate(model, opened, on_progress=advance, **options)
    output.unreadable(result.unreadable)
    _print_evaluation(output, result)
    output.report(report, result.report)


def _print_evaluation(output: Output, result: "Evaluation") -> None:
    times = result.milliseconds
    if output.json:
        name = result.benchmark.name
        found: dict[str, Any] = {"benchmark": name, "figures": result.rows, "milliseconds": times}
        found["settings"] = {name: each.settings for name, each in result.described.items()}
        found |= {"levels": result.levels.figures} if result.levels else {}
        found |= {"sizes": [asdict(size) for size in result.sizes]} if result.sizes else {}
        output.print_json(found)
        return
    from listwise.evaluation.judged import LABELS

    typer.echo(result.table())
    if LABELS in result.figures:
        whole = "each query is searched in the whole database"
        output.say(
            f"protocol Labels: {whole}; a result is correct if it has the label of the query"
        )
    for name, described in result.described.items():
        if described.settings is not None:
            output.say(f"{name} described {described.settings.size_text()}")
    if len(times) > 1:
        each = ", ".join(f"{name} {time:.1f} ms" for name, time in times.items())
        output.say(f"time per query to rank the database: {each}")
