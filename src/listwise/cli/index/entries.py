"""`listwise index list` and `listwise index remove`."""

from typing import Annotated

from rich.markup import escape
from rich.table import Table

from listwise.cli import options
from listwise.cli.index import shared
from listwise.cli.output import open_console, print_json, print_result

LIST = """Examples:
  listwise index list shop
  listwise index list shop --where "price < 100 and color = 'red'"
  listwise index list shop --start 1000 --count 50 --json
"""
REMOVE = """Examples:
  listwise index remove shop chairs/a.jpg
  listwise index remove shop more-photos
  listwise index remove shop --where "sold = true"
"""


def list_entries(
    index: options.IndexPlace,
    where: options.Where = None,
    start: Annotated[int, options.integer("Number of entries to skip.", min=0)] = 0,
    count: Annotated[
        int | None, options.integer("Maximum number of entries.", show_default="all", min=1)
    ] = None,
    json: options.AsJson = False,
) -> None:
    """List the entries of an index with their attributes."""
    from listwise.search import open_index

    with open_index(index, create=False) as opened:
        found = list(opened.entries(where=where, start=start, count=count))
    if json:
        from listwise.search.views import EntryView

        print_json({"index": index, "entries": [EntryView.of(entry) for entry in found]})
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    names = sorted({name for entry in found for name in entry.attributes})
    for name in ("photo", "size", *names):
        table.add_column(escape(name), overflow="fold")
    for entry in found:
        attributes = (escape(entry.attributes.get(name, "")) for name in names)
        table.add_row(escape(entry.id), f"{entry.width}×{entry.height}", *attributes)
    open_console().print(table)


def remove(
    index: options.IndexPlace,
    photos: Annotated[
        list[str] | None,
        options.argument("PHOTOS", "Ids of entries, or photos, folders, tables or lists."),
    ] = None,
    where: options.Where = None,
    json: options.AsJson = False,
) -> None:
    """Remove entries from an index; the photo files are not deleted."""
    from listwise.search import open_index

    with open_index(index, create=False) as opened:
        count = opened.remove(photos or None, where=where)
        left = len(opened)
    done = f"removed {shared.count_photos(count)} from {index}; {shared.count_photos(left)} left"
    print_result(open_console(json), json, {"removed": count, "entries": left}, done)
