"""Processes that decode photos: how they start, and what it means when one is lost."""

import signal
import sys
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from listwise.errors import InputError


def start_worker(worker: int = 0) -> None:
    """Set up a worker process: it has one core, and leaves Ctrl-C to the main process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)


@contextmanager
def explain_lost_workers() -> Iterator[None]:
    """Raise an `InputError` that explains it when a worker process is gone."""
    try:
        yield
    except (RuntimeError, ConnectionError, EOFError) as error:
        # It may go while a batch is fetched from it, and the connection with it.
        lost = isinstance(error, BrokenProcessPool) or "DataLoader worker" in str(error)
        if isinstance(error, RuntimeError) and not lost:
            raise
        raise InputError(
            "a worker process was ended by the system, mostly for lack of memory or of "
            "shared memory (docker run --shm-size): use fewer `workers`"
        ) from error
