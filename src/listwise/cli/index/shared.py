"""Options and output that the index commands share."""

import re
import shlex
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.filesize import decimal

from listwise.cli import options
from listwise.cli.output import print_json, say, warn_of_unreadable
from listwise.errors import InputError

if TYPE_CHECKING:
    from listwise.search import Added, CheckResult, Index, SearchIntent
    from listwise.search.store import TuningResult

Memory = Annotated[
    str | None, options.option("SIZE", "Maximum memory for search, such as 500MB or 2GB.")
]
Milliseconds = Annotated[
    float | None, options.decimal("Maximum latency per query, in milliseconds.")
]
Recall = Annotated[
    float | None,
    options.decimal("Minimum share of the ten nearest photos that a search finds, from 0 to 1."),
]

# Facts of `Index.info` whose name does not explain them.
FACTS = {
    "bytes": "size on disk",
    "dim": "dimensions",
    "engine": "storage",
    "intent": "limits",
    "local": "local features",
    "method": "search method",
    "milliseconds": "latency (ms)",
    "model": "fingerprint",
    "recall": "recall@10",
}


def parse_intent(
    memory: str | None, milliseconds: float | None, recall: float | None
) -> "SearchIntent":
    """Parse the limits of search; `memory` is a size such as 500MB or 2GB."""
    from listwise.search.store import search_intent

    size = None
    if memory is not None:
        pattern = r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)i?B?"
        found = re.fullmatch(pattern, memory.strip(), re.IGNORECASE)
        if not found:
            raise InputError(f"`memory` must be a size such as 500MB or 2GB, not {memory!r}")
        size = int(float(found[1]) * 1000 ** " KMGT".index(found[2].upper() or " "))
    return search_intent(size, milliseconds, recall)


def count_photos(count: int) -> str:
    """Return a number of photos in words: 1 photo, 2 photos."""
    return "1 photo" if count == 1 else f"{count} photos"


def describe_search(tuned: "TuningResult") -> str:
    """Describe the search method of an index and what was measured."""
    return (
        f"search: {tuned.method}; recall@10 {tuned.recall:.3f}, {tuned.milliseconds:.1f} ms per "
        f"query, {decimal(tuned.memory)} of memory"
    )


def readable_fact(name: str, value: Any) -> str:
    """Format a value of `Index.info` for people."""
    if isinstance(value, int) and name in ("bytes", "memory"):
        return decimal(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "engine":
        return "folder" if value == "embedded" else str(value)
    if name == "local":
        return f"{value['entries']} photos, {decimal(value['bytes'])}"
    if isinstance(value, dict):
        given = {k: decimal(v) if k == "memory" else v for k, v in value.items() if v is not None}
        return ", ".join(f"{k} {v}" for k, v in given.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def report_added(
    console: Console,
    index: "Index",
    added: "Added",
    json: bool,
    tuned: "TuningResult | None" = None,
) -> None:
    """Print what was added, and the search method if one was chosen."""
    if json:
        counts = {name: len(ids) for name, ids in vars(added).items() if name != "errors"}
        result = {"index": index.uri, "entries": len(index), **counts, "errors": added.errors}
        print_json(result if tuned is None else {**result, "search": tuned})
        return
    warn_of_unreadable(console, added.errors)
    if added.copies:
        what = ", ".join(added.copies[:5]) + (" …" if len(added.copies) > 5 else "")
        copies = count_photos(len(added.copies))
        say(console, f"skipped {copies} already in the index under another id: {what}", "yellow")
    kinds = ("added", "replaced", "updated", "unchanged")
    counts = {kind: len(getattr(added, kind)) for kind in kinds}
    done = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    say(console, f"{done or 'nothing to add'}; {count_photos(len(index))} in {index.uri}", "bold")
    if tuned is not None:
        place = shlex.quote(index.uri)
        say(console, describe_search(tuned))
        say(console, f"next steps:\n  listwise search {place} PHOTO\n  listwise serve {place}")


_CHECKED = {
    "files": "damaged files",
    "values": "entries with damaged values",
    "descriptors": "entries with a damaged descriptor",
    "thumbnails": "entries with a damaged thumbnail",
    "local": "entries with damaged local features",
    "marks": "damaged lines of the log of marks",
    "changed": "entries whose photo has changed",
    "missing": "entries whose photo does not exist",
    "repaired": "repaired",
    "removed": "removed, add their photos again",
    "lost": "not repaired, their photos cannot be used: add them again, or remove the entries",
}


def report_check(console: Console, index: str, result: "CheckResult", repair: bool) -> None:
    """Print what a check of an index found, and what to do next."""
    for name, what in _CHECKED.items():
        found = getattr(result, name)
        if found:
            names = ", ".join(found[:5]) + (" …" if len(found) > 5 else "")
            say(console, f"{len(found)} {what}: {names}", "yellow")
    place = shlex.quote(index)
    if result.unverified:
        hint = "" if repair else f"; listwise index check {place} --repair adds them"
        say(console, f"{result.unverified} entries have no checksums{hint}", "yellow")
    read = f"{count_photos(result.entries)} checked in {index}"
    if result.ok:
        done = "everything is repaired" if result.damaged else "no damage found"
        say(console, f"{read}: {done}", "bold")
    elif repair:
        say(console, f"{read}: not everything could be repaired", "bold red")
    else:
        say(console, f"{index} is damaged; run listwise index check {place} --repair", "bold red")
