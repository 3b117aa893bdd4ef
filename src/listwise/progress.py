"""Progress bars; none of them shows where the output is not a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

FEW = 16  # photos that need no bar


@contextmanager
def counting(what: str, total: int, show: bool | None = None) -> Iterator[Callable[[int], object]]:
    """A bar on stderr that each call advances by a number.

    With `show=None` it is shown on a terminal only, and for more than a handful of photos.
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
    """Bars that vanish when they are done, and do not show where the output is not a terminal."""
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
    """A bar that a call advances by a number of steps."""
    with make_bars(console) as bars:
        task = bars.add_task(what, total=total)
        yield lambda count: bars.advance(task, count)


@contextmanager
def total_bar(console: "Console", what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that a call sets to a number of steps done, out of a total."""
    with make_bars(console) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def download_bar(console: "Console") -> Iterator[Callable[[str, int, int | None], None]]:
    """A bar of bytes that a call sets to what is done, out of a total if known, of one thing."""
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
