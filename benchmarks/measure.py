"""Measure the time and peak memory of calls, each in a separate process."""

import gc
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from listwise.data.workers import worker_context

T = TypeVar("T")
Call = Callable[[], object]

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Measurement:
    """Seconds of the fastest of a few calls, the peak memory it added, and its result."""

    seconds: float
    extra_bytes: int
    result: Any = None


class DoesNotFit(Exception):
    """The call needs more memory than is available."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"does not fit in {limit / 1e9:.0f} GB")


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds that a call takes, and its result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def unit_rows(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Divide the rows [n, C] by their lengths, in place."""
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows


def percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the 50th and the 99th percentile, in milliseconds."""
    p50, p99 = (float(1000 * np.percentile(seconds, p)) for p in (50, 99))
    return p50, p99


def run_alone(function: Callable[..., T], *arguments: object) -> T:
    """Call an importable function in a new process, with picklable arguments."""
    # Not a fork of this process: its threads and memory must not be part of the measurement.
    with ProcessPoolExecutor(1, mp_context=worker_context()) as pool:
        return pool.submit(function, *arguments).result()


def measure(
    make_call: Callable[..., Call], *arguments: object, memory_limit: int | None = None
) -> Measurement:
    """Run `make_call(*arguments)()` in a new process under a memory limit, and measure it.

    Args:
        make_call: a function that can be imported by name.
        *arguments: its arguments, which must be picklable.
        memory_limit: in bytes; 90 % of the free memory by default.

    Raises:
        DoesNotFit: the call reached the limit. Errors of the call are raised as they are.
    """
    limit = int(available_memory() * 0.9) if memory_limit is None else memory_limit
    try:
        return run_alone(_measure_here, make_call, arguments, limit)
    except (
        MemoryError,
        BrokenProcessPool,
    ) as error:  # the system kills processes that use too much memory
        raise DoesNotFit(limit) from error


def _measure_here(make_call: Callable[..., Call], arguments: Any, limit: int) -> Measurement:
    call = make_call(*arguments)
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    gc.collect()
    before = _memory("VmRSS")
    if _STATUS.exists():
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    try:
        seconds, result = timed(call)
        extra = max(0, _memory("VmHWM") - before)
        # The first run includes page faults and thread pools, so repeat short calls.
        for _ in range(3 if seconds < 5 else 1 if seconds < 20 else 0):
            again, result = timed(call)
            seconds = min(seconds, again)
    except (MemoryError, RuntimeError) as error:
        # PyTorch has no separate error for this on the CPU.
        lacks_memory = "allocate memory" in str(error) or "out of memory" in str(error)
        if lacks_memory or isinstance(error, MemoryError):
            raise MemoryError from None
        raise
    return Measurement(seconds, extra, result)


def _memory(field: str) -> int:
    """Return the bytes of this process: now (VmRSS), or the peak (VmHWM; always outside Linux)."""
    if _STATUS.exists():
        lines = _STATUS.read_text().splitlines()
        return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024
    import resource  # missing on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def anonymous_bytes() -> int:
    """Memory of this process without the pages of mapped files (with them outside Linux)."""
    return _memory("RssAnon" if _STATUS.exists() else "VmRSS")


def available_memory() -> int:
    """Return the bytes of memory that are available to a process."""
    import torch

    # Imported here, because the measured processes do not need training.
    from listwise.training.forward import free_bytes

    return free_bytes(torch.device("cpu"))


def describe_machine() -> str:
    """Describe this machine in a few words, with its GPU if it has one."""
    import torch

    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (named := re.search("model name.*: (.*)", cpuinfo.read_text())):
        processor = named[1].strip()
    if torch.cuda.is_available():
        processor = f"{torch.cuda.get_device_name()}; {processor}"
    return (
        f"{processor}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )
