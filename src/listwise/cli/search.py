"""`listwise search`: find photos in an index."""

from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
  listwise search shop chair.jpg --where "price < 100 and color = 'red'"
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
    where: options.Where = None,
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
    results = None
    if not (entries or sheet or model) and device == "auto":
        with console.status("searching"):
            results = _ask_server(index, names, boxes, k, expand, rerank, where)
    if results is None:
        from listwise.search import open_index

        with open_index(index, model, device=device, create=False) as opened:
            with console.status("searching"):
                switches = {"expand": expand, "rerank": rerank}
                hits = opened.search(names, k, like=entries, box=boxes, where=where, **switches)
            if sheet is not None:
                from listwise.search.sheet import draw_sheet

                draw_sheet(opened, hits, names, boxes, entries).save(sheet)
        results = [_as_json(hit) for hit in hits] if json else list(map(_row, hits))
    if json:
        print_json({"index": index, "results": results})
        return
    _print(console, results)
    if sheet is not None:
        say(console, f"wrote a picture of the results to {sheet}")


def _ask_server(
    index: str,
    photos: Sequence[str],
    boxes: Sequence[tuple[float, ...]],
    k: int,
    expand: bool,
    rerank: bool,
    where: str | None,
) -> list[dict[str, Any]] | None:
    """The results of a running server of the index; None if there is none or it cannot answer."""
    from listwise.running import find_server

    server = find_server(index)
    if server is None or len(boxes) not in (0, len(photos)):
        return None
    fields = {"k": str(k), "expand": str(expand), "rerank": str(rerank), "where": where or ""}
    answer = server.search(list(map(Path, photos)), fields | {"boxes": dumps(boxes or None)})
    return None if answer is None else answer["results"]


def _as_json(hit: "Hit") -> dict[str, Any]:
    from listwise.serving.views import Result

    return Result.found(hit).model_dump()


def _row(hit: "Hit") -> dict[str, Any]:
    return {name: getattr(hit, name) for name in ("id", "score", "inliers", "attributes")}


def _print(console: Console, results: list[dict[str, Any]]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", justify="right", style="dim")
    table.add_column("score", justify="right")
    matched = any(hit["inliers"] is not None for hit in results)
    if matched:
        table.add_column("inliers", justify="right")
    table.add_column("photo", overflow="fold")
    attributes = any(hit["attributes"] for hit in results)
    if attributes:
        table.add_column("", style="dim", overflow="fold")
    for rank, hit in enumerate(results, start=1):
        row = [str(rank), f"{hit['score']:.3f}"]
        if matched:
            row.append("" if hit["inliers"] is None else str(hit["inliers"]))
        row.append(escape(hit["id"]))
        if attributes:
            row.append(escape(", ".join(f"{k} {v}" for k, v in hit["attributes"].items())))
        table.add_row(*row)
    console.print(table)
