"""`listwise index`: photos into an index and out of it."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from listwise.cli.bars import progress_bar
from listwise.cli.options import parse_bytes, parse_numbers
from listwise.cli.output import say
from listwise.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from listwise.data import Images
    from listwise.descriptors import Model
    from listwise.search import Store
    from listwise.search.filling import Added
    from listwise.search.store import IndexHeader, SearchIntent

app = typer.Typer(help="Make an index of photos, add to it, remove from it.", no_args_is_help=True)

BUILD = """Examples:

  listwise index build shop photos --model runs/a/model

  listwise index build shop photos.csv --model runs/a/model --memory 2GB --recall 0.95

  listwise index build milvus://127.0.0.1:19530/shop photos --model runs/a/model

  listwise index build shop a.parquet b.parquet --root photos --model runs/a/model

An index is a folder, milvus://host:port/name, or a .db file of milvus-lite. Columns of a table
other than path and box are kept as attributes. An interrupted build goes on when the same command
is given again.
"""
ADD = """Examples:

  listwise index add shop more-photos

  listwise index add shop a.jpg b.jpg
"""
REMOVE = """Examples:

  listwise index remove shop chairs/a.jpg

  listwise index remove shop more-photos
"""
TUNE = """Examples:

  listwise index tune shop --recall 0.99

  listwise index tune shop --memory 2GB --milliseconds 20

  listwise index tune shop                     leave it to Listwise
"""
INFO = """Example:

  listwise index info shop --json
