"""`listwise local`: local features, their codebook and index, search and evaluation."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from listwise.cli.bars import progress_bar
from listwise.cli.options import parse_box
from listwise.cli.output import say, stoppable, warn_of_unreadable
from listwise.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from listwise.data.catalog import Benchmark
    from listwise.local.codebook import Codebook
    from listwise.local.extract import Extractor
    from listwise.studies.local import LocalRow

app = typer.Typer(
    help="Search by local features: HesAff-rSIFT or DELF, ASMK*, spatial verification.",
    no_args_is_help=True,
)

EXTRACT = """Examples:

  listwise local extract photos photos.arrow                  Hessian-affine regions, RootSIFT

  listwise local extract photos photos.arrow --delf delf      deep features of listwise local train

An interrupted run goes on when the same command is given again.
"""
CODEBOOK = """Example:

  listwise local codebook other-photos.arrow words.safetensors

Learn it from photos like those you search, but not from the ones you evaluate with.
"""
INDEX = """Examples:

  listwise local index shop-local photos.arrow --codebook words.safetensors

  listwise local index shop-local more.arrow                  add to it

  listwise local index shop-local --remove chairs/a.jpg       remove from it
"""
SEARCH = """Examples:

  listwise local search shop-local chair.jpg

  listwise local search shop-local chair.jpg --features photos.arrow     with verification
"""
EVALUATE = """Examples:

  listwise local evaluate roxford5k --codebook words.safetensors

  listwise local evaluate roxford5k --codebook words.safetensors --model runs/a/model

  listwise local evaluate roxford5k --codebook words.safetensors --descriptors described

Features, descriptors and the index are kept in a folder and used by the next run. Descriptors of
--model lie in model-FINGERPRINT in it, which --descriptors takes, also from another machine.
"""
TRAIN = """Examples:

  listwise local train landmarks.csv delf --weights resnet50.safetensors

  listwise local train landmarks.csv delf --weights runs/a/model --no-fine-tune
