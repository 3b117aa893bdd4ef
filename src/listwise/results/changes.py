"""Write the changes of an upgrade as a page: the queries whose results differ most."""

from collections.abc import Container, Sequence
from pathlib import Path

from listwise.pages.photos import Frame, ShownPhoto, ShownQuery, write_queries
from listwise.search.hits import Hit
from listwise.search.upgrading import UpgradeChanges

SHOWN = 100
"""Maximum number of queries on the page."""
NOTE = (
    "The queries with the fewest results in common come first. Results with a red frame are gone, "
    "results with a green frame are new."
)


def write_changes(path: str | Path, title: str, changes: UpgradeChanges) -> Path:
    """Write an HTML page of the queries whose results changed most, without external parts.

    Args:
        path: file to write.
        title: heading of the page.
        changes: what `Index.changes` returned.

    Returns:
        The path of the file.
    """
    shown = changes.queries[:SHOWN]
    facts = {
        "Queries": str(len(changes.queries)),
        f"Results kept, of the first {changes.k}": f"{100 * changes.kept:.1f} %",
        "Queries with the same first result": f"{100 * changes.same_first:.1f} %",
        "Queries on this page": str(len(shown)),
    }
    queries = []
    for change in shown:
        before, after = ({hit.id for hit in hits} for hits in (change.before, change.after))
        lists = {
            "before": _list(change.before, after, "red"),
            "after": _list(change.after, before, "green"),
        }
        photo = ShownPhoto(change.query.path, change.query.id)
        queries.append(ShownQuery(photo, f"{change.kept} of {len(change.before)} kept", lists))
    return write_queries(path, title, facts, NOTE, queries)


def _list(hits: Sequence[Hit], others: Container[str], frame: Frame) -> list[ShownPhoto]:
    """The results, with a frame around those that the other list does not have."""
    return [
        ShownPhoto(hit.path, f"{hit.score:.3f} {hit.id}", "" if hit.id in others else frame)
        for hit in hits
    ]
