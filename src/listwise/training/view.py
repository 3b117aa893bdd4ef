"""What a person sees while a network trains."""

from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


@dataclass(frozen=True)
class UpdateReport:
    """The figures after an update."""

    update: int
    updates: int
    loss: float
    learning_rate: float
    images_per_second: float


@dataclass(frozen=True)
class ValidationReport:
    """The figures of a validation."""

    update: int
    mean_average_precision: float
    best: bool


class View(Protocol):
    """Is told what happens."""

    def say(self, line: str) -> None:
        """A sentence."""

    def update(self, report: UpdateReport) -> None:
        """An update is done."""

    def validated(self, report: ValidationReport) -> None:
        """A validation is done."""

    def close(self) -> None:
        """The run is over."""


class Silent:
    """Shows nothing."""

    def say(self, line: str) -> None:
        """Nothing."""

    def update(self, report: UpdateReport) -> None:
        """Nothing."""

    def validated(self, report: ValidationReport) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class LiveView:
    """A progress bar with loss, validation mAP, images a second and the time left.

    Where the output is no terminal, one line a validation.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._map = "–"
        self._progress: Progress | None = None

    def say(self, line: str) -> None:
        """Print a sentence above the bar."""
        self.console.print(line, highlight=False, markup=False)

    def update(self, report: UpdateReport) -> None:
        """Move the bar."""
        if not self.console.is_terminal:
            return
        if self._progress is None:
            self._progress = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._progress.add_task("training", total=report.updates, figures="")
            self._progress.start()
        self._progress.update(
            self._progress.task_ids[0],
            completed=report.update,
            figures=f"loss {report.loss:.4f}  validation mAP {self._map}  "
            f"{report.images_per_second:.0f} images/s",
        )

    def validated(self, report: ValidationReport) -> None:
        """Say the validation's result."""
        self._map = f"{100 * report.mean_average_precision:.1f}"
        mark = "  best so far" if report.best else ""
        self.say(f"update {report.update:4d}: validation mAP {self._map}{mark}")

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
