"""`listwise index build` and `listwise index add`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from listwise.cli import options
from listwise.cli.index import shared
from listwise.cli.output import note, open_console, stoppable
from listwise.errors import InputError

BUILD = """Examples:
  listwise index build shop photos
  listwise index build shop photos --local
  listwise index build shop photos.csv --model runs/a/model --memory 2GB
  listwise index build shop described.parquet --root photos --model runs/a/model
  listwise index build milvus://127.0.0.1:19530/shop photos --model resnet50

Every column of a table other than path and box becomes an attribute. Run the same command
again to resume after an interruption.
"""
ADD = """Examples:
  listwise index add shop more-photos
  listwise index add shop a.jpg b.jpg
"""

Sources = Annotated[
    list[str],
    options.argument(
        "PHOTOS",
        "Photos to add: folders, .csv or .parquet tables, .txt lists, single photos, or descriptor "
        "files.",
    ),
]
Root = Annotated[Path | None, options.path("Folder that contains the photos of a descriptor file.")]
Thumbnails = Annotated[
    bool, options.flag("--thumbnails/--no-thumbnails", "Store a thumbnail of each photo.")
]


def build(
    index: options.AnyIndexPlace,
    photos: Sources,
    model: Annotated[
        str | None,
        options.text(
            "Model folder, run folder, or name of a timm backbone.",
            show_default="a backbone chosen for this machine",
        ),
    ] = None,
    max_side: options.MaxSide = None,
    scales: options.Scales = None,
    power: options.Power = None,
    memory: shared.Memory = None,
    milliseconds: shared.Milliseconds = None,
    recall: shared.Recall = None,
    root: Root = None,
    thumbnails: Thumbnails = True,
    local: Annotated[
        bool,
        options.flag("--local", "Store local features, so that re-ranking takes less time."),
    ] = False,
    device: options.Device = "auto",
    workers: options.Workers = None,
    json: options.AsJson = False,
) -> None:
    """Build an index of photos, or add to an existing one."""
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
            note(console, f"adding to an index of {shared.count_photos(len(opened))}: {index}")
        with stoppable():
            added = opened.add(
                sources, root=root, thumbnails=thumbnails, local=local, workers=workers
            )
            if local:
                opened.add_local_features(workers=workers)  # of entries that were there before
            if added.errors and not len(opened):
                raise InputError(f"none of the photos can be read; the first: {added.errors[0]}")
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
    """Add new and changed photos to an index; unchanged photos are skipped."""
    console = open_console(json)

    from listwise.search import open_index

    with open_index(index, model, device=device, create=False) as opened, stoppable():
        added = opened.add(photos, root=root, thumbnails=thumbnails, workers=workers)
        shared.report_added(console, opened, added, json)
