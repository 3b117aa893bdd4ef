"""`listwise search`: find photos in an index."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from listwise.cli.options import parse_box
from listwise.cli.output import say
from listwise.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

    from listwise.data.images import Box
    from listwise.search import Store
    from listwise.search.index import Hit, Index

EXAMPLES = """Examples:

  listwise search shop chair.jpg                           the ten nearest

  listwise search shop room.jpg --box 120,80,400,380       a part of a photo

  listwise search shop a.jpg b.jpg --expand --rerank       two examples, expanded and re-ranked

  listwise search shop --entry chairs/a.jpg -k 50 --json   from a photo of the index

  listwise search shop chair.jpg --sheet found.png         as a picture
"""


def search(
    index: Annotated[str, typer.Argument(metavar="INDEX", help="As for listwise index.")],
    photos: Annotated[
        list[Path] | None, typer.Argument(metavar="PHOTOS...", help="One or more examples.")
    ] = None,
    entry: Annotated[
        list[str] | None, typer.Option(help="A photo of the index as an example, by its id.")
    ] = None,
    box: Annotated[
        list[str] | None,
        typer.Option(
            metavar="X0,Y0,X1,Y1", help="The part of a photo that is meant; one for each photo."
        ),
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="How many to find.")] = 10,
    expand: Annotated[
        bool, typer.Option("--expand", help="Expand the query with what it finds first (αQE).")
    ] = False,
    rerank: Annotated[
        bool, typer.Option("--rerank", help="Order the first hundred by matching points.")
    ] = False,
    sheet: Annotated[
        Path | None, typer.Option(help="Write a picture of the results here (.png).")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="The index's model, if it is no longer where it was.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Find the photos of an index that are most like one or more examples."""
    import json as encoder

    from rich.console import Console

    from listwise.cli.index import model_of
    from listwise.data import load_image
    from listwise.search import open_store
    from listwise.search.entries import entry_key
    from listwise.search.index import Index

    names, examples = photos or [], entry or []
    if not names and not examples:
        raise InputError("nothing to search for: give a photo, or --entry with an id of the index")
    boxes = _boxes(box or [], len(names))
    if sheet is not None and sheet.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise InputError(f"--sheet {sheet}: give a name that ends with .png")
    images = [load_image(name) for name in names]
    console = Console(stderr=json, highlight=False)
    with open_store(index) as opened:
        keys = [entry_key(name) for name in examples]
        known = opened.get(keys)
        for name, key in zip(examples, keys, strict=True):
            if key not in known:
                raise InputError(f"{index} has no photo {name}: --entry takes an id of the index")
        searcher = Index(opened, model_of(console, opened, model, device))
        with console.status("searching"):
            hits = _find(searcher, images, boxes, keys, k, expand, rerank)
        if sheet is not None:
            _draw(sheet, opened, images, boxes, keys, hits)
    if json:
        from listwise.serving.views import Result

        results = [Result.found(hit).model_dump() for hit in hits]
        typer.echo(encoder.dumps({"index": index, "results": results}))
        return
    _print(console, hits)
    if sheet is not None:
        say(console, f"a picture of them: {sheet}", "none")


def _find(
    searcher: "Index",
    images: "list[Image]",
    boxes: "list[Box | None]",
    keys: list[int],
    k: int,
    expand: bool,
    rerank: bool,
) -> "list[Hit]":
    import numpy as np

    from listwise.data import load_image
    from listwise.local.rerank import TOP

    parts = [searcher.describe(images, boxes)] if images else []
    vectors = np.concatenate([*parts, *([searcher.examples(keys)] if keys else [])])
    hits = searcher.search(vectors, max(k, TOP) if rerank else k, expand, keys)
    if rerank:
        entries = searcher.index.get(keys)
        examples = [load_image(entries[key].path) for key in keys]
        parts_meant = [*boxes, *(entries[key].box for key in keys)]
        hits = searcher.rerank([*images, *examples], hits, parts_meant)
    return hits[:k]


def _boxes(written: list[str], photos: int) -> "list[Box | None]":
    if len(written) not in (0, photos):
        raise InputError(f"{len(written)} boxes for {photos} photos: give one for each, or none")
    return [parse_box(text) for text in written] or [None] * photos


def _print(console: "object", hits: "list[Hit]") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    assert isinstance(console, Console)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", justify="right", style="dim")
    table.add_column("score", justify="right")
    matched = any(hit.inliers is not None for hit in hits)
    if matched:
        table.add_column("points", justify="right")
    table.add_column("photo", overflow="fold")
    attributes = any(hit.entry.attributes for hit in hits)
    if attributes:
        table.add_column("", style="dim", overflow="fold")
    for rank, hit in enumerate(hits, start=1):
        row = [str(rank), f"{hit.score:.3f}"]
        if matched:
            row.append("" if hit.inliers is None else str(hit.inliers))
        row.append(escape(hit.entry.id))
        if attributes:
            row.append(escape(", ".join(f"{k} {v}" for k, v in hit.entry.attributes.items())))
        table.add_row(*row)
    console.print(table)


def _draw(
    sheet: Path,
    index: "Store",
    images: "list[Image]",
    boxes: "list[Box | None]",
    keys: list[int],
    hits: "list[Hit]",
) -> None:
    import io

    from PIL import Image

    from listwise.data.images import cut_out
    from listwise.data.sheets import contact_sheet
    from listwise.search.filling import thumbnail_from_photo

    def small(key: int) -> Image.Image:
        content = index.thumbnail(key) or thumbnail_from_photo(index.get([key])[key])
        if not content:
            return Image.new("RGB", (160, 120), "lightgrey")
        return Image.open(io.BytesIO(content)).convert("RGB")

    queries = [
        image if box is None else cut_out(image, box, "the query")
        for image, box in zip(images, boxes, strict=True)
    ]
    found = []
    for hit in hits:
        points = "" if hit.inliers is None else f"   {hit.inliers} points"
        found.append((small(hit.entry.key), f"{hit.score:.3f}{points}", hit.entry.id))
    contact_sheet([*queries, *map(small, keys)], found).save(sheet)
