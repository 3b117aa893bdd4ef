"""`listwise index marks`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from listwise.cli import options
from listwise.cli.output import open_console, print_json, say

if TYPE_CHECKING:
    from listwise.search import Conflict, Mark, Marks, MarkTable

EXAMPLES = """Examples:
  listwise index marks shop
  listwise index marks shop --conflicts
  listwise index marks shop --export labels.csv
  listwise index marks shop --undo 5f0c2a6e9b1d4c38

Marks are stored with listwise search --save, on the search page, or in Python. The exported table
is for listwise train.
"""
KINDS = {
    "changed": "changed later, the later mark counts",
    "people": "people disagree",
    "chain": "connected by marks",
    "labels": "contradicts labels",
}


def marks(
    index: options.IndexPlace,
    conflicts: Annotated[
        bool, options.flag("--conflicts", "Show only marks that contradict each other.")
    ] = False,
    export: Annotated[
        Path | None,
        options.path("Write the classes of marked and labelled photos to this table (.csv)."),
    ] = None,
    undo: Annotated[
        list[str] | None, options.entry("Undo the mark with this id; repeat for several.")
    ] = None,
    json: options.AsJson = False,
) -> None:
    """List the marks of an index, export them as labels, or undo them."""
    from listwise.search import open_index

    console = open_console(json)
    with open_index(index, create=False) as opened:
        undone = opened.unmark(undo) if undo else 0
        found = opened.marks()
    table = found.write(export) if export is not None else None
    if json:
        print_json(_as_json(index, found, table))
        return
    if undo:
        say(console, f"undid {undone} marks")
    elif export is None:
        _print_conflicts(console, found) if conflicts else _print_marks(console, found.active)
    if table is not None:
        left_out = f"left out {table.conflicting} photos in conflict and {table.missing} marks"
        say(console, f"wrote {table.photos} photos of {table.classes} classes to {export}", "bold")
        say(console, f"{left_out} of photos that are not in the index")
    missing = f", {len(found.missing)} of photos that are not in the index" if found.missing else ""
    counted = f"{len(found)} marks, {found.undone} undone{missing}"
    say(console, f"{counted}; {len(found.conflicts)} conflicts", "bold")


def _print_marks(console: Console, marks: "tuple[Mark, ...]") -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("id", "query", "mark", "entry", "by", "time"):
        table.add_column(name, overflow="fold")
    for mark in marks:
        kind = "same" if mark.same else "different"
        texts = (mark.query.id, kind, mark.entry, mark.by, mark.time[:16].replace("T", " "))
        table.add_row(mark.id, *map(escape, texts))
    console.print(table)


def _print_conflicts(console: Console, marks: "Marks") -> None:
    for conflict in marks.conflicts:
        say(console, KINDS[conflict.kind], "bold")
        _print_marks(console, conflict.marks)


def _as_json(index: str, marks: "Marks", table: "MarkTable | None") -> dict[str, Any]:
    return {
        "index": index,
        "marks": [asdict(mark) for mark in marks],
        "conflicts": [_conflict(each) for each in marks.conflicts],
        "undone": marks.undone,
        "missing": [asdict(mark) for mark in marks.missing],
        "exported": None if table is None else asdict(table),
    }


def _conflict(conflict: "Conflict") -> dict[str, Any]:
    return {
        "kind": conflict.kind,
        "marks": [mark.id for mark in conflict.marks],
        "photos": list(conflict.photos),
    }
