"""Progress bars, shown on a terminal only, and numbers and tables as text."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
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
        show: whether to show it; by default on a terminal or in a notebook, and for more than
            `FEW` photos.
    """
    if show is None:
        show = total > FEW and bars_are_seen()
    if not show:
        yield lambda count: None
        return
    with progress_bar(None, what, total) as advance:
        yield advance


def bars_are_seen() -> bool:
    """Return whether stderr is a terminal, or the output below the cell of a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def stderr_console() -> "Console":
    """Return a console on stderr, where a bar is one line that is overwritten, also in a notebook.

    Without this, rich would need ipywidgets in a notebook.
    """
    from rich.console import Console

    seen = bars_are_seen()
    return Console(stderr=True, force_terminal=seen or None, force_jupyter=False)


def _make_bars(console: "Console | None", download: bool = False) -> "Progress":
    """Return progress bars that disappear when they are done; by default on stderr."""
    from rich import progress as rich

    console = console or stderr_console()
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
    console: "Console | None", what: str, total: int | None = None
) -> Iterator[Callable[[int], None]]:
    """Show a bar; the yielded function advances it by a number of steps."""
    with _make_bars(console) as bars:
        task = bars.add_task(what, total=total)
        yield lambda count: bars.advance(task, count)


@contextmanager
def stage_bars(
    console: "Console | None" = None, stage: str = "", download: bool = False
) -> Iterator[Callable[[str, int, int | None], None]]:
    """Show one bar after the other; the yielded function sets stage, steps done and total."""
    with _make_bars(console, download) as bars:
        task = bars.add_task(stage, total=None)

        def report(stage: str, done: int, total: int | None) -> None:
            if done < bars.tasks[0].completed:  # of an earlier stage
                bars.reset(task)
            bars.update(task, description=stage, completed=done, total=total)

        yield report


@contextmanager
def total_bar(console: "Console", what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar; the yielded function sets the steps done and the total."""
    with stage_bars(console, what) as report:
        yield partial(report, what)


def counted(
    what: str, total: int, report: Callable[[str, int, int], object]
) -> Callable[[int], None]:
    """Return a function that adds up the steps of a task, and reports the sum each time."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        report(what, done, total)

    return advance


def count_of(number: int, one: str, several: str = "") -> str:
    """Format a number of things, by default with an s: "1 photo", "1,200 photos"."""
    return f"1 {one}" if number == 1 else f"{number:,} {several or f'{one}s'}"


def readable_time(seconds: float) -> str:
    """Format a duration for people, such as 40 s, 12 min or 3 h 05 min."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return rows of cells as lines with aligned columns, the first `left` ones to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
