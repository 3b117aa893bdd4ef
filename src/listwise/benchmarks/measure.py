"""Time and peak memory of a call, each in a process of its own."""

import gc
import multiprocessing
import platform
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Call = Callable[[], object]


@dataclass(frozen=True)
class Measurement:
    """Seconds of the fastest of a few runs, and the most memory the call added, in bytes."""

    seconds: float
    extra_bytes: int


class DoesNotFit(Exception):
    """The call needs more memory than it was allowed."""


def measure(make_call: Callable[..., Call], *arguments: object, memory_limit: int) -> Measurement:
    """Run `make_call(*arguments)()` in a fresh process under a memory limit, and measure it.

    Args:
        make_call: prepares inputs and returns the call to measure; importable by name.
        arguments: what it is given; picklable.
        memory_limit: bytes the process may hold.

    Raises:
        DoesNotFit: if the call hit the limit.
        RuntimeError: if it raised anything else; the message names that.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, make_call, arguments, memory_limit))
    process.start()
    sender.close()
    try:
        answer = receiver.recv()
    except EOFError:
        answer = "killed"  # by the system, for memory
    process.join()
    if isinstance(answer, Measurement):
        return answer
    if answer in ("memory", "killed"):
        raise DoesNotFit
    raise RuntimeError(answer)


def _child(sender: Any, make_call: Callable[..., Call], arguments: Any, limit: int) -> None:
    try:
        call = make_call(*arguments)
        if sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        sender.send(_measure_here(call))
    except MemoryError:
        sender.send("memory")
    except Exception as error:
        out_of_memory = "allocate memory" in str(error) or "out of memory" in str(error)
        sender.send("memory" if out_of_memory else repr(error))


def _measure_here(call: Call) -> Measurement:
    gc.collect()
    before = _memory_now()
    _forget_peak()
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    extra = max(0, _memory_peak() - before)
    # A first run also pays for pages and thread pools: repeat what is quick.
    for _ in range(3 if seconds < 5 else 1 if seconds < 20 else 0):
        start = time.perf_counter()
        call()
        seconds = min(seconds, time.perf_counter() - start)
    return Measurement(seconds, extra)


def _memory_now() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        return _status_bytes(status, "VmRSS")
    return _memory_peak()


def _memory_peak() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        return _status_bytes(status, "VmHWM")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _forget_peak() -> None:
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def _status_bytes(status: Path, field: str) -> int:
    for line in status.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{status} has no {field}")


def available_memory() -> int:
    """Bytes of memory this machine could give a process now."""
    import torch

    # Not above: the processes that are measured need nothing of training.
    from listwise.training.memory import free_bytes

    return free_bytes(torch.device("cpu"))


def machine(device: str = "cpu") -> str:
    """This machine in a few words, with its GPU if that is the device or "auto" finds one."""
    import torch

    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        processor = f"{torch.cuda.get_device_name()}; {processor}"
    return (
        f"{processor}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )
