"""A bounded queue for each kind of work, which passes waiting jobs to a thread in batches."""

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi import HTTPException, Request

from listwise.serving.server import Limits

# Weight of the latest batch in the mean time per unit of cost.
LATEST = 0.5
# A job is refused if its expected time exceeds this share of the time limit, because the
# estimate may be too low.
PATIENCE = 0.8
# Maximum time in seconds after which a refused client should try again.
LONGEST_PAUSE = 10.0
CLIENT_GONE = 499

Given = TypeVar("Given")
Result = TypeVar("Result")


class BusyError(HTTPException):
    """The answer is not ready in time, or would not be."""


@dataclass(eq=False)
class _Job(Generic[Given, Result]):
    given: Given
    size: int
    cost: float
    owner: str
    answer: "asyncio.Future[Result]"


class WorkQueue(Generic[Given, Result]):
    """Passes jobs to `work` in a thread, which gets all waiting jobs together up to `size`.

    A job never waits for a batch to fill. Owners, the addresses of clients, take turns, so that an
    owner with many jobs does not delay the others. If `work` fails on several jobs, each of them is
    tried alone; an exception in the place of a result is raised to the client of that job. The
    thread starts with the first job. All methods but `close` are called in the event loop.

    Args:
        work: returns a result or an exception for each job of a batch.
        limits: more than `waiting` jobs are refused, and jobs that would wait longer than
            `seconds`, by an estimate from earlier batches.
        size: maximum sum of the sizes in a batch; a larger job is a batch alone.
        on_batch: called with the size of each batch.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Given]], Sequence[Result | Exception]],
        limits: Limits,
        *,
        size: int = 1,
        on_batch: Callable[[int], object] = lambda size: None,
    ) -> None:
        self._work = work
        self._limits = limits
        self._size = size
        self._on_batch = on_batch
        self._thread = ThreadPoolExecutor(1)
        self._task: asyncio.Task[None] | None = None
        self._waiting: list[_Job[Given, Result]] = []
        self._running: list[_Job[Given, Result]] = []
        self._started = 0.0
        self._seconds_per_cost = 0.0

    def __len__(self) -> int:
        """Number of waiting jobs."""
        return len(self._waiting)

    def check_room(self, owner: str, cost: float = 0.0) -> None:
        """Raise a `BusyError` if a job of this owner would be refused now."""
        # An idle thread takes a job immediately, so this job does not wait.
        full = len(self._waiting) >= self._limits.waiting + (not self._running)
        seconds = self._expected_seconds(owner, cost) if self._running or self._waiting else 0.0
        if full or seconds > PATIENCE * self._limits.seconds:
            # If all refused clients came back together, most would be refused again.
            longest = min(seconds, LONGEST_PAUSE)
            pause = max(1, math.ceil(random.uniform(longest / 4, longest)))
            when = "a second" if pause == 1 else f"{pause} seconds"
            reason = f"the server is busy: try again in {when}"
            raise BusyError(503, reason, {"Retry-After": str(pause)})

    def _expected_seconds(self, owner: str, cost: float) -> float:
        """Time until a new job is done, from the time that earlier batches took."""
        costs = {owner: cost}
        for job in self._waiting:
            costs[job.owner] = costs.get(job.owner, 0.0) + job.cost
        # Owners take turns: a job waits for its owner's jobs, and for as many of each other owner.
        waiting = sum(min(each, costs[owner]) for each in costs.values())
        running = sum(job.cost for job in self._running) * self._seconds_per_cost
        elapsed = time.monotonic() - self._started if self._running else 0.0
        return max(0.0, running - elapsed) + waiting * self._seconds_per_cost

    async def run(
        self,
        given: Given,
        request: Request,
        *,
        until: float | None = None,
        size: int = 1,
        cost: float = 1.0,
        finish: bool = False,
    ) -> Result:
        """Wait for the result of a job; it is removed from the queue if nobody waits for it.

        Args:
            given: what `work` gets.
            request: the job ends when its client disconnects.
            until: time of `time.monotonic` after which a `BusyError` is raised; by default after
                the time limit.
            size: counts against the size of a batch.
            cost: expected work, in any unit.
            finish: wait for a job that has begun in any case.

        Raises:
            BusyError: too many jobs wait, or the result is or would be too late.
        """
        owner = address_of(request)
        self.check_room(owner, cost)
        loop = asyncio.get_running_loop()
        job = _Job[Given, Result](given, size, cost, owner, loop.create_future())
        self._waiting.append(job)
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._work_off())
        leaving = loop.create_task(_disconnected(request))
        either: set[asyncio.Future[Any]] = {job.answer, leaving}
        try:
            seconds = self._limits.seconds if until is None else until - time.monotonic()
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if job.answer.done() or (finish and job not in self._waiting):
                return await job.answer
            if leaving.done():
                raise HTTPException(CLIENT_GONE, "the client has disconnected")
            raise BusyError(504, f"the request took longer than {self._limits.seconds:g} s")
        finally:
            leaving.cancel()
            job.answer.cancel()
            if job in self._waiting:
                self._waiting.remove(job)

    def close(self) -> None:
        """Wait for the running batch, and end the thread."""
        # The interpreter may crash if it exits while a network runs.
        self._thread.shutdown(cancel_futures=True)

    async def _work_off(self) -> None:
        while self._waiting:
            self._running = self._next_batch()
            self._started = time.monotonic()
            self._on_batch(sum(job.size for job in self._running))
            await self._answer(self._running)
            cost = sum(job.cost for job in self._running)
            latest = (time.monotonic() - self._started) / cost if cost else 0.0
            before = self._seconds_per_cost or latest
            self._seconds_per_cost = before + LATEST * (latest - before)
            self._running = []

    def _next_batch(self) -> list[_Job[Given, Result]]:
        batch: list[_Job[Given, Result]] = []
        room = self._size
        while self._waiting and (not batch or self._waiting[0].size <= room):
            job = self._waiting.pop(0)
            room -= job.size
            batch.append(job)
            # The other jobs of this owner come after those of all others.
            own = [each for each in self._waiting if each.owner == job.owner]
            self._waiting = [each for each in self._waiting if each.owner != job.owner] + own
        return batch

    async def _answer(self, batch: Sequence[_Job[Given, Result]]) -> None:
        loop, given = asyncio.get_running_loop(), [job.given for job in batch]
        try:
            answers = await loop.run_in_executor(self._thread, self._work, given)
        except Exception as error:
            if len(batch) > 1:
                for job in batch:
                    await self._answer([job])
                return
            answers = [error]
        for job, answer in zip(batch, answers, strict=True):
            if job.answer.done():  # nobody waits for it any more
                continue
            if isinstance(answer, Exception):
                job.answer.set_exception(answer)
            else:
                job.answer.set_result(answer)


def call_each(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """The work of a queue of functions."""
    return [function() for function in functions]


def address_of(request: Request) -> str:
    """The address of the sender of a request."""
    return request.client.host if request.client else ""


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
