"""Progress bars; none of them shows where the output is not a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from listwise.progress import make_bars


@contextmanager
def progress_bar(
    console: Console, what: str, total: int | None = None
) -> Iterator[Callable[[int], None]]:
    """A bar that a call advances by a number of steps."""
    with make_bars(console) as bars:
        task = bars.add_task(what, total=total)
        yield lambda count: bars.advance(task, count)


@contextmanager
def total_bar(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that a call sets to a number of steps done, out of a total."""
    with make_bars(console) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def download_bar(console: Console) -> Iterator[Callable[[str, int, int | None], None]]:
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
