"""A bounded queue whose worker takes everything that waits, up to a size, in one batch."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

CLOSE_SECONDS = 30.0

Given = TypeVar("Given")
Result = TypeVar("Result")


class QueueFullError(Exception):
    """As many wait as may."""


class TooLateError(Exception):
    """The time for an answer is over."""


class ClientGoneError(Exception):
    """Nobody waits for the answer."""


@dataclass(eq=False)
class Job(Generic[Given, Result]):
    """Something to do, and what comes of it; `size` is how much of a batch it takes."""

    given: Given
    size: int
    future: "Future[Result]" = field(default_factory=Future)


class Batcher(Generic[Given, Result]):
    """Gives what is submitted to `work`, several at a time while others are being worked on.

    Nobody waits for a batch to fill: what is alone is taken alone. If work on several fails, each
    of them is tried alone; an exception in place of an answer is raised to who asked. More than
    `waiting` are refused. A batch has at most `size`, as the sum of the sizes, or is a single one.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Given]], Sequence[Result | Exception]],
        *,
        waiting: int,
        size: int = 1,
        on_batch: Callable[[int], object] = lambda size: None,
    ) -> None:
        self._work = work
        self._limit = waiting
        self._size = size
        self._on_batch = on_batch
        self._waiting: deque[Job[Given, Result]] = deque()
        self._changed = threading.Condition()
        self._idle = True
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def submit(self, given: Given, size: int = 1) -> Job[Given, Result]:
        """Queue something; it is answered through the job's future."""
        job: Job[Given, Result] = Job(given, size)
        with self._changed:
            # What an idle worker is about to take does not wait.
            if self._closed or len(self._waiting) >= self._limit + self._idle:
                raise QueueFullError
            self._waiting.append(job)
            self._changed.notify()
        return job

    def withdraw(self, job: Job[Given, Result]) -> bool:
        """Take a job out of the queue again; False if work on it has begun."""
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
                job.future.cancel()
                return True
        return False

    async def result(
        self,
        job: Job[Given, Result],
        until: float,
        gone: Callable[[], Coroutine[Any, Any, None]],
        finish: bool = False,
    ) -> Result:
        """Wait for an answer until a time of `time.monotonic`, or until the client has gone.

        With `finish`, what has been begun is waited for in any case.
        """
        answer = asyncio.wrap_future(job.future)
        leaving = asyncio.create_task(gone())
        try:
            either: set[asyncio.Future[Any]] = {answer, leaving}
            await asyncio.wait(
                either,
                timeout=max(0.0, until - time.monotonic()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if answer.done() or (finish and not self.withdraw(job)):
                return await answer
            raise ClientGoneError if leaving.done() else TooLateError
        finally:
            leaving.cancel()
            self.withdraw(job)
            answer.cancel()

    def close(self) -> None:
        """Take no more, let those that wait go without an answer, and wait for the work to end."""
        with self._changed:
            self._closed = True
            for job in self._waiting:
                job.future.cancel()
            self._waiting.clear()
            self._changed.notify()
        # An interpreter that ends under a running network may crash.
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (batch := self._take()) or not self._closed:
            self._on_batch(sum(job.size for job in batch))
            self._answer(batch)

    def _take(self) -> list[Job[Given, Result]]:
        with self._changed:
            self._idle = True
            while not self._waiting and not self._closed:
                self._changed.wait()
            self._idle = False
            batch: list[Job[Given, Result]] = []
            room = self._size
            while self._waiting and (not batch or self._waiting[0].size <= room):
                job = self._waiting.popleft()
                if job.future.set_running_or_notify_cancel():
                    room -= job.size
                    batch.append(job)
            return batch

    def _answer(self, batch: list[Job[Given, Result]]) -> None:
        try:
            answers = self._work([job.given for job in batch])
        except Exception as error:
            if len(batch) == 1:
                batch[0].future.set_exception(error)
                return
            for job in batch:
                self._answer([job])
            return
        for job, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Exception):
                job.future.set_exception(answer)
            else:
                job.future.set_result(answer)
