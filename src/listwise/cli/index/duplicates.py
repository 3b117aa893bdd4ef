"""`listwise index duplicates`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from listwise.cli import options
from listwise.cli.index import shared
from listwise.cli.output import open_console, print_json, say, stoppable
from listwise.errors import InputError

if TYPE_CHECKING:
    from listwise.search import DuplicateGroup

EXAMPLES = """Examples:
  listwise index duplicates shop
  listwise index duplicates shop --sheet duplicates.png
  listwise index duplicates shop --threshold 0.98 --json
  listwise index duplicates shop --remove  # keep the largest of each group
"""
PICTURES = (".png", ".jpg", ".jpeg", ".webp")


def duplicates(
    index: options.IndexPlace,
    threshold: Annotated[
        float, options.decimal("Minimum score of near-duplicates, from -1 to 1.")
    ] = 0.95,
    verify: Annotated[
        bool | None,
        options.flag(
            "--verify/--no-verify",
            "Verify near-duplicates by local features; by default if the extra local is installed.",
        ),
    ] = None,
    sheet: Annotated[
        Path | None, options.path("Write a picture of the groups to this file (.png).")
    ] = None,
    remove: Annotated[
        bool, options.flag("--remove", "Keep the largest photo of each group, remove the others.")
    ] = False,
    yes: Annotated[bool, options.flag("--yes", "Remove without asking.")] = False,
    json: options.AsJson = False,
) -> None:
    """Find photos that are in an index more than once: exact copies and near-duplicates."""
    if sheet is not None and sheet.suffix.lower() not in PICTURES:
        raise InputError(f"cannot write {sheet}: the name of --sheet must end with .png")
    console = open_console(json)

    from listwise.search import open_index

    with open_index(index, create=False) as opened, stoppable():
        groups = opened.duplicates(threshold=threshold, verify=verify)
        if sheet is not None and groups:
            from listwise.search.sheet import draw_duplicates

            draw_duplicates(groups).save(sheet)
        if not json:
            _print(console, groups)
            if sheet is not None and groups:
                say(console, f"wrote a picture of the groups to {sheet}")
        others = [entry for group in groups for entry in group.entries[1:]]
        removed = 0
        if remove and others and (yes or _agreed(len(others), json)):
            removed = opened.remove(others)
    if json:
        print_json({"index": index, "groups": list(map(_as_json, groups)), "removed": removed})
    elif removed:
        say(console, f"removed {shared.count_photos(removed)} from {index}")


def _agreed(count: int, json: bool) -> bool:
    if json:
        raise InputError("--json cannot ask before --remove removes photos: add --yes")
    return typer.confirm(f"remove {shared.count_photos(count)} from the index?")


def _as_json(group: "DuplicateGroup") -> dict[str, object]:
    from listwise.search.views import DuplicateView

    return DuplicateView.of(group).model_dump()


def _print(console: Console, groups: "list[DuplicateGroup]") -> None:
    if not groups:
        say(console, "no duplicates found")
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("group", "kind", "score", "photo", "size"):
        table.add_column(name, overflow="fold", justify="right" if name == "score" else "left")
    for number, group in enumerate(groups, 1):
        first = (str(number), "exact" if group.exact else "near", f"{group.score:.3f}")
        for entry in group.entries:
            table.add_row(*first, escape(entry.id), f"{entry.width}×{entry.height}")
            first = ("", "", "")
    console.print(table)
    total = sum(len(group.entries) - 1 for group in groups)
    found = "1 group" if len(groups) == 1 else f"{len(groups)} groups"
    say(console, f"{found}; {shared.count_photos(total)} could be removed", "bold")
