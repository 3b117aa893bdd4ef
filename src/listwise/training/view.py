"""Show the progress of training on the terminal."""

from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from listwise.progress import readable_time


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

    def update(self, update: int, metrics: Mapping[str, float]) -> None:
        """An update has finished, with the metrics that `metrics.jsonl` records."""

    def validation(self, update: int, value: float, best: bool) -> None:
        """A validation after this update has finished, with this mAP; the best so far or not."""

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
        self._metrics: Mapping[str, float] = {}
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
        self._show(updates)

    def update(self, update: int, metrics: Mapping[str, float]) -> None:
        """Advance the bar."""
        self._metrics = metrics
        self._show(update)

    def _show(self, updates: float) -> None:
        if self._training is not None:
            self._bars.update(self._training, completed=updates, figures=self._figures())

    def validation(self, update: int, value: float, best: bool) -> None:
        """Print the result of the validation."""
        self._map = f"{100 * value:.1f}"
        self._show(update)
        figures = self._figures() if self._metrics else f"validation mAP {self._map}"
        self.message(f"update {update:3d}  {figures}{'  best so far' if best else ''}")

    def close(self) -> None:
        """Remove the bar."""
        self._bars.stop()

    def _figures(self) -> str:
        figures = []
        if self._metrics:
            speed = f"{self._metrics['images_per_second']:.0f} images/s"
            figures = [f"loss {self._metrics['loss']:.4f}", f"validation mAP {self._map}", speed]
        if self._left:
            figures.append(f"{readable_time(self._left)} left")
        return "  ".join(figures)
