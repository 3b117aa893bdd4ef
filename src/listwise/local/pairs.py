"""Spatial verification of many pairs of photos, on all cores.

Worker processes import this module, so it imports little.
"""

import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path

from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from listwise.data.workers import explain_lost_workers, worker_context
from listwise.local.storage import FeatureFile
from listwise.local.verification import Verification, verifier_for

Pair = tuple[int, int]
"""Positions of a query and of an image of the database."""

_PAIRS = 32  # pairs per task of a worker


@explain_lost_workers()
def verify_pairs(
    queries: FeatureFile,
    database: FeatureFile,
    pairs: Iterable[Pair],
    workers: int = 0,
    on_pair: Callable[[int], object] = lambda count: None,
) -> dict[Pair, Verification]:
    """Verify pairs of photos, each pair once.

    Args:
        queries: features of the queries.
        database: features of the database, by the same extractor.
        pairs: positions (query, image); duplicates are verified once.
        workers: number of processes; 0 uses this process.
        on_pair: called with the number of pairs just verified.
    """
    database.require(queries.header.extractor)
    wanted = sorted(set(pairs))
    parts = [wanted[start : start + _PAIRS] for start in range(0, len(wanted), _PAIRS)]
    found: dict[Pair, Verification] = {}

    def keep(part: list[Pair], verified: list[Verification]) -> None:
        found.update(zip(part, verified, strict=True))
        on_pair(len(part))

    if workers == 0 or len(parts) < 2:
        for part in parts:
            keep(part, _verify(queries, database, part))
        return found
    count = min(workers, len(parts))
    with ProcessPoolExecutor(
        count,
        mp_context=worker_context(),
        initializer=_open_files,
        initargs=(queries.path, database.path),
    ) as pool:
        tasks = [pool.submit(_verify_opened, part) for part in parts]
        try:
            for part, task in zip(parts, tasks, strict=True):
                keep(part, task.result())
        finally:
            pool.shutdown(cancel_futures=True)
    return found


def _verify(queries: FeatureFile, database: FeatureFile, pairs: list[Pair]) -> list[Verification]:
    compare = verifier_for(database.header.extractor)
    read = lru_cache(maxsize=1)(queries.read)
    return [compare(read(query), database.read(image)) for query, image in pairs]


_opened: list[FeatureFile] = []
"""The feature files of queries and database that a worker process has open."""


def _open_files(*paths: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C
    threadpool_limits(1)  # a worker has one core
    _opened.extend(FeatureFile.open(path) for path in paths)


def _verify_opened(pairs: list[Pair]) -> list[Verification]:
    queries, database = _opened
    return _verify(queries, database, pairs)