"""

Place = Annotated[
    str, typer.Argument(metavar="INDEX", help="A folder, milvus://host:port/name, or a .db file.")
]
Sources = Annotated[
    list[str],
    typer.Argument(metavar="PHOTOS...", help="Folders, tables, lists, photos, descriptor files."),
]
Memory = Annotated[
    str | None, typer.Option(help="Memory that search may take, such as 500MB or 2GB.")
]
Milliseconds = Annotated[float | None, typer.Option(help="That a query may take.")]
Recall = Annotated[
    float | None, typer.Option(help="Of the ten nearest, how many must be found, from 0 to 1.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")]
Workers = Annotated[
    int | None, typer.Option(min=0, help="Processes that decode; from the cores by default.")
]
Root = Annotated[
    Path | None, typer.Option(help="Folder of a descriptor file's photos, for paths and pictures.")
]
Thumbnails = Annotated[
    bool, typer.Option("--thumbnails/--no-thumbnails", help="Keep a small picture of each photo.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.command(epilog=BUILD)
def build(
    index: Place,
    sources: Sources,
    model: Annotated[Path, typer.Option(help="The model folder that describes the photos.")],
    max_side: Annotated[
        int | None, typer.Option(min=1, help="Reduce photos to this long side; never by default.")
    ] = None,
    scales: Annotated[str, typer.Option(help="Sizes each photo is seen at, with commas.")] = "1",
    power: Annotated[float, typer.Option(help="Of the mean over the scales.")] = 3.0,
    memory: Memory = None,
    milliseconds: Milliseconds = None,
    recall: Recall = None,
    root: Root = None,
    thumbnails: Thumbnails = True,
    device: Device = "auto",
    workers: Workers = None,
    json: Json = False,
) -> None:
    """Make an index of photos, or go on with one."""
    from rich.console import Console

    from listwise.search import create_store, open_store
    from listwise.search.engines import store_exists
    from listwise.search.filling import header_of

    intent = _intent(memory, milliseconds, recall)
    sizes = parse_numbers(scales, "scales")
    found = [_source(source) for source in sources]
    console = Console(stderr=json, highlight=False)
    opened_model = _model(console, model, device)
    header = header_of(opened_model, model, max_side=max_side, scales=sizes, power=power)
    files = [source for source in found if isinstance(source, Path)]
    if files:
        header = _header_of_files(header, files)
    if store_exists(index):
        opened = open_store(index)
        say(console, f"note: {index} is there, with {len(opened)} photos: going on", "yellow")
        opened.header.check(header.model, index)
        if opened.header.settings != header.settings:
            raise InputError(
                f"{index} was built with other settings ({opened.header.settings}): give the "
                "same, or build another index"
            )
    else:
        opened = create_store(index, header)
    with opened:
        added = _fill(console, opened, opened_model, found, root, thumbnails, workers)
        with console.status("choosing how to search"):
            tuned = opened.tune(intent, lambda note: say(console, f"note: {note}", "yellow"))
        _report(console, opened, added, json, tuned)


@app.command(epilog=ADD)
def add(
    index: Place,
    sources: Sources,
    model: Annotated[
        Path | None, typer.Option(help="The index's model, if it is no longer where it was.")
    ] = None,
    root: Root = None,
    thumbnails: Thumbnails = True,
    device: Device = "auto",
    workers: Workers = None,
    json: Json = False,
) -> None:
    """Add photos: new ones and changed ones; what is there already is left alone."""
    from rich.console import Console

    from listwise.search import open_store

    console = Console(stderr=json, highlight=False)
    found = [_source(source) for source in sources]
    with open_store(index) as opened:
        photos = any(not isinstance(source, Path) for source in found)
        network = model_of(console, opened, model, device) if photos else None
        added = _fill(console, opened, network, found, root, thumbnails, workers)
        _report(console, opened, added, json)


@app.command(epilog=REMOVE)
def remove(
    index: Place,
    names: Annotated[
        list[str],
        typer.Argument(metavar="PHOTOS...", help="Ids of the index, or the photos themselves."),
    ],
    json: Json = False,
) -> None:
    """Remove photos from an index; the files themselves stay."""
    import json as encoder

    from rich.console import Console

    from listwise.search import open_store

    console = Console(stderr=json, highlight=False)
    with open_store(index) as opened:
        keys = [key for name in names for key in _keys(opened, name)]
        count = opened.remove(keys)
        left = len(opened)
    if json:
        typer.echo(encoder.dumps({"removed": count, "entries": left}))
    else:
        say(console, f"{_photos(count)} removed from {index}, {left} left", "bold")


@app.command(epilog=TUNE)
def tune(
    index: Place,
    memory: Memory = None,
    milliseconds: Milliseconds = None,
    recall: Recall = None,
    json: Json = False,
) -> None:
    """Choose how an index searches from what you want of it, and measure it."""
    import json as encoder
    from dataclasses import asdict

    from rich.console import Console

    from listwise.search import open_store

    intent = _intent(memory, milliseconds, recall)
    console = Console(stderr=json, highlight=False)
    with open_store(index) as opened, console.status("measuring ways to search"):
        tuned = opened.tune(intent, lambda note: say(console, f"note: {note}", "yellow"))
    if json:
        typer.echo(encoder.dumps(asdict(tuned)))
    else:
        say(console, _searches(tuned), "bold")


@app.command(epilog=INFO)
def info(index: Place, json: Json = False) -> None:
    """Say what an index holds and how it searches."""
    import json as encoder

    from rich.console import Console
    from rich.table import Table

    from listwise.search import open_store

    with open_store(index) as opened:
        facts = opened.info()
    if json:
        typer.echo(encoder.dumps(facts))
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in facts.items():
        if value is not None:
            table.add_row(f"[dim]{name.replace('_', ' ')}[/dim]", _readable(name, value))
    Console(highlight=False, soft_wrap=True).print(table)


def model_of(console: "Console", index: "Store", given: Path | None, device: str) -> "Model":
    """The index's model, from where it was or from where the user says it is."""
    folder = given or Path(index.header.model_folder)
    if given is None and not folder.is_dir():
        raise InputError(
            f"the model of {index.uri} was in {folder} and is gone: say where it is with --model"
        )
    opened = _model(console, folder, device)
    index.header.check(opened.fingerprint, index.uri)
    return opened


def _model(console: "Console", folder: Path, device: str) -> "Model":
    with console.status(f"loading {folder}"):
        from listwise.descriptors import load_model

        return load_model(folder, device)


def _source(source: str) -> "Images | Path":
    """Photos, or the path of a descriptor file."""
    from listwise.data.catalog import photos_of
    from listwise.descriptors.storage import is_descriptor_file

    if source.lower().endswith(".parquet") and is_descriptor_file(source):
        return Path(source)
    return photos_of(source)


def _header_of_files(header: "IndexHeader", paths: list[Path]) -> "IndexHeader":
    """The header with the settings that descriptor files were made with, by the same model."""
    from listwise.descriptors import DescriptorFile

    files = [DescriptorFile.open(path) for path in paths]
    for file in files:
        if file.model != header.model:
            raise InputError(
                f"{file.path} holds descriptors of the model {file.model[:12]}, not of "
                f"{header.model_folder}: give the model that made them with --model"
            )
    settings = files[0].settings.model_copy(update={"precision": "float32"})
    return header.model_copy(update={"settings": settings})


