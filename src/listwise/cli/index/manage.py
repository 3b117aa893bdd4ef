"""`listwise index local`, `tune`, `info` and `check`."""

from functools import partial
from typing import Annotated

import typer
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from listwise.cli import options
from listwise.cli.index import shared
from listwise.cli.output import (
    note,
    open_console,
    print_json,
    print_result,
    stoppable,
    warn_of_unreadable,
)

LOCAL = """Examples:
  listwise index local shop
  listwise index local shop --json

Run the same command again to resume after an interruption. Photos that are added later get local
features too.
"""
TUNE = """Examples:
  listwise index tune shop --recall 0.99
  listwise index tune shop --memory 2GB --milliseconds 20
  listwise index tune shop        # choose by the size of the index
"""
INFO = """Examples:
  listwise index info shop
  listwise index info shop --json
"""
CHECK = """Examples:
  listwise index check shop
  listwise index check shop --repair
  listwise index check shop --photos --json

The exit code is 1 if something is damaged and was not repaired.
"""


def local(
    index: options.IndexPlace, workers: options.Workers = None, json: options.AsJson = False
) -> None:
    """Store local features of the photos of an index, so that re-ranking takes less time."""
    console = open_console(json)

    from listwise.search import open_index

    with open_index(index, create=False) as opened, stoppable():
        found = opened.add_local_features(workers=workers)
        facts, total = opened.info()["local"], shared.count_photos(len(opened))
    if not json:
        warn_of_unreadable(console, found.errors)
    counts = {"updated": len(found.updated), "errors": found.errors, "local": facts}
    done = f"stored local features of {shared.count_photos(len(found.updated))}"
    has = f"{facts['entries']} of {total} have them, {decimal(facts['bytes'])}"
    print_result(console, json, {"index": index, **counts}, f"{done}; {has}")


def tune(
    index: options.IndexPlace,
    memory: shared.Memory = None,
    milliseconds: shared.Milliseconds = None,
    recall: shared.Recall = None,
    json: options.AsJson = False,
) -> None:
    """Choose the search method of an index for given limits, and measure it."""
    wanted = shared.parse_intent(memory, milliseconds, recall)
    console = open_console(json)

    from listwise.search import open_index

    with open_index(index, create=False) as opened, console.status("measuring search methods"):
        tuned = opened.tune(wanted, partial(note, console))
    print_result(console, json, tuned, shared.describe_search(tuned))


def info(index: options.IndexPlace, json: options.AsJson = False) -> None:
    """Show the contents, the model and the search method of an index."""
    from listwise.search import open_index

    with open_index(index, create=False) as opened:
        facts = opened.info()
    if json:
        print_json(facts)
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in facts.items():
        shown = "" if value is None else escape(shared.readable_fact(name, value))
        if shown:
            label = shared.FACTS.get(name, name.replace("_", " "))
            table.add_row(f"[dim]{label}[/dim]", shown)
    open_console().print(table, soft_wrap=True)


def check(
    index: options.IndexPlace,
    repair: Annotated[
        bool,
        options.flag(
            "--repair",
            "Restore damaged files, and recompute damaged descriptors from the photos.",
        ),
    ] = False,
    photos: Annotated[
        bool, options.flag("--photos", "Read the photos too, and report those that have changed.")
    ] = False,
    model: options.IndexModel = None,
    device: options.Device = "auto",
    json: options.AsJson = False,
) -> None:
    """Check an index for damage; --repair repairs it."""
    from listwise.search import check_index

    with stoppable():
        result = check_index(index, model, photos=photos, repair=repair, device=device)
    if json:
        print_json({**vars(result), "ok": result.ok})
    else:
        shared.report_check(open_console(), index, result, repair)
    if not result.ok:
        raise typer.Exit(1)
