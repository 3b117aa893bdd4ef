"""A bounded queue whose worker thread takes waiting jobs in batches."""

import asyncio
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from listwise.serving.settings import Limits

CLOSE_SECONDS = 30.0
# Weight of the latest batch in the mean time per unit of cost.
LATEST = 0.5
# A job is refused if its expected time exceeds this share of the time limit, because the
# estimate may be too low.
PATIENCE = 0.8
# Maximum number of owners whose last turn is remembered.
OWNERS = 1000
# Maximum time in seconds after which a refused client should try again.
LONGEST_PAUSE = 10.0

Given = TypeVar("Given")
Result = TypeVar("Result")


class QueueFullError(Exception):
    """The queue is full, or too long for an answer in time.

    `seconds` is the whole number of seconds after which the client should try again.
    """

    def __init__(self, seconds: float = 1.0) -> None:
        super().__init__()
        self.seconds = max(1, math.ceil(seconds))

    def __str__(self) -> str:
        when = "a second" if self.seconds == 1 else f"{self.seconds} seconds"
        return f"the server is busy: try again in {when}"


class TooLateError(Exception):
    """The answer was not ready in time."""


class ClientGoneError(Exception):
    """The client has disconnected."""


@dataclass(frozen=True)
class Client:
    """The sender of a request: its address, and a coroutine that returns when it disconnects."""

    address: str
    gone: Callable[[], Coroutine[Any, Any, None]]


@dataclass(eq=False)
class Job(Generic[Given, Result]):
    """Work in the queue of a `Batcher`.

    `size` counts against the size of a batch, `cost` is the expected work in any unit, and `owner`
    is the address of the client.
    """

    given: Given
    size: int
    cost: float
    owner: str
    future: "Future[Result]" = field(default_factory=Future)


