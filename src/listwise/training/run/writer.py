"""Write the files of a run in a thread, while training continues."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

# Tasks that may wait; each holds a copy of what it writes.
WAITING = 4


class FileWriter:
    """Runs tasks that write files one after the other, in a thread.

    A task must not use tensors that training changes: give it copies. After an error, no later
    task runs.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._tasks: deque[Future[object]] = deque()

    def submit(self, task: Callable[[], object]) -> None:
        """Run a task after all earlier ones; raise the error of an earlier one that failed."""
        while self._tasks and (self._tasks[0].done() or len(self._tasks) >= WAITING):
            self._tasks.popleft().result()
        self._thread = self._thread or ThreadPoolExecutor(1, "files")
        earlier = self._tasks[-1] if self._tasks else None
        self._tasks.append(self._thread.submit(_run, task, earlier))

    def close(self) -> None:
        """Wait until all files are written; raise the error of a task that failed."""
        try:
            while self._tasks:
                self._tasks.popleft().result()
        finally:
            self._tasks.clear()
            if self._thread is not None:
                self._thread.shutdown()
            self._thread = None


def _run(task: Callable[[], object], earlier: Future[object] | None) -> object:
    if earlier is not None:
        earlier.result()
    return task()
