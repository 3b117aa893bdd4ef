"""How `listwise search` prints its results."""

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from listwise.search import Hit

SHOWN = ("id", "score", "refined", "probability", "inliers", "attributes")


def as_facts(hit: "Hit", json: bool) -> dict[str, Any]:
    """The values of a hit that the command prints, or all of them for JSON."""
    if not json:
        return {name: getattr(hit, name) for name in SHOWN}
    from listwise.search.views import Result

    return Result.found(hit).model_dump()


def print_results(console: Console, results: list[dict[str, Any]]) -> None:
    """Print the results as a table."""
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
