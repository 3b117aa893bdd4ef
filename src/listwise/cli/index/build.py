"""`listwise index build` and `listwise index add`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from listwise.cli import options
from listwise.cli.index import shared
from listwise.cli.output import note, open_console, stoppable
from listwise.errors import InputError

BUILD = options.examples("""Examples:
  listwise index build shop photos
  listwise index build shop photos.csv --model runs/a/model --memory 2GB --recall 0.95
  listwise index build milvus://127.0.0.1:19530/shop photos --model resnet50
  listwise index build shop a.parquet b.parquet --root photos --model runs/a/model

An index is a folder, milvus://host:port/name, or a .db file of milvus-lite. Columns of a table
other than path and box are kept as attributes. Run the same command again to resume an interrupted
build.
""")
ADD = options.examples("""Examples:
  listwise index add shop more-photos
  listwise index add shop a.jpg b.jpg
""")

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
            help="A model folder, or the name of a timm backbone.",
            show_default="a backbone that suits this machine",
        ),
    ] = None,
    max_side: options.MaxSide = None,
    scales: Annotated[
        str | None,
        typer.Option(help="Sizes to describe photos at, such as 1,0.7071.", show_default="1"),
    ] = None,
    power: Annotated[
        float | None, typer.Option(help="Power of the mean over the scales.", show_default="3")
    ] = None,
    memory: shared.Memory = None,
    milliseconds: shared.Milliseconds = None,
    recall: shared.Recall = None,
    root: Root = None,
    thumbnails: Thumbnails = True,
    device: options.Device = "auto",
    workers: options.Workers = None,
    json: options.AsJson = False,
) -> None:
    """Make an index of photos, or resume one."""
    wanted = shared.parse_intent(memory, milliseconds, recall)
    settings: dict[str, Any] = {
        "max_side": max_side,
        "scales": options.parse_numbers(scales, "scales") if scales else None,
        "power": power,
    }
    console = open_console(json)

    from listwise.search.filling import open_sources
    from listwise.search.opening import open_index_for

    sources = open_sources(photos)
    with console.status("loading the model"):
        opened = open_index_for(
            index, sources, model, **settings, device=device, on_note=partial(note, console)
        )
    with opened:
        if len(opened):
            note(console, f"{index} has {shared.count_photos(len(opened))} already; adding to it")
        with stoppable():
            added = opened.add(sources, root=root, thumbnails=thumbnails, workers=workers)
            if added.errors and not len(opened):
                raise InputError(f"no photo can be read; the first: {added.errors[0]}")
            with console.status("choosing a search method"):
                tuned = opened.tune(wanted, partial(note, console))
        shared.report_added(console, opened, added, json, tuned)


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

    with open_index(index, model, device=device, create=False) as opened, stoppable():
        added = opened.add(photos, root=root, thumbnails=thumbnails, workers=workers)
        shared.report_added(console, opened, added, json)