"""

Delf = Annotated[
    Path | None, typer.Option(help="Deep features of this folder in place of HesAff-rSIFT.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...; auto takes a GPU if any.")]
Workers = Annotated[int | None, typer.Option(min=0, help="Processes; from the cores by default.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.command(epilog=EXTRACT)
def extract(
    source: Annotated[str, typer.Argument(help="Photos, as for listwise extract.")],
    out: Annotated[Path, typer.Argument(help="The file to write (.arrow).")],
    delf: Delf = None,
    count: Annotated[
        int | None,
        typer.Option(min=1, help="Features of a photo, at most. [dim]2000, or 1000[/dim]"),
    ] = None,
    device: Device = "auto",
    workers: Workers = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at the first photo that cannot be read.")
    ] = False,
    json: Json = False,
) -> None:
    """Write the local features of photos into one file."""
    import json as encoder

    from rich.console import Console

    from listwise.data.catalog import photos_of

    images = photos_of(source)

    from listwise.local.extract import extract_features

    console = Console(stderr=json, highlight=False)
    extractor = _extractor(delf, count, device)
    with stoppable(), progress_bar(console, "extracting", len(images)) as advance:
        file = extract_features(
            images,
            out,
            extractor,
            strict=strict,
            workers=workers,
            on_progress=advance,
            on_note=lambda note: say(console, f"note: {note}", "yellow"),
        )
    features = int(file.counts.sum())
    if json:
        result = {
            "file": str(out),
            "photos": len(file),
            "features": features,
            "extractor": file.header.extractor,
            "unreadable": file.header.unreadable,
        }
        typer.echo(encoder.dumps(result))
        return
    warn_of_unreadable(console, file.header.unreadable)
    each = features / max(1, len(file))
    say(console, f"{features} features of {len(file)} photos ({each:.0f} each) in {out}", "bold")


@app.command(epilog=TRAIN)
def train(
    data: Annotated[str, typer.Argument(help="Labelled photos, as for listwise train.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    backbone: Annotated[str, typer.Option(help="Any ResNet of timm.")] = "resnet50",
    weights: Annotated[
        str,
        typer.Option(help="A file, auto, pretrained, random, or a folder of listwise train."),
    ] = "auto",
    fine_tune: Annotated[
        bool, typer.Option("--fine-tune/--no-fine-tune", help="First fine-tune the backbone.")
    ] = True,
    updates: Annotated[int, typer.Option(min=1, help="Updates of each of the two steps.")] = 2000,
    batch_size: Annotated[int, typer.Option(min=2, help="Crops an update.")] = 64,
    crop: Annotated[int, typer.Option(min=32, help="Side of a crop in pixels.")] = 448,
    seed: Annotated[int, typer.Option(min=0, help="Of crops and batches.")] = 0,
    split: Annotated[
        str | None, typer.Option(help="Of a table: train on this split alone.")
    ] = None,
    device: Device = "auto",
    workers: Workers = None,
) -> None:
    """Train deep local features with attention (DELF) from image labels."""
    from rich.console import Console

    from listwise.data import check_images
    from listwise.data.catalog import labelled_of

    console = Console(highlight=False)
    images = labelled_of(data)
    if split is not None:
        images = images.of_split(split)
    elif images.splits is not None and "train" in images.splits:
        images = images.of_split("train")
    images, report = check_images(images)
    for line in report.lines():
        say(console, f"note: {line}", "yellow")

    from listwise.local.delf.settings import DelfTraining
    from listwise.local.delf.training import train_delf
    from listwise.settings import CropSettings

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
            images,
            out,
            settings,
            on_progress=advance,
            on_note=lambda note: say(console, f"note: {note}", "yellow"),
        )
    first = result.fine_tuned_accuracy
    tuned = "" if first is None else f"{100 * first:.1f} % fine-tuned, "
    said = f"held-out photos classified: {tuned}{100 * result.attention_accuracy:.1f} % attentive"
    say(console, f"{said}; the features are in {result.folder}", "bold")


@app.command(epilog=CODEBOOK)
def codebook(
    features: Annotated[list[Path], typer.Argument(help="Files of listwise local extract.")],
    out: Annotated[Path, typer.Argument(help="The codebook to write (.safetensors).")],
    words: Annotated[int, typer.Option(min=2, help="Visual words.")] = 65_536,
    per_word: Annotated[int, typer.Option(min=1, help="Features a word, at most.")] = 60,
    iterations: Annotated[int, typer.Option(min=1, help="Of k-means.")] = 10,
    seed: Annotated[int, typer.Option(min=0, help="Of the features drawn.")] = 0,
    device: Device = "auto",
) -> None:
    """Learn the visual words of local features."""
    from rich.console import Console

    from listwise.local.codebook import is_codebook, learn_codebook
    from listwise.local.storage import FeatureFile

    console = Console(highlight=False)
    if out.exists() and not is_codebook(out):
        raise InputError(f"{out} exists and is no codebook: give another name")
    files = [FeatureFile.open(path) for path in features]
    for file in files[1:]:
        file.require(files[0].header.extractor)
    batches = (each.descriptors for file in files for each in file)
    with stoppable(), progress_bar(console, "k-means", iterations) as advance:
        found = learn_codebook(
            batches,
            files[0].header.extractor,
            words,
            per_word,
            iterations,
            seed,
            on_iteration=lambda *_: advance(1),
            device=device,
        )
    found.save(out)
    say(console, f"{len(found)} words of {found.info.extractor} in {out}", "bold")


@app.command(epilog=INDEX)
def index(
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="A folder.")],
    features: Annotated[
        list[Path] | None, typer.Argument(help="Files of listwise local extract.")
    ] = None,
    codebook: Annotated[Path | None, typer.Option(help="For a new index; it keeps a copy.")] = None,
    remove: Annotated[list[str] | None, typer.Option(help="Remove a photo, by its id.")] = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Make an ASMK* index of local features, add photos to it, or remove some."""
    import json as encoder

    from rich.console import Console

    from listwise.local.asmk_index import AsmkIndex
    from listwise.local.codebook import Codebook
    from listwise.local.storage import FeatureFile

    console = Console(stderr=json, highlight=False)
    files = [FeatureFile.open(path) for path in features or []]
    if AsmkIndex.exists(index):
        opened = AsmkIndex.open(index, device)
        if codebook is not None:
            opened.require(Codebook.load(codebook))
    elif codebook is None:
        raise InputError(f"there is no index at {index}: name a codebook with --codebook")
    else:
        words = Codebook.load(codebook, device)
        for file in files:  # before the index is made: an empty one of wrong words is in the way
            words.require(file.header.extractor)
        opened = AsmkIndex.create(index, words)
    for file in files:
        opened.codebook.require(file.header.extractor)
    for name in remove or []:
        if name not in opened:
            raise InputError(f"{index} has no photo {name}")
    opened.remove(remove or [])
    for file in files:
        missing = [row for row, name in enumerate(file.ids) if name not in opened]
        with stoppable(), progress_bar(console, "indexing", len(missing)) as advance:
            opened.add(
                [file.ids[row] for row in missing],
                (file.read(row).descriptors for row in missing),
                advance,
            )
    facts = opened.info()
    if json:
        typer.echo(encoder.dumps(facts))
        return
    say(
        console,
        f"{facts['photos']} photos in {index}, {facts['words_per_photo']:.0f} words and "
        f"{facts['bytes_per_photo'] / 1000:.1f} kB each",
        "bold",
    )


