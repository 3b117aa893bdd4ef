"""`listwise index build` and `listwise index add`."""

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from listwise.cli import options
from listwise.cli.index.words import count_photos, describe_search
from listwise.cli.output import note, open_console, print_json, say, stoppable

if TYPE_CHECKING:
    from rich.console import Console

    from listwise.search import Added, Index
    from listwise.search.store import TuningResult

BUILD = """Examples:

  listwise index build shop photos

  listwise index build shop photos.csv --model runs/a/model --memory 2GB --recall 0.95

  listwise index build milvus://127.0.0.1:19530/shop photos --model resnet50

  listwise index build shop a.parquet b.parquet --root photos --model runs/a/model

An index is a folder, milvus://host:port/name, or a .db file of milvus-lite. Columns of a table
other than path and box are kept as attributes. Run the same command again to resume an interrupted
build.
"""
ADD = """Examples:

  listwise index add shop more-photos

  listwise index add shop a.jpg b.jpg
"""

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="PHOTOS...", help="Folders, tables, text lists, image files, or descriptor files."
    ),
]
Root = Annotated[
    Path | None, typer.Option(help="Folder that holds the photos of a descriptor file.")
]
Thumbnails = Annotated[
    bool, typer.Option("--thumbnails/--no-thumbnails", help="Keep a small picture of each photo.")
]


def build(
    index: options.IndexPlace,
    photos: Sources,
    model: Annotated[
        str | None,
        typer.Option(
            help="A model folder, or the name of a timm backbone. [dim]default: a backbone that "
            "suits this machine[/dim]"
        ),
    ] = None,
    max_side: options.MaxSide = None,
    scales: Annotated[
        str | None,
        typer.Option(help="Sizes at which photos are described, such as 1,0.7071. default: 1"),
    ] = None,
    power: Annotated[
        float | None, typer.Option(help="Power of the generalized mean over scales. default: 3")
    ] = None,
    memory: options.Memory = None,
    milliseconds: options.Milliseconds = None,
    recall: options.Recall = None,
    root: Root = None,
    thumbnails: Thumbnails = True,
    device: options.Device = "auto",
    workers: options.Workers = None,
    json: options.AsJson = False,
) -> None:
    """Make an index of photos, or resume one."""
    intent = options.parse_intent(memory, milliseconds, recall)
    settings: dict[str, Any] = {
        "max_side": max_side,
        "scales": options.parse_numbers(scales, "scales") if scales else None,
        "power": power,
    }
    console = open_console(json)

    from listwise.search.opening import open_index_for
    from listwise.search.sources import open_sources

    sources = open_sources(photos)
    with console.status("loading the model"):
        opened = open_index_for(
            index, sources, model, **settings, device=device, on_note=partial(note, console)
        )
    with opened:
        if len(opened):
            note(console, f"{index} has {count_photos(len(opened))} already; adding to it")
        with stoppable():
            added = opened.add(sources, root=root, thumbnails=thumbnails, workers=workers)
            with console.status("choosing a search method"):
                tuned = opened.tune(intent, partial(note, console))
        _report(console, opened, added, json, tuned)


def add(
    index: options.IndexPlace,
    photos: Sources,
    model: options.IndexModel = None,
    root: Root = None,
    thumbnails: Thumbnails = True,
    device: options.Device = "auto",
    workers: options.Workers = None,
    json: options.AsJson = False,
) -> None:
    """Add new and changed photos; what is there already is left alone."""
    console = open_console(json)

    from listwise.search import open_index

    with (
        open_index(index, model, device=device, create=False) as opened,
        stoppable(),
    ):
        added = opened.add(photos, root=root, thumbnails=thumbnails, workers=workers)
        _report(console, opened, added, json)


def _report(
    console: "Console",
    index: "Index",
    added: "Added",
    json: bool,
    tuned: "TuningResult | None" = None,
) -> None:
    if json:
        counts = {name: len(ids) for name, ids in vars(added).items() if name != "errors"}
        result = {"index": index.uri, "entries": len(index), **counts, "errors": added.errors}
        print_json(result if tuned is None else {**result, "search": tuned})
        return
    if added.errors:
        more = f"; and {len(added.errors) - 5} more" if len(added.errors) > 5 else ""
        what = f"{count_photos(len(added.errors))} left out: {'; '.join(added.errors[:5])}{more}"
        say(console, what, "yellow")
    if added.copies:
        what = ", ".join(added.copies[:5]) + (" …" if len(added.copies) > 5 else "")
        copies = count_photos(len(added.copies))
        say(console, f"{copies} already in the index under another name: {what}", "yellow")
    kinds = ("added", "replaced", "updated", "unchanged")
    counts = {kind: len(getattr(added, kind)) for kind in kinds}
    done = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    say(console, f"{done or 'nothing to add'}; {count_photos(len(index))} in {index.uri}", "bold")
    if tuned is not None:
        place = shlex.quote(index.uri)
        say(console, describe_search(tuned))
        say(console, f"next:\n  listwise search {place} PHOTO\n  listwise serve {place}")
