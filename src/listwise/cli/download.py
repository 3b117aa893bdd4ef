"""`listwise download`: the public data sets by name."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from listwise.data.catalog import Dataset, Entry
    from listwise.data.download import Progress

EXAMPLES = """Examples:

  listwise download --list                       what there is

  listwise download roxford5k                    into data/roxford5k

  listwise download SOP --to /data/sop           go on after an interruption with the same line
"""


def download(
    name: Annotated[str | None, typer.Argument(help="A data set's name; see --list.")] = None,
    to: Annotated[
        Path | None, typer.Option(help="Folder it goes to. [dim]default: data/NAME[/dim]")
    ] = None,
    list_all: Annotated[bool, typer.Option("--list", help="Print what there is.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Fetch a public data set, or recognise it where it is in place."""
    from rich.console import Console

    from listwise.data.catalog import DATA_FOLDER, ENTRIES, find_entry, recognise
    from listwise.data.download import download as fetch
    from listwise.errors import InputError

    console = Console(stderr=json, highlight=False, markup=False, soft_wrap=True)
    if list_all:
        _show_catalogue(list(ENTRIES.values()), console, json)
        return
    entry = find_entry(name) if name else None
    if entry is None:
        what = "say which data set" if name is None else f"no data set is called {name!r}"
        raise InputError(f"{what}; the names are {', '.join(ENTRIES)}")
    folder = to or DATA_FOLDER / entry.name
    console.print(f"{entry.title}: {entry.terms}\n{entry.page}")
    found = recognise(folder)
    if found is not None and found.entry is not entry:
        raise InputError(f"{folder} holds {found.name}, not {entry.name}: give another folder")
    with console.status("checking what is there"):
        problems = found.check() if found else []
    if found is None or problems:
        if not entry.files:
            raise InputError(problems[0] if problems else f"{entry.name}: {entry.how}")
        try:
            with _progress(console) as report:
                unverified = fetch(entry, folder, progress=report)
        except KeyboardInterrupt:
            print("listwise: stopped; the same command goes on", file=sys.stderr)
            raise typer.Exit(130) from None
        if unverified:
            console.print(
                "no checksum is published for "
                f"{', '.join(unverified[:3])}{' …' if len(unverified) > 3 else ''}: its SHA-256 "
                "is noted in downloads.json"
            )
        found = recognise(folder)
        if found is None:
            raise InputError(f"{folder} has not the layout of {entry.name} after the download")
        with console.status("checking the photos"):
            problems = found.check()
    _show_result(found, problems, console, json)


def _show_result(
    dataset: "Dataset", problems: list[str], console: "Console", as_json: bool
) -> None:
    import json

    if as_json:
        answer = {"name": dataset.name, "folder": str(dataset.folder), "problems": problems}
        print(json.dumps(answer))
        return
    for problem in problems:
        console.print(f"note: {problem}", style="yellow")
    console.print(f"{dataset.name} is in {dataset.folder}", style="bold")


def _show_catalogue(entries: "list[Entry]", console: "Console", as_json: bool) -> None:
    import json

    from rich.table import Table

    if as_json:
        fields = ("name", "title", "terms", "page", "counts", "gigabytes", "how")
        print(json.dumps([{field: getattr(entry, field) for field in fields} for entry in entries]))
        return
    table = Table("name", "what", "images", "download")
    table.columns[0].no_wrap = True
    for entry in entries:
        counts = "\n".join(f"{count:,} {part}" for part, count in entry.counts.items())
        size = f"{entry.gigabytes:g} GB" if entry.gigabytes else f"{len(entry.files)} files"
        size = size if entry.files else "by hand"
        table.add_row(entry.name, entry.title, counts, size)
    console.print(table, soft_wrap=False)
    console.print("A set's terms are printed before it is fetched, and by --list --json.")


@contextmanager
def _progress(console: "Console") -> "Iterator[Progress]":
    """A bar that follows whatever a download is doing."""
    from rich import progress as rich

    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=None)
        shown = ""

        def report(what: str, done: int, total: int | None) -> None:
            nonlocal shown
            if what != shown:
                bars.reset(task, description=what, total=total)
                shown = what
            bars.update(task, completed=done, total=total)

        yield report
