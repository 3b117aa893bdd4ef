"""Show the progress of a study on the terminal."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from rich.console import Console

from listwise.cli.output import say
from listwise.progress import progress_bar
from listwise.studies.outcome import StudyResults
from listwise.studies.runs import StudyView
from listwise.training.run.view import LiveTrainView, TrainView


class LiveStudyView(StudyView):
    """Prints the name of the current run above the bars of its trainer, and calls `on_outcome`."""

    def __init__(self, console: Console, on_outcome: Callable[[StudyResults], object]) -> None:
        self.console = console
        self.on_outcome = on_outcome

    def run(self, number: int, count: int, name: str) -> TrainView:
        """Print which run begins."""
        say(self.console, f"run {number} of {count}: {name}", "bold")
        return LiveTrainView(self.console)

    def skipped(self, number: int, count: int, name: str) -> None:
        """Print which run exists already."""
        say(self.console, f"run {number} of {count}: {name}: already finished", "dim")

    def describing(self, what: str, photos: int) -> AbstractContextManager[Callable[[int], object]]:
        """Show a bar."""
        return progress_bar(self.console, what, photos)

    def found(self, findings: StudyResults) -> None:
        """Pass the new outcome on."""
        self.on_outcome(findings)
