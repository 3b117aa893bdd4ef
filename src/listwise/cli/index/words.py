"""What the index commands print."""

import shlex
from typing import TYPE_CHECKING, Any

from listwise.cli.output import print_json, say, warn_of_unreadable

if TYPE_CHECKING:
    from rich.console import Console

    from listwise.search import Added, Index
    from listwise.search.store import TuningResult


def count_photos(count: int) -> str:
    """A number of photos: 1 photo, 2 photos."""
    return "1 photo" if count == 1 else f"{count} photos"


def describe_search(tuned: "TuningResult") -> str:
    """How an index searches, and what was measured."""
    return (
        f"search: {tuned.method}; recall@10 {tuned.recall:.3f}, {tuned.milliseconds:.1f} ms per "
        f"query, {readable_bytes(tuned.memory)} of memory"
    )


def readable_bytes(count: float) -> str:
    """A size for people: 500 B, 1.2 MB."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.0f} B" if units[0] == "B" else f"{count:.1f} {units[0]}"


def readable_fact(name: str, value: Any) -> str:
    """A value of `Index.info` for people."""
    if isinstance(value, int) and name in ("bytes", "memory"):
        return readable_bytes(value)
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items() if v is not None)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def report_added(
    console: "Console",
    index: "Index",
    added: "Added",
    json: bool,
    tuned: "TuningResult | None" = None,
) -> None:
    """Print what was added, and how the index searches if that was chosen."""
    if json:
        counts = {name: len(ids) for name, ids in vars(added).items() if name != "errors"}
        result = {"index": index.uri, "entries": len(index), **counts, "errors": added.errors}
        print_json(result if tuned is None else {**result, "search": tuned})
        return
    warn_of_unreadable(console, added.errors)
    if added.copies:
        what = ", ".join(added.copies[:5]) + (" …" if len(added.copies) > 5 else "")
        copies = count_photos(len(added.copies))
        say(console, f"{copies} already in the index under another name: {what}", "yellow")
    kinds = ("added", "replaced", "updated", "unchanged")
    counts = {kind: len(getattr(added, kind)) for kind in kinds}
    done = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    say(console, f"{done or 'nothing to add'}; {count_photos(len(index))} in {index.uri}", "bold")
    if tuned is not None:
        place = shlex.quote(index.uri)
        say(console, describe_search(tuned))
        say(console, f"next:\n  listwise search {place} PHOTO\n  listwise serve {place}")
