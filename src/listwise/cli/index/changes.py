"""`listwise index changes`."""

from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from listwise.cli import options
from listwise.cli.output import open_console, print_json, say

if TYPE_CHECKING:
    from listwise.search import UpgradeChanges

EXAMPLES = """Examples:
  listwise index changes shop
  listwise index changes shop --queries 500 --report changes.html
  listwise index changes shop --json

The queries are entries of the index. Their results with the current model are compared with those
of the model before the last upgrade.
"""
ROWS = 20


def changes(
    index: options.IndexPlace,
    queries: Annotated[int, options.integer("Number of entries to search by.", min=1)] = 100,
    k: Annotated[int, options.integer("Number of results to compare.", "-k", min=1)] = 10,
    report: options.Report = None,
    json: options.AsJson = False,
) -> None:
    """Show the queries whose results changed most with the last upgrade of an index."""
    console = open_console(json)

    from listwise.search import open_index

    with open_index(index, create=False) as opened, console.status("searching"):
        found = opened.changes(queries, k=k)
    if report is not None:
        from listwise.results.report.changes import write_changes

        write_changes(report, f"Changes of {index}", found)
    if json:
        print_json(_as_json(index, found))
        return
    _print(console, found)
    if report is not None:
        say(console, f"wrote the report to {report}")


def _as_json(index: str, found: "UpgradeChanges") -> dict[str, object]:
    return {
        "index": index,
        "k": found.k,
        "kept": found.kept,
        "same_first": found.same_first,
        "queries": [
            {
                "id": change.query.id,
                "kept": change.kept,
                "before": [{"id": hit.id, "score": hit.score} for hit in change.before],
                "after": [{"id": hit.id, "score": hit.score} for hit in change.after],
            }
            for change in found.queries
        ],
    }


def _print(console: Console, found: "UpgradeChanges") -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("kept", justify="right")
    for name in ("query", "first before", "first after"):
        table.add_column(name, overflow="fold")
    for change in found.queries[:ROWS]:
        firsts = (hits[0].id if hits else "" for hits in (change.before, change.after))
        kept = f"{change.kept} of {len(change.before)}"
        table.add_row(kept, escape(change.query.id), *map(escape, firsts))
    console.print(table)
    say(
        console,
        f"{len(found.queries)} queries: {100 * found.kept:.1f} % of the first {found.k} results "
        f"are the same; {100 * found.same_first:.1f} % of the queries have the same first result",
        "bold",
    )
