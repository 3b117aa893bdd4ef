"""A progress bar for the library's long calls."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as progress:
        bar = progress.add_task(what, total=total)
        yield lambda count: progress.advance(bar, count)