def _fill(
    console: "Console",
    index: "Store",
    model: "Model | None",
    sources: "list[Images | Path]",
    root: Path | None,
    thumbnails: bool,
    workers: int | None,
) -> "Added":
    """Put every source into the index, with a progress bar."""
    from listwise.descriptors import DescriptorFile
    from listwise.search.filling import Added, add_descriptors, add_photos

    total = Added()
    try:
        for source in sources:
            if isinstance(source, Path):
                file = DescriptorFile.open(source)
                with progress_bar(console, "adding", len(file)) as advance:
                    found = add_descriptors(
                        index, file, root, thumbnails=thumbnails, on_progress=advance
                    )
            else:
                assert model is not None
                with progress_bar(console, "adding", len(source)) as advance:
                    found = add_photos(
                        index,
                        model,
                        source,
                        thumbnails=thumbnails,
                        workers=workers,
                        on_progress=advance,
                    )
            for name, ids in vars(found).items():
                getattr(total, name).extend(ids)
    except KeyboardInterrupt:
        print("listwise: stopped; go on with the same command", file=sys.stderr)
        raise typer.Exit(130) from None
    return total


def _report(
    console: "Console", index: "Store", added: "Added", json: bool, tuned: Any = None
) -> None:
    import json as encoder
    from dataclasses import asdict

    if json:
        counts = {name: len(ids) for name, ids in vars(added).items() if name != "errors"}
        result = {"index": index.uri, "entries": len(index), **counts, "errors": added.errors}
        if tuned is not None:
            result["search"] = asdict(tuned)
        typer.echo(encoder.dumps(result))
        return
    if added.errors:
        more = f"; and {len(added.errors) - 5} more" if len(added.errors) > 5 else ""
        what = f"{_photos(len(added.errors))} left out: {'; '.join(added.errors[:5])}{more}"
        say(console, what, "yellow")
    if added.copies:
        what = ", ".join(added.copies[:5]) + (" …" if len(added.copies) > 5 else "")
        say(console, f"{_photos(len(added.copies))} there under another name: {what}", "yellow")
    words = {"added": "added", "replaced": "replaced", "updated": "updated"}
    parts = [f"{len(getattr(added, name))} {word}" for name, word in words.items()]
    parts = [part for part in parts if not part.startswith("0 ")]
    if added.unchanged:
        parts.append(f"{len(added.unchanged)} unchanged")
    done = ", ".join(parts) or "nothing to add"
    say(console, f"{done}; {_photos(len(index))} in {index.uri}", "bold")
    if tuned is not None:
        say(console, _searches(tuned), "none")
        place = shlex.quote(index.uri)
        say(console, f"next:\n  listwise search {place} PHOTO\n  listwise serve {place}", "none")


def _searches(tuned: Any) -> str:
    return (
        f"search: {tuned.method}; recall@10 {tuned.recall:.3f}, {tuned.milliseconds:.1f} ms a "
        f"query, {_bytes(tuned.memory)} of memory"
    )


def _keys(index: "Store", name: str) -> list[int]:
    """The entries that a user names: by id, or by the photos themselves."""
    from listwise.data.catalog import photos_of
    from listwise.search.entries import entry_key

    if index.get([entry_key(name)]):
        return [entry_key(name)]
    if not Path(name).exists():
        raise InputError(
            f"{index.uri} has no photo {name}: give an id that listwise search shows, or a file"
        )
    digests = [file.digest() for file in photos_of(name).files()]
    keys = [entry.key for entry in index.with_digests(digests).values()]
    if not keys:
        raise InputError(f"{index.uri} holds no photo of {name}")
    return keys


def _intent(memory: str | None, milliseconds: float | None, recall: float | None) -> "SearchIntent":
    from pydantic import ValidationError

    from listwise.search.store import SearchIntent

    size = None if memory is None else parse_bytes(memory, "memory")
    try:
        return SearchIntent(memory=size, milliseconds=milliseconds, recall=recall)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"--{first['loc'][0]} {first['input']}: {first['msg'].lower()}") from None


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            break
        count, unit = count / 1000, {"B": "kB", "kB": "MB", "MB": "GB", "GB": "TB"}[unit]
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def _readable(name: str, value: Any) -> str:
    from rich.markup import escape

    if isinstance(value, int) and name in ("bytes", "memory"):
        return _bytes(value)
    if isinstance(value, dict):
        return escape(", ".join(f"{k} {v}" for k, v in value.items() if v is not None))
    return escape(f"{value:.3g}" if isinstance(value, float) else str(value))


def _photos(count: int) -> str:
    return "1 photo" if count == 1 else f"{count} photos"
