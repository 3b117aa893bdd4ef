"""The command `listwise search`."""

import shlex
from pathlib import Path
from typing import Annotated, Any

from listwise.cli import options
from listwise.cli.output import open_console, print_json, say
from listwise.cli.search.finding import find
from listwise.cli.search.printing import as_facts, print_results
from listwise.errors import InputError
from listwise.servers import search_by_server

EXAMPLES = """Examples:
  listwise search shop chair.jpg                      # the ten nearest photos
  listwise search shop room.jpg --box 120,80,400,380  # part of a photo
  listwise search shop a.jpg b.jpg --expand --rerank  # one query of two photos
  listwise search shop chair.jpg --quality best       # with local features
  listwise search shop --entry chairs/a.jpg --where "price < 100" -k 50
  listwise search shop a.jpg --same chairs/7.jpg --different sofas/2.jpg --save
"""
Photos = Annotated[
    list[str] | None, options.argument("PHOTOS", "One or more photos of what to find.")
]
Entries = Annotated[
    list[str] | None,
    options.entry("Search by the entry with this id; repeat for several.", "--entry"),
]
Refine = Annotated[
    str | None, options.refine("Re-rank the first results by their global descriptors.")
]
Boxes = Annotated[
    list[str] | None, options.box("Search by this part of the photo, in pixels; one box per photo.")
]
Same = Annotated[
    list[str] | None,
    options.entry("Id of an entry that shows the same thing, to re-rank by; repeat for several."),
]
Different = Annotated[
    list[str] | None,
    options.entry("Id of an entry that shows something else, to re-rank by; repeat for several."),
]
Marks = Annotated[
    bool, options.flag("--marks", "Re-rank by the stored marks of the photo or entry too.")
]
Save = Annotated[
    bool, options.flag("--save", "Store --same and --different as marks in the index.")
]
EXPAND = (
    "Expand the query with its nearest photos (αQE). This is the default if the model was tuned "
    "with αQE and neither --refine nor --min-probability is given."
)
BEST = "Quality of the results: best is the same as --rerank --refine diffusion."


def _picture(sheet: Path | None) -> Path | None:
    if sheet is not None and sheet.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise InputError(f"cannot write {sheet}: the name of --sheet must end with .png")
    return sheet


def search(
    index: options.IndexPlace,
    photos: Photos = None,
    like: Entries = None,
    box: Boxes = None,
    k: Annotated[int, options.integer("Maximum number of results.", "-k", min=1)] = 10,
    expand: Annotated[bool | None, options.flag("--expand/--no-expand", EXPAND)] = None,
    refine: Refine = None,
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
    same: Same = None,
    different: Different = None,
    marks: Marks = False,
    save: Save = False,
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
    marked: dict[str, Any] = {"same": same or [], "different": different or []}
    if save and not (same or different):
        raise InputError("nothing to save: give --same or --different")
    results = None
    if not (entries or sheet or model or same or different or marks) and device == "auto":
        with console.status("searching"):
            results = search_by_server(index, names, boxes, how)
    if results is None:
        place = {"uri": index, "model": model, "device": device}
        query = {"query": names, "like": entries, "box": boxes, **how, **marked, "marks": marks}
        results = [as_facts(hit, json) for hit in find(console, place, query, sheet, save)]
    if json:
        print_json({"index": index, "results": results})
        return
    print_results(console, results)
    if how["rerank"]:
        compared = sum(hit.get("inliers") is not None for hit in results)
        say(console, f"compared the local features of {compared} of {len(results)} results")
    if sheet is not None:
        say(console, f"wrote a picture of the results to {sheet}")
    if save:
        say(console, f"stored the marks; list them with listwise index marks {shlex.quote(index)}")


def _methods(quality: str, refine: str | None, rerank: bool) -> dict[str, Any]:
    if quality not in ("fast", "best"):
        raise InputError(f"`quality` must be fast or best, not {quality!r}")
    best = quality == "best"
    return {"refine": refine or ("diffusion" if best else None), "rerank": rerank or best}
