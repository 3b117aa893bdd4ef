"""Worker processes that run a function on many tasks, with results in order."""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, Self, TypeVar

from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from listwise.data.workers import start_worker, worker_context
from listwise.machine import core_count

Task = TypeVar("Task")
Result = TypeVar("Result")


class Workers:
    """Worker processes that start with the first task and end with the `with` block.

    They are started once: importing what they need takes seconds.

    Args:
        count: number of processes; one per core by default, 0 uses this process.
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = core_count() if count is None else count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def results(
        self, function: Callable[[Task], Result], tasks: Iterable[Task]
    ) -> Generator[Result, None, None]:
        """Yield the result of each task, in order; `function` is one of a module."""
        if self.count == 0:
            with threadpool_limits(1):
                yield from map(function, tasks)
            return
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self.count, mp_context=worker_context(), initializer=_start
            )
        ahead: deque[Future[Any]] = deque()
        try:
            for task in tasks:
                ahead.append(self._pool.submit(function, task))
                if len(ahead) > 4 * self.count:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


def _start() -> None:
    start_worker()
    threadpool_limits(1)  # a worker has one core
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when the main process was killed: it would wait for tasks forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
