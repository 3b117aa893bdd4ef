"""Processes that decode photos: how they start, and what it means when one is lost."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from listwise.errors import InputError


def ignore_interrupts(worker: int) -> None:
    """For workers: Ctrl-C reaches them too, but it is the main process that ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def naming_lost_workers() -> Iterator[None]:
    """Say what it means that a decoding process is gone, wherever PyTorch notices it."""
    try:
        yield
    except (RuntimeError, ConnectionError, EOFError) as error:
        # It may go while a batch is fetched from it, and the connection with it.
        if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
            raise
        raise InputError(
            "a process that decodes photos was ended by the system, mostly for lack of memory or "
            "of shared memory (docker run --shm-size): use fewer `workers`"
        ) from error