class Batcher(Generic[Given, Result]):
    """Passes submitted jobs to `work`, which gets all waiting jobs together up to `size`.

    A job never waits for a batch to fill. Owners take turns, so that an owner with many jobs does
    not delay the others. If `work` fails on several jobs, each of them is tried alone; an exception
    in the place of a result is raised to the client of that job.

    Args:
        work: returns a result or an exception for each job of a batch.
        limits: more than `waiting` jobs are refused, and jobs that would wait longer than
            `seconds`, by an estimate from earlier batches.
        size: maximum sum of the sizes in a batch; a larger job is a batch alone.
        on_batch: called with the size of each batch.
        seconds_per_cost: estimated time per unit of cost, until the first batch is measured; 0 if
            it is unknown, then no job is refused for its time.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Given]], Sequence[Result | Exception]],
        limits: Limits,
        *,
        size: int = 1,
        on_batch: Callable[[int], object] = lambda size: None,
        seconds_per_cost: float = 0.0,
    ) -> None:
        self._work = work
        self._limit = limits.waiting
        self._patience = PATIENCE * limits.seconds
        self._size = size
        self._on_batch = on_batch
        self._waiting: deque[Job[Given, Result]] = deque()
        self._changed = threading.Condition()
        self._running: list[Job[Given, Result]] = []
        self._started = 0.0
        self._seconds_per_cost = seconds_per_cost
        self._seconds_per_job = 0.0
        self._next_room = 0.0
        self._turn = 0
        self._turns: dict[str, int] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Number of waiting jobs."""
        return len(self._waiting)

    def submit(
        self, given: Given, size: int = 1, cost: float = 1.0, owner: str = ""
    ) -> Job[Given, Result]:
        """Add a job to the queue; its future gets the result.

        Raises:
            QueueFullError: too many jobs wait, or the result would come too late.
        """
        job: Job[Given, Result] = Job(given, size, cost, owner)
        with self._changed:
            self._check_room(job.owner, job.cost)
            self._waiting.append(job)
            self._changed.notify()
        return job

    def check_room(self, owner: str) -> None:
        """Raise a `QueueFullError` if a job of this owner would be refused now."""
        with self._changed:
            self._check_room(owner, 0.0)

    def _check_room(self, owner: str, cost: float) -> None:
        # An idle worker takes a job immediately, so this job does not wait.
        idle = not self._running
        if self._closed or len(self._waiting) >= self._limit + idle:
            raise self._refusal()
        busy = self._running or self._waiting
        if busy and self._expected_seconds(owner, cost) > self._patience:
            raise self._refusal()

    def _refusal(self) -> QueueFullError:
        """The error for a refused job, with the time to try again.

        Each refused client gets a later time than the one before, by the time that a job takes.
        If they all came back after a second, they would be refused again and slow down the others.
        """
        now = time.monotonic()
        done = now + len(self._waiting) * self._seconds_per_job
        self._next_room = max(self._next_room, done) + self._seconds_per_job
        if self._next_room > now + LONGEST_PAUSE:
            self._next_room = now + LONGEST_PAUSE
            return QueueFullError(random.uniform(LONGEST_PAUSE / 2, LONGEST_PAUSE))
        return QueueFullError(self._next_room - now)

    def _expected_seconds(self, owner: str, cost: float) -> float:
        """Time until a new job is done, from the time that earlier batches took."""
        costs = {owner: 0.0}
        for job in self._waiting:
            costs[job.owner] = costs.get(job.owner, 0.0) + job.cost
        # Owners take turns: a job waits for its owner's jobs, and for as many of each other owner.
        own = costs[owner] + cost
        waiting = cost + sum(min(each, own) for each in costs.values())
        running = sum(job.cost for job in self._running) * self._seconds_per_cost
        elapsed = time.monotonic() - self._started if self._running else 0.0
        return max(0.0, running - elapsed) + waiting * self._seconds_per_cost

    def withdraw(self, job: Job[Given, Result]) -> bool:
        """Remove a job from the queue; False if work on it has begun."""
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
                job.future.cancel()
                return True
        return False

    async def result(
        self, job: Job[Given, Result], until: float, client: Client, finish: bool = False
    ) -> Result:
        """Wait for the result of a job.

        Args:
            job: from `submit`.
            until: time of `time.monotonic` after which a `TooLateError` is raised.
            client: a `ClientGoneError` is raised when it disconnects.
            finish: wait for a job that has begun in any case.
        """
        answer = asyncio.wrap_future(job.future)
        leaving = asyncio.create_task(client.gone())
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
        """Refuse new jobs, cancel the waiting ones, and wait for the running batch."""
        with self._changed:
            self._closed = True
            for job in self._waiting:
                job.future.cancel()
            self._waiting.clear()
            self._changed.notify()
        # The interpreter may crash if it exits while a network runs.
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (batch := self._take()) or not self._closed:
            self._on_batch(sum(job.size for job in batch))
            self._answer(batch)
            self._measure(batch)
            batch.clear()  # the thread keeps no photo in memory while it waits

    def _take(self) -> list[Job[Given, Result]]:
        with self._changed:
            self._running = []
            while not self._waiting and not self._closed:
                self._changed.wait()
            batch: list[Job[Given, Result]] = []
            room = self._size
            while self._waiting:
                # The oldest job of the owner whose last turn was longest ago.
                job = min(self._waiting, key=lambda job: self._turns.get(job.owner, 0))
                if batch and job.size > room:
                    break
                self._waiting.remove(job)
                if job.future.set_running_or_notify_cancel():
                    room -= job.size
                    batch.append(job)
                    self._turn += 1
                    self._turns[job.owner] = self._turn
            if len(self._turns) > OWNERS:
                self._turns.clear()
            self._running = list(batch)
            self._started = time.monotonic()
            return batch

    def _measure(self, batch: Sequence[Job[Given, Result]]) -> None:
        seconds = time.monotonic() - self._started
        cost = sum(job.cost for job in batch)
        if cost:
            self._seconds_per_cost = _mean(self._seconds_per_cost, seconds / cost)
        if batch:
            self._seconds_per_job = _mean(self._seconds_per_job, seconds / len(batch))

    def _answer(self, batch: Sequence[Job[Given, Result]]) -> None:
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


def _mean(before: float, latest: float) -> float:
    """A moving mean; `before` is 0 if nothing was measured."""
    return before + LATEST * (latest - before) if before else latest
