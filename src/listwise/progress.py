"""A progress bar for the library's long calls."""

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

    with make_bars(Console(stderr=True)) as bars:
        bar = bars.add_task(what, total=total)
        yield lambda count: bars.advance(bar, count)


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
