"""Worker processes that run a function on many tasks, and verify many pairs of photos.

Worker processes import this module, so it imports little.
"""

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import lru_cache, partial
from typing import Self, TypeVar

from listwise.data.workers import explain_lost_workers, start_worker, worker_context
from listwise.local.storage import FeatureFile
from listwise.local.verification import Verification, verifier_for
from listwise.machine import core_count, submit_ahead

Task = TypeVar("Task")
Result = TypeVar("Result")
Pair = tuple[int, int]
"""Positions of a query and of an image of the database."""

_PAIRS = 32  # pairs per task of a worker


class Workers:
    """Worker processes that start with the first task and end with the `with` block.

    They are started once: importing what they need takes seconds.

    Args:
        count: number of processes; one per core by default, 0 uses this process.
    """

    def __init__(self, count: int | None = None) -> None:
        self.count = core_count() if count is None else count
        self._pool = None
        if self.count:
            self._pool = ProcessPoolExecutor(self.count, worker_context(), start_worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def results(
        self, function: Callable[[Task], Result], tasks: Iterable[Task]
    ) -> Generator[Result, None, None]:
        """Yield the result of each task, in order; `function` is one of a module."""
        if self._pool is None:
            yield from map(function, tasks)
        else:
            yield from submit_ahead(self._pool, function, tasks, 4 * self.count)


@explain_lost_workers()
def verify_pairs(
    queries: FeatureFile,
    database: FeatureFile,
    pairs: Iterable[Pair],
    workers: int | None = None,
    on_pair: Callable[[int], object] = lambda count: None,
) -> dict[Pair, Verification]:
    """Verify pairs of photos, each pair once.

    Args:
        queries: features of the queries.
        database: features of the database, by the same extractor.
        pairs: positions (query, image); duplicates are verified once.
        workers: number of processes; one per core by default, 0 uses this process.
        on_pair: called with the number of pairs just verified.
    """
    database.require(queries.header.extractor)
    wanted = sorted(set(pairs))
    parts = [wanted[start : start + _PAIRS] for start in range(0, len(wanted), _PAIRS)]
    verify = partial(_verify, queries, database)
    found: dict[Pair, Verification] = {}
    with (
        Workers(workers if len(parts) > 1 else 0) as processes,
        closing(processes.results(verify, parts)) as results,
    ):
        for part, verified in zip(parts, results, strict=True):
            found.update(zip(part, verified, strict=True))
            on_pair(len(part))
    return found


def _verify(queries: FeatureFile, database: FeatureFile, pairs: list[Pair]) -> list[Verification]:
    compare = verifier_for(database.header.extractor)
    read = lru_cache(maxsize=1)(queries.read)
    return [compare(read(query), database.read(image)) for query, image in pairs]
