"""Progress bars, shown on a terminal only."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

FEW = 16  # up to this many photos are done too fast for a bar


@contextmanager
def counting(what: str, total: int, show: bool | None = None) -> Iterator[Callable[[int], object]]:
    """Show a bar on stderr; the yielded function advances it by a number.

    Args:
        what: the label of the bar.
        total: the number at which the bar is full.
        show: whether to show it; by default on a terminal and for more than `FEW` photos.
    """
    if show is None:
        show = total > FEW and sys.stderr.isatty()
    if not show:
        yield lambda count: None
        return
    from rich.console import Console

    with progress_bar(Console(stderr=True), what, total) as advance:
        yield advance


def make_bars(console: "Console", download: bool = False) -> "Progress":
    """Return progress bars that disappear when they are done, shown on a terminal only."""
    from rich import progress as rich

    amount: list[rich.ProgressColumn] = [rich.MofNCompleteColumn()]
    if download:
        amount = [rich.DownloadColumn(), rich.TransferSpeedColumn()]
    return rich.Progress(
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        *amount,
        rich.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def progress_bar(
    console: "Console", what: str, total: int | None = None
) -> Iterator[Callable[[int], None]]:
    """Show a bar; the yielded function advances it by a number of steps."""
    with make_bars(console) as bars:
        task = bars.add_task(what, total=total)
        yield lambda count: bars.advance(task, count)


@contextmanager
def total_bar(console: "Console", what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar; the yielded function sets the steps done and the total."""
    with make_bars(console) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def download_bar(console: "Console") -> Iterator[Callable[[str, int, int | None], None]]:
    """Show a bar of bytes; the yielded function sets its label, the bytes done and the total."""
    with make_bars(console, download=True) as bars:
        task = bars.add_task("", total=None)
        shown = ""

        def report(what: str, done: int, total: int | None) -> None:
            nonlocal shown
            if what != shown:
                bars.reset(task, description=what, total=total)
                shown = what
            bars.update(task, completed=done, total=total)

        yield report


@contextmanager
def stage_bars(console: "Console") -> Iterator[Callable[[str, int, int], None]]:
    """Show one bar after the other; the yielded function sets stage, steps done and total."""
    with make_bars(console) as bars:
        task = bars.add_task("", total=None)
        shown = ""

        def report(stage: str, done: int, total: int) -> None:
            nonlocal shown
            if stage != shown:
                bars.reset(task, description=stage, total=total)
                shown = stage
            bars.update(task, completed=done, total=total)

        yield report


@contextmanager
def stages_shown() -> Iterator[Callable[[str, int, int], None]]:
    """Show the bars of `stage_bars` on stderr, if it is a terminal."""
    if not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.console import Console

    with stage_bars(Console(stderr=True)) as report:
        yield report
