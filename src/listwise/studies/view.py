"""What a study reports while it runs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from listwise.studies.outcome import Findings
from listwise.training.run.view import TrainView


class StudyView:
    """Follows the progress of a study; this one shows nothing."""

    def run(self, number: int, count: int, name: str) -> TrainView:
        """Called before run `number` of `count`; returns what follows its training."""
        return TrainView()

    def skipped(self, number: int, count: int, name: str) -> None:
        """Called instead of `run` if the run is finished already."""

    def describing(self, what: str, photos: int) -> AbstractContextManager[Callable[[int], object]]:
        """Called before photos are described; its context is called with numbers of them."""
        return nullcontext(lambda count: None)

    def found(self, findings: Findings) -> None:
        """Called with all outcomes so far, each time there is a new one."""
