"""Worker processes that decode photos: how they start, and an error when one dies."""

import gc
import multiprocessing
import signal
import sys
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.context import BaseContext

from listwise.errors import InputError


def start_worker(worker: int = 0) -> None:
    """Set up a worker process: it uses one core, and ignores Ctrl-C."""
    gc.freeze()  # a search for garbage would copy the memory that it shares with its parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)


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
    except (RuntimeError, ConnectionError, EOFError) as error:
        # If it dies while a batch is read from it, the connection breaks too.
        lost = isinstance(error, BrokenProcessPool) or "DataLoader worker" in str(error)
        if isinstance(error, RuntimeError) and not lost:
            raise
        raise InputError(
            "the system ended a worker process, usually because memory or shared memory "
            "(docker run --shm-size) ran out: use fewer `workers`"
        ) from error
