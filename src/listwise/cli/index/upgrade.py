"""`listwise index upgrade`, `rollback` and `discard`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from listwise.cli import options
from listwise.cli.index import shared
from listwise.cli.output import note, open_console, print_json, print_result, say, stoppable

if TYPE_CHECKING:
    from listwise.search import Index, UpgradeResult

UPGRADE = """Examples:
  listwise index upgrade shop --model runs/better/model
  listwise index upgrade shop --model runs/better/model --skip-missing
  listwise index upgrade milvus://127.0.0.1:19530/shop --model resnet101 --json

Searches use the earlier model until all photos are described; then the index and its running
servers switch to the new one. Run the same command again to resume after an interruption. The
earlier descriptors stay on the disk for listwise index rollback, until the next upgrade or listwise
index discard.
"""
ROLLBACK = """Examples:
  listwise index rollback shop
  listwise index rollback shop --json

Photos that were added since the upgrade are described with the earlier model first. Run the command
again to return to the new model.
"""
DISCARD = """Examples:
  listwise index discard shop

Servers switch to an upgraded index within seconds, or as soon as they have loaded it. Discard the
earlier descriptors after that.
"""

SkipMissing = Annotated[
    bool,
    options.flag(
        "--skip-missing",
        "Leave out entries whose photo is missing, has changed or cannot be read.",
    ),
]


def upgrade(
    index: options.IndexPlace,
    model: Annotated[
        str, options.text("New model: model folder, run folder, or name of a timm backbone.")
    ],
    skip_missing: SkipMissing = False,
    device: options.Device = "auto",
    workers: options.Workers = None,
    json: options.AsJson = False,
) -> None:
    """Describe the photos of an index with another model, and switch to it when all are done."""
    with _opened(index, device, json) as (opened, report, on_note):
        report(opened.upgrade(model, skip_missing=skip_missing, workers=workers, on_note=on_note))


def rollback(
    index: options.IndexPlace,
    model: Annotated[
        Path | None,
        options.path("Earlier model, if its folder has moved.", show_default="as in the index"),
    ] = None,
    skip_missing: SkipMissing = False,
    device: options.Device = "auto",
    workers: options.Workers = None,
    json: options.AsJson = False,
) -> None:
    """Return to the model and the descriptors from before the last upgrade of an index."""
    with _opened(index, device, json) as (opened, report, on_note):
        report(opened.rollback(model, skip_missing=skip_missing, workers=workers, on_note=on_note))


def discard(index: options.IndexPlace, json: options.AsJson = False) -> None:
    """Delete the descriptors that an upgrade replaced, and those of an unfinished upgrade."""
    from listwise.search import open_index

    with open_index(index, create=False) as opened:
        opened.discard_earlier()
        facts = {"index": index, "generations": opened.info()["generations"]}
    done = f"{index} has only its current descriptors now; a rollback is not possible any more"
    print_result(open_console(json), json, facts, done)


@contextmanager
def _opened(
    index: str, device: str, json: bool
) -> Iterator[tuple["Index", Callable[["UpgradeResult"], None], Callable[[str], None]]]:
    """Open an index to switch its model; yield it and functions that print the result and notes."""
    console = open_console(json)

    from listwise.search import open_index

    with open_index(index, device=device, create=False) as opened, stoppable():
        yield opened, partial(_report, console, opened, json), partial(note, console)


def _report(console: Console, index: "Index", json: bool, done: "UpgradeResult") -> None:
    header = index.header
    model = header.model_folder or header.model_name or header.model[:12]
    if json:
        print_json({"index": index.uri, "model": model, **vars(done)})
        return
    if done.skipped:
        count, first = shared.count_photos(len(done.skipped)), "; ".join(done.skipped[:5])
        more = f"; and {len(done.skipped) - 5} more" if len(done.skipped) > 5 else ""
        say(console, f"left out {count}: {first}{more}", "yellow")
    described = f"{shared.count_photos(done.described)} described"
    say(
        console,
        f"{index.uri} uses the model {model} now: {shared.count_photos(done.entries)}, {described}",
        "bold",
    )
