"""`listwise search`: find photos in an index."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from listwise.cli import options
from listwise.cli.output import open_console, print_json, say
from listwise.errors import InputError
from listwise.servers import search_by_server

if TYPE_CHECKING:
    from listwise.search import Hit

EXAMPLES = """Examples:
  listwise search shop chair.jpg                      # the ten nearest photos
  listwise search shop room.jpg --box 120,80,400,380  # part of a photo
  listwise search shop a.jpg b.jpg --expand --rerank  # one query of two photos
  listwise search shop chair.jpg --quality best       # with local features
  listwise search shop --entry chairs/a.jpg --where "price < 100" -k 50
"""
EXPAND = (
    "Expand the query with its nearest photos (αQE); by default if the model is tuned to it, and "
    "neither --refine nor --min-probability is given."
)
BEST = "Quality: best verifies as --rerank, and diffuses from the photos that match."
SHOWN = ("id", "score", "refined", "probability", "inliers", "attributes")


def _picture(sheet: Path | None) -> Path | None:
    if sheet is not None and sheet.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise InputError(f"cannot write {sheet}: the name of --sheet must end with .png")
    return sheet


def search(
    index: options.IndexPlace,
    photos: Annotated[
        list[str] | None, options.argument("PHOTOS", "One or more photos of what to find.")
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
    expand: Annotated[bool | None, options.flag("--expand/--no-expand", EXPAND)] = None,
    refine: Annotated[
        str | None, options.refine("Re-rank the first results by their global descriptors.")
    ] = None,
    rerank: Annotated[
        bool, options.flag("--rerank", "Re-rank the first 100 results by spatial verification.")
    ] = False,
    quality: Annotated[str, options.quality(BEST)] = "fast",
    where: options.Where = None,
    min_score: Annotated[float | None, options.decimal("Minimum score of a result.")] = None,
    min_probability: Annotated[
        float | None,
        options.decimal("Minimum probability that a result shows the same thing, from 0 to 1."),
    ] = None,
    sheet: Annotated[
        Path | None,
        options.path("Write a picture of the results to this file (.png).", callback=_picture),
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
    console = open_console(json)
    how: dict[str, Any] = {"k": k, "expand": expand, **_methods(quality, refine, rerank)}
    how |= {"where": where, "min_score": min_score, "min_probability": min_probability}
    results = None
    if not (entries or sheet or model) and device == "auto":
        with console.status("searching"):
            results = search_by_server(index, names, boxes, how)
    if results is None:
        place = {"uri": index, "model": model, "device": device}
        query = {"query": names, "like": entries, "box": boxes, **how}
        results = [_as_facts(hit, json) for hit in _search(console, place, query, sheet)]
    if json:
        print_json({"index": index, "results": results})
        return
    _print(console, results)
    if how["rerank"]:
        compared = sum(hit.get("inliers") is not None for hit in results)
        say(console, f"compared the local features of {compared} of {len(results)} results")
    if sheet is not None:
        say(console, f"wrote a picture of the results to {sheet}")


def _methods(quality: str, refine: str | None, rerank: bool) -> dict[str, Any]:
    if quality not in ("fast", "best"):
        raise InputError(f"`quality` must be fast or best, not {quality!r}")
    best = quality == "best"
    return {"refine": refine or ("diffusion" if best else None), "rerank": rerank or best}


def _search(
    console: Console, place: dict[str, Any], query: dict[str, Any], sheet: Path | None
) -> "list[Hit]":
    from listwise.search import open_index

    with open_index(**place, create=False) as opened:
        with console.status("searching"):
            hits = opened.search(**query)
        if sheet is not None:
            from listwise.search.sheet import draw_sheet

            draw_sheet(opened, hits, query["query"], query["box"], query["like"]).save(sheet)
    return hits


def _as_facts(hit: "Hit", json: bool) -> dict[str, Any]:
    if not json:
        return {name: getattr(hit, name) for name in SHOWN}
    from listwise.serving.views import Result

    return Result.found(hit).model_dump()


def _print(console: Console, results: list[dict[str, Any]]) -> None:
    formats = {"score": ".3f", "refined": ".3g", "probability": ".2f", "inliers": "d"}
    known = [name for name in formats if any(hit.get(name) is not None for hit in results)]
    attributes = any(hit["attributes"] for hit in results)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", justify="right", style="dim")
    for name in known:
        table.add_column(name, justify="right")
    table.add_column("photo", overflow="fold")
    if attributes:
        table.add_column("", style="dim", overflow="fold")
    for rank, hit in enumerate(results, start=1):
        row = ["" if hit.get(name) is None else format(hit[name], formats[name]) for name in known]
        row.append(escape(hit["id"]))
        if attributes:
            row.append(escape(", ".join(f"{k} {v}" for k, v in hit["attributes"].items())))
        table.add_row(str(rank), *row)
    console.print(table)