@app.command(epilog=SEARCH)
def search(
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="Of listwise local index.")],
    photo: Annotated[Path, typer.Argument(help="The query.")],
    features: Annotated[
        Path | None, typer.Option(help="The indexed photos' features, to verify the first 100.")
    ] = None,
    box: Annotated[
        str | None, typer.Option(metavar="X0,Y0,X1,Y1", help="The part of the photo meant.")
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="How many to find.")] = 10,
    delf: Delf = None,
    count: Annotated[int | None, typer.Option(min=1, help="As for extract.")] = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Find the photos of an ASMK* index that are most like one."""
    import json as encoder

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from listwise.data import PhotoFile
    from listwise.local.asmk_index import AsmkIndex
    from listwise.local.search import search_local
    from listwise.local.storage import FeatureFile

    console = Console(stderr=json, highlight=False)
    opened = AsmkIndex.open(index, device)
    extractor = _extractor(delf, count, device)
    opened.codebook.require(extractor.name)
    file = None if features is None else FeatureFile.open(features)
    if file is not None:
        file.require(extractor.name)
    with console.status("searching"):
        query = extractor(PhotoFile(str(photo), None if box is None else parse_box(box)))
        hits = search_local(opened, query, k, file.get if file else None)
    if json:
        rows = [
            {
                "id": hit.id,
                "score": hit.score,
                "inliers": None if hit.verified is None else hit.verified.inliers,
            }
            for hit in hits
        ]
        typer.echo(encoder.dumps({"index": str(index), "results": rows}))
        return
    table = Table("", "score", "points", "photo", box=None, padding=(0, 2, 0, 0))
    for rank, hit in enumerate(hits, start=1):
        points = "" if hit.verified is None else str(hit.verified.inliers)
        table.add_row(str(rank), f"{hit.score:.4f}", points, escape(hit.id))
    console.print(table)


@app.command(epilog=EVALUATE)
def evaluate(
    benchmark: Annotated[str, typer.Argument(help="A judged benchmark: its name or folder.")],
    codebook: Annotated[Path, typer.Option(help="Learned from other photos.")],
    folder: Annotated[
        Path | None,
        typer.Option(help="Where features and index are kept. [dim]local-BENCHMARK-FEATURES[/dim]"),
    ] = None,
    delf: Delf = None,
    count: Annotated[int | None, typer.Option(min=1, help="As for extract.")] = None,
    model: Annotated[
        list[Path] | None, typer.Option(help="Also this network's search, and verified.")
    ] = None,
    descriptors: Annotated[
        list[Path] | None,
        typer.Option(help="The same, from a folder of descriptors that --model has kept."),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Verify the first 100 of each list.")
    ] = True,
    report: Annotated[Path | None, typer.Option(help="Write a page to look at (.html).")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of the data sets.")] = None,
    device: Device = "auto",
    workers: Workers = None,
    json: Json = False,
) -> None:
    """Search a benchmark with local features: ASMK*, and with spatial verification (SP)."""
    import json as encoder

    from rich.console import Console

    from listwise.data.catalog import find_dataset

    judged = find_dataset(benchmark, data).benchmark()
    if judged.labelled:
        raise InputError(f"{benchmark} is a labelled set: this takes a judged benchmark")
    if report is not None and not report.parent.is_dir():
        raise InputError(f"{report}: there is no folder {report.parent} for the report")

    from listwise.local.codebook import Codebook
    from listwise.results.table import format_table
    from listwise.studies.local import figures_of_row

    console = Console(stderr=json, highlight=False)
    words = Codebook.load(codebook, device)
    extractor = _extractor(delf, count, device)
    words.require(extractor.name)
    place = folder or Path(f"local-{judged.name}-{'delf' if delf else 'hesaff'}")
    rows = _rows(
        console,
        judged,
        f"{'DELF' if delf else 'HesAff-rSIFT'}-ASMK*",
        words,
        extractor,
        place,
        model or [],
        descriptors or [],
        verify,
        device,
        workers,
    )
    found = {row.name: figures_of_row(judged, row) for row in rows}
    if json:
        typer.echo(encoder.dumps({"benchmark": judged.name, "figures": found}, ensure_ascii=False))
    else:
        typer.echo(format_table(judged.name, found))
    if report is not None:
        _write(report, judged, rows, console)
        say(console, f"the report is in {report}", "bold")


def _rows(
    console: "Console",
    benchmark: "Benchmark",
    name: str,
    words: "Codebook",
    extractor: "Extractor",
    folder: Path,
    models: list[Path],
    descriptors: list[Path],
    verify: bool,
    device: str,
    workers: int | None,
) -> "list[LocalRow]":
    from listwise.descriptors import load_model
    from listwise.local.pairs import verify_pairs
    from listwise.machine import Machine
    from listwise.studies.local import (
        LocalRow,
        describe_globally,
        describe_locally,
        first_pairs,
        global_scores,
        search_asmk,
        verified_row,
    )

    def note(text: str) -> None:
        say(console, f"note: {text}", "yellow")

    photos = len(benchmark.queries) + len(benchmark.database)
    tables = {str(path): global_scores(benchmark, path) for path in descriptors}
    with stoppable():
        with progress_bar(console, "extracting", photos) as advance:
            queries, database = describe_locally(
                benchmark,
                extractor,
                folder,
                workers=workers,
                on_progress=advance,
                on_note=note,
            )
        with progress_bar(console, "indexing and searching", photos) as advance:
            index, table = search_asmk(
                queries, database, words, folder / f"index-{words.fingerprint[:12]}", advance
            )
        size = index.info()["bytes_per_photo"] / 1000
        say(console, f"{len(index)} photos indexed, {size:.1f} kB each", "none")
        tables = {name: table} | tables
        for path in models:
            network = load_model(path, device)
            kept = folder / f"model-{network.fingerprint[:12]}"
            with progress_bar(console, f"describing with {path}", photos) as advance:
                describe_globally(
                    benchmark,
                    network,
                    kept,
                    workers=workers,
                    on_progress=advance,
                    on_note=note,
                )
            tables[str(path)] = global_scores(benchmark, kept)
        if not verify:
            return [LocalRow(name, table, {}) for name, table in tables.items()]
        pairs = {pair for table in tables.values() for pair in first_pairs(table)}
        with progress_bar(console, "verifying", len(pairs)) as advance:
            processes = Machine.detect("cpu").cores if workers is None else workers
            verified = verify_pairs(queries, database, pairs, processes, advance)
    return [
        row
        for name, table in tables.items()
        for row in (LocalRow(name, table, {}), verified_row(f"{name} + SP", table, verified))
    ]


def _write(path: Path, benchmark: "Benchmark", rows: "list[LocalRow]", console: "Console") -> None:
    from listwise.studies.local import write_local_report

    with progress_bar(console, "making the report", 0) as advance:
        write_local_report(
            path,
            benchmark,
            rows,
            command=" ".join(["listwise", *sys.argv[1:]]),
            on_progress=lambda done, total: advance(1),
        )


def _extractor(delf: Path | None, count: int | None, device: str) -> "Extractor":
    if delf is None:
        from listwise.local.extract import DEFAULT, HessianAffine

        return DEFAULT if count is None else HessianAffine(count)
    from listwise.local.delf.extractor import DelfExtractor
    from listwise.local.delf.settings import DelfSettings

    settings = DelfSettings() if count is None else DelfSettings(count=count)
    return DelfExtractor(delf, settings, device)


@contextmanager
def _training_bars(console: "Console") -> Iterator[Any]:
    """A bar for each step of a training."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[said]}"),
    )
    bars: dict[str, Any] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def advance(found: Any) -> None:
            if found.step not in bars:
                bars[found.step] = progress.add_task(found.step, total=found.total, said="")
            said = "" if found.loss is None else f"loss {found.loss:.3f}"
            progress.update(bars[found.step], completed=found.done, said=said)

        yield advance
