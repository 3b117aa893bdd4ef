"""Worker processes that decode photos: how they start, and an error when one dies."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from typing import Any, TypeVar

import torch
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from listwise.data import images
from listwise.errors import InputError
from listwise.machine import submit_ahead

AHEAD = 3  # items of each worker that are processed or waiting

Item = TypeVar("Item")
Result = TypeVar("Result")
_function: Callable[[Any], Any]  # of a worker process


def map_in_processes(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int,
    weight: Callable[[Item], int] = lambda item: 1,
) -> Generator[Result, None, None]:
    """Yield `function(item)` for each item, in order, computed by worker processes.

    Items are taken a little ahead; a large one may have the `weight` of several. The processes
    start in this call, and end when the generator is closed.
    """
    setup = function, multiprocessing.Lock()
    pool = ProcessPoolExecutor(workers, initializer=_start_with, initargs=setup)
    # The first task forks all of them. A thread that reads the results would fork beside this one,
    # and the processes would inherit locks that this one holds meanwhile.
    pool.submit(int)
    return _results(pool, submit_ahead(pool, _run, items, AHEAD * workers, weight))


def _results(pool: ProcessPoolExecutor, results: Iterator[Result]) -> Generator[Result, None, None]:
    try:
        yield from results
    finally:
        pool.shutdown(cancel_futures=True)


def _start_with(function: Callable[[Any], Any], one_large: AbstractContextManager[Any]) -> None:
    global _function
    start_worker(one_large)
    _function = function


def _run(item: Any) -> Any:
    return _function(item)


def start_worker(one_large: AbstractContextManager[Any] | None = None) -> None:
    """Set up a worker process: it uses one core, ignores Ctrl-C, and ends with its parent.

    Workers with the same lock `one_large` decode large photos one at a time.
    """
    # Another one than the lock of the parent, which a thread may have held as it forked.
    images.one_large = one_large or threading.Lock()
    gc.freeze()  # a search for garbage would copy the memory that it shares with its parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threadpool_limits(1)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent has been killed; it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def worker_context() -> BaseContext:
    """Return a context that starts processes which share no memory with this one.

    A fork of this process would inherit the locks that its threads hold.
    """
    return multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")


@contextmanager
def explain_lost_workers() -> Iterator[None]:
    """Raise an `InputError` with the usual causes when a worker process has died."""
    try:
        yield
    except BrokenProcessPool as error:
        raise InputError(
            "the system ended a worker process, usually because memory ran out: use fewer `workers`"
        ) from error
