"""Show the progress of training on the terminal."""

from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn


@dataclass(frozen=True)
class UpdateReport:
    """The metrics after an update."""

    update: int
    updates: int
    loss: float
    learning_rate: float
    images_per_second: float


@dataclass(frozen=True)
class ValidationReport:
    """The metrics of a validation."""

    update: int
    mean_average_precision: float
    best: bool


class TrainView:
    """Receives the events of a run. This base class shows nothing; override what you need.

    Attributes:
        wants_estimate: whether to measure the speed of the machine before training starts, and to
            announce how long the run will take.
    """

    wants_estimate = False

    def message(self, line: str) -> None:
        """Receive a message for the user."""

    def start(self, update: int, updates: int) -> None:
        """Training starts, or resumes after `update`."""

    def progress(self, what: str, done: int, total: int) -> None:
        """A task such as "validating" has processed `done` of its `total` photos."""

    def advance(self, updates: float, seconds_left: float | None) -> None:
        """Training has done this many updates, also a part of one; the rest takes some seconds."""

    def update(self, report: UpdateReport) -> None:
        """An update has finished."""

    def validation(self, report: ValidationReport) -> None:
        """A validation has finished."""

    def close(self) -> None:
        """The run has ended."""


class LiveTrainView(TrainView):
    """Shows a progress bar with loss, validation mAP, images per second and remaining time.

    If the output is not a terminal, it prints one line per validation, and the remaining time after
    the first micro-batches.
    """

    wants_estimate = True

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._training: TaskID | None = None
        self._work: TaskID | None = None
        self._last: UpdateReport | None = None
        self._map = "–"
        self._left: float | None = None
        self._announced = False

    def message(self, line: str) -> None:
        """Print a message above the bar."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def start(self, update: int, updates: int) -> None:
        """Show the bar."""
        self._training = self._bars.add_task(
            "training", total=updates, completed=update, figures=""
        )
        self._bars.start()

    def progress(self, what: str, done: int, total: int) -> None:
        """Show a second bar until the task has finished."""
        if self._work is None:
            self._work = self._bars.add_task(what, total=total, figures="photos")
        self._bars.update(self._work, completed=done)
        if done == total:
            self._bars.remove_task(self._work)
            self._work = None

    def advance(self, updates: float, seconds_left: float | None) -> None:
        """Move the bar inside an update, and show the remaining time."""
        if seconds_left is None:
            return
        inside = updates % 1 > 0
        if inside and not self._announced and not self.console.is_terminal:
            self._announced = True
            self.message(f"update {int(updates) + 1}  about {readable_time(seconds_left)} left")
        self._left = seconds_left
        if self._training is not None:
            figures = f"{readable_time(seconds_left)} left"
            if self._last is not None:
                figures = self._figures(self._last)
            self._bars.update(self._training, completed=updates, figures=figures)

    def update(self, report: UpdateReport) -> None:
        """Advance the bar."""
        self._last = report
        if self._training is not None:
            self._bars.update(
                self._training, completed=report.update, figures=self._figures(report)
            )

    def validation(self, report: ValidationReport) -> None:
        """Print the result of the validation."""
        self._map = f"{100 * report.mean_average_precision:.1f}"
        figures = f"validation mAP {self._map}"
        if self._last is not None:
            self.update(self._last)
            figures = self._figures(self._last)
        mark = "  best so far" if report.best else ""
        self.message(f"update {report.update:3d}  {figures}{mark}")

    def close(self) -> None:
        """Remove the bar."""
        self._bars.stop()

    def _figures(self, report: UpdateReport) -> str:
        figures = (
            f"loss {report.loss:.4f}  validation mAP {self._map}  "
            f"{report.images_per_second:.0f} images/s"
        )
        if report.update == report.updates or self._left is None:
            return figures
        return f"{figures}  {readable_time(self._left)} left"


def readable_time(seconds: float) -> str:
    """Format a duration for people, such as 40 s, 12 min or 3 h 05 min."""
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
