"""What `listwise search` does with an index."""

import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from listwise.errors import InputError

if TYPE_CHECKING:
    from listwise.search import Hit, Index


def find(
    console: Console, place: dict[str, Any], query: dict[str, Any], sheet: Path | None, save: bool
) -> "list[Hit]":
    """Search an index; store the marks and write the picture of the results if wanted."""
    from listwise.search import open_index

    with open_index(**place, create=False) as opened:
        with console.status("searching"):
            hits = opened.search(**query)
        if save:  # only after a search that did not fail
            _save(opened, query)
        if sheet is not None:
            from listwise.search.sheet import draw_sheet

            draw_sheet(opened, hits, query["query"], query["box"], query["like"]).save(sheet)
    return hits


def _save(index: "Index", query: dict[str, Any]) -> None:
    """Store the marks of a search by one photo or one entry."""
    given: list[Any] = [
        *map(Path, query["query"]),
        *(index.entry(name).key for name in query["like"]),
    ]
    if len(given) != 1:
        raise InputError("--save needs one photo or one --entry: marks belong to one photo")
    box = query["box"][0] if query["box"] else None
    try:
        person = getpass.getuser()
    except (OSError, KeyError):  # the user has no name
        person = ""
    marked = {name: query[name] for name in ("same", "different")}
    if not index.mark(given[0], **marked, box=box, by=person):
        raise InputError("nothing to save: the marked entry is the query itself")
