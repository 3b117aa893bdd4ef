"""What a person sees while a study runs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from listwise.studies.outcome import Findings
from listwise.training.run.view import LiveTrainView, TrainView


class StudyView:
    """Is told how far a study is; this one shows nothing."""

    def run(self, number: int, count: int, name: str) -> TrainView:
        """A run begins, the `number`-th of so many; gives what its trainer tells."""
        return TrainView()

    def skipped(self, number: int, count: int, name: str) -> None:
        """A run was finished before."""

    def describing(self, what: str, photos: int) -> AbstractContextManager[Callable[[int], object]]:
        """So many photos are about to be described; gives what is called with numbers of them."""
        return nullcontext(lambda count: None)

    def found(self, findings: Findings) -> None:
        """There is a new outcome."""


class LiveStudyView(StudyView):
    """Says which run of how many, above the trainer's own bars; `found` may be given."""

    def __init__(
        self, console: Console, found: Callable[[Findings], object] = lambda findings: None
    ) -> None:
        self.console = console
        self._found = found

    def run(self, number: int, count: int, name: str) -> TrainView:
        """Say which run begins."""
        self._say(f"run {number} of {count}: {name}", "bold")
        return LiveTrainView(self.console)

    def skipped(self, number: int, count: int, name: str) -> None:
        """Say which run is there already."""
        self._say(f"run {number} of {count}: {name}: finished before", "dim")

    @contextmanager
    def describing(self, what: str, photos: int) -> Iterator[Callable[[int], object]]:
        """Show a bar."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        silent = not self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=silent) as bars:
            bar = bars.add_task(what, total=photos)
            yield lambda count: bars.advance(bar, count)

    def found(self, findings: Findings) -> None:
        """Pass it on."""
        self._found(findings)

    def _say(self, line: str, style: str) -> None:
        self.console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)
