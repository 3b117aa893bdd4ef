"""`listwise download`: the public data sets by name."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from listwise.cli import options
from listwise.cli.output import note, open_console, print_json, say, stoppable
from listwise.errors import InputError
from listwise.progress import download_bar

if TYPE_CHECKING:
    from listwise.data.catalog import DataSetEntry

EXAMPLES = options.examples("""Examples:
  listwise download --list                       the names of all data sets
  listwise download roxford5k                    into data/roxford5k
  listwise download SOP --to /data/sop           run it again to resume after an interruption
""")


def download(
    name: Annotated[str | None, typer.Argument(help="The name of a data set; see --list.")] = None,
    to: Annotated[
        Path | None, typer.Option(help="Folder to download into.", show_default="data/NAME")
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List the data sets.")] = False,
    json: options.AsJson = False,
) -> None:
    """Download a public data set, or check the one that is in the folder."""
    from listwise.data.catalog import DATA_FOLDER, ENTRIES, find_entry
    from listwise.data.catalog.download import get_dataset

    console = open_console(json)
    if list_all:
        _list(list(ENTRIES.values()), console, json)
        return
    entry = find_entry(name) if name else None
    if entry is None:
        what = "name a data set" if name is None else f"no data set is called {name!r}"
        raise InputError(f"{what}; the names are {', '.join(ENTRIES)}")
    say(console, f"{entry.title}: {entry.terms}\n{entry.page}")
    with stoppable(), download_bar(console) as report:
        found = get_dataset(entry, to or DATA_FOLDER / entry.name, report)
    if found.unverified:
        more = " …" if len(found.unverified) > 3 else ""
        say(
            console,
            f"no checksum is published for {', '.join(found.unverified[:3])}{more}: its SHA-256 is "
            "noted in downloads.json",
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
    table = Table("name", "what", "images", "download")
    table.columns[0].no_wrap = True
    for entry in entries:
        counts = "\n".join(f"{count:,} {part}" for part, count in entry.counts.items())
        size = f"{entry.gigabytes:g} GB" if entry.gigabytes else f"{len(entry.files)} files"
        table.add_row(entry.name, entry.title, counts, size if entry.files else "by hand")
    console.print(table)
    say(console, "The terms of a data set are printed before its download, and by --list --json.")
