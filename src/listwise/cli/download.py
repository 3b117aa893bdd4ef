"""`listwise download`: download public data sets by name."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table

from listwise.cli import options
from listwise.cli.output import note, open_console, print_json, say, stoppable
from listwise.errors import InputError
from listwise.progress import download_bar

if TYPE_CHECKING:
    from listwise.data.catalog import DataSetEntry

EXAMPLES = """Examples:
  listwise download --list                  # list all data sets
  listwise download roxford5k               # download into data/roxford5k
  listwise download SOP --to /data/sop

Run the same command again to resume an interrupted download.
"""


def download(
    name: Annotated[
        str | None, options.argument("NAME", "Name of a data set; --list shows all names.")
    ] = None,
    to: Annotated[
        Path | None, options.path("Folder to download into.", show_default="data/NAME")
    ] = None,
    list_all: Annotated[bool, options.flag("--list", "List the data sets and exit.")] = False,
    json: options.AsJson = False,
) -> None:
    """Download a public data set, or check that a downloaded one is complete."""
    from listwise.data.catalog import DATA_FOLDER, ENTRIES, find_entry
    from listwise.data.catalog.download import get_dataset

    console = open_console(json)
    if list_all:
        _list(list(ENTRIES.values()), console, json)
        return
    entry = find_entry(name) if name else None
    if entry is None:
        what = "give the name of a data set" if name is None else f"unknown data set {name!r}"
        raise InputError(f"{what}: choose one of {', '.join(ENTRIES)}")
    say(console, f"{entry.title}: {entry.terms}\n{entry.page}")
    with stoppable(), download_bar(console) as report:
        found = get_dataset(entry, to or DATA_FOLDER / entry.name, report)
    if found.unverified:
        more = " …" if len(found.unverified) > 3 else ""
        say(
            console,
            f"no checksum is published for {', '.join(found.unverified[:3])}{more}; downloads.json "
            "stores the SHA-256 of the downloaded file",
        )
    dataset, problems = found.dataset, found.problems
    if json:
        print_json({"name": dataset.name, "folder": dataset.folder, "problems": problems})
        return
    for problem in problems:
        note(console, problem)
    say(console, f"{dataset.name} is in {dataset.folder}", "bold")


def _list(entries: "list[DataSetEntry]", console: Console, json: bool) -> None:
    if json:
        fields = ("name", "title", "terms", "page", "counts", "gigabytes", "how")
        print_json([{field: getattr(entry, field) for field in fields} for entry in entries])
        return
    table = Table("name", "data set", "images", "download")
    table.columns[0].no_wrap = True
    for entry in entries:
        counts = "\n".join(f"{count:,} {part}" for part, count in entry.counts.items())
        size = f"{entry.gigabytes:g} GB" if entry.gigabytes else f"{len(entry.files)} files"
        table.add_row(entry.name, entry.title, counts, size if entry.files else "by hand")
    console.print(table)
    say(
        console,
        "--list --json also prints the terms of use and the page of each data set",
    )
