"""`listwise search`: find photos in an index."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from listwise.cli import options
from listwise.cli.output import open_console, print_json, say
from listwise.errors import InputError

if TYPE_CHECKING:
    from listwise.search import Hit

EXAMPLES = """Examples:
  listwise search shop chair.jpg                      # the ten nearest photos
  listwise search shop room.jpg --box 120,80,400,380  # part of a photo
  listwise search shop a.jpg b.jpg --expand --rerank  # one query of two photos
  listwise search shop --entry chairs/a.jpg -k 50 --json
  listwise search shop chair.jpg --sheet found.png
"""
PICTURES = (".png", ".jpg", ".jpeg", ".webp")


def search(
    index: options.IndexPlace,
    photos: Annotated[
        list[str] | None,
        options.argument("PHOTOS", "One or more photos of what to find."),
    ] = None,
    like: Annotated[
        list[str] | None,
        options.entry("Search by this entry of the index; repeat for several.", "--entry"),
    ] = None,
    box: Annotated[
        list[str] | None,
        options.box("Search by this part of the photo, in pixels; one box per photo."),
    ] = None,
    k: Annotated[int, options.integer("Maximum number of results.", "-k", min=1)] = 10,
    expand: Annotated[
        bool, options.flag("--expand", "Expand the query with its nearest photos (αQE).")
    ] = False,
    rerank: Annotated[
        bool, options.flag("--rerank", "Re-rank the first 100 results by spatial verification.")
    ] = False,
    sheet: Annotated[
        Path | None, options.path("Write a picture of the results to this file (.png).")
    ] = None,
    model: options.IndexModel = None,
    device: options.Device = "auto",
    json: options.AsJson = False,
) -> None:
    """Find the photos of an index that are most similar to one or more photos."""
    names, entries = photos or [], like or []
    if not names and not entries:
        raise InputError("give a photo to search by, or --entry with the id of an entry")
    boxes = [options.parse_box(text) for text in box or []]
    if sheet is not None and sheet.suffix.lower() not in PICTURES:
        raise InputError(f"cannot write {sheet}: the name of --sheet must end with .png")
    console = open_console(json)

    from listwise.search import open_index

    with open_index(index, model, device=device, create=False) as opened:
        with console.status("searching"):
            hits = opened.search(names, k, like=entries, box=boxes, expand=expand, rerank=rerank)
        if sheet is not None:
            from listwise.search.sheet import draw_sheet

            draw_sheet(opened, hits, names, boxes, entries).save(sheet)
    if json:
        from listwise.serving.views import Result

        print_json({"index": index, "results": [Result.found(hit) for hit in hits]})
        return
    _print(console, hits)
    if sheet is not None:
        say(console, f"wrote a picture of the results to {sheet}")


def _print(console: Console, hits: "list[Hit]") -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", justify="right", style="dim")
    table.add_column("score", justify="right")
    matched = any(hit.inliers is not None for hit in hits)
    if matched:
        table.add_column("inliers", justify="right")
    table.add_column("photo", overflow="fold")
    attributes = any(hit.attributes for hit in hits)
    if attributes:
        table.add_column("", style="dim", overflow="fold")
    for rank, hit in enumerate(hits, start=1):
        row = [str(rank), f"{hit.score:.3f}"]
        if matched:
            row.append("" if hit.inliers is None else str(hit.inliers))
        row.append(escape(hit.id))
        if attributes:
            row.append(escape(", ".join(f"{k} {v}" for k, v in hit.attributes.items())))
        table.add_row(*row)
    console.print(table)
