"""Detect the cores and GPUs of this machine, and keep its cores busy."""

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from listwise.errors import InputError

if TYPE_CHECKING:
    import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Machine:
    """A device to compute on, the number of cores for this process, and bfloat16 support."""

    device: str
    cores: int
    bfloat16: bool

    @staticmethod
    def detect(device: str = "auto") -> "Machine":
        """Detect this machine; `device` is "auto", "cpu", "cuda" or "cuda:1"."""
        import torch

        gpus = torch.cuda.device_count()
        if device == "auto":
            device = "cuda" if gpus else "cpu"
        try:
            named = torch.device(device)
        except RuntimeError:
            named = torch.device("meta")
        if named.type not in ("cpu", "cuda"):
            raise InputError(f"`device` {device!r} is not supported: give cpu, cuda or cuda:1")
        gpu = named.type == "cuda"
        if gpu and (named.index or 0) >= gpus:
            raise InputError(f"`device` {device!r} does not exist: PyTorch finds {gpus} GPU(s)")
        return Machine(device, core_count(), gpu and torch.cuda.is_bf16_supported())

    def workers(self) -> int:
        """Return the number of processes to decode photos with.

        Without a GPU, the network itself needs the cores, and decoding is cheap in comparison.
        """
        gpu = self.device.startswith("cuda")
        return max(1, self.cores - 1) if gpu else min(2, self.cores)


def core_count() -> int:
    """Return the number of cores that this process may use.

    The number is limited by the affinity of the process and by the CPU quota of its container, and
    divided among the processes that torchrun started on this machine.
    """
    cores = _affinity()
    quota = cpu_quota()
    if quota is not None:
        cores = min(cores, math.ceil(quota))
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_quota(root: str | Path = "/") -> float | None:
    """Return the CPU quota of this process's control group in cores (`docker run --cpus`), or None.

    `root` is the folder that contains `proc` and `sys`.
    """
    root = Path(root)
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Version 2 has one tree for all controllers, version 1 has one for each.
        top = root / "sys/fs/cgroup" / (controllers and "cpu")
        folder = top / path.lstrip("/")
        # The limits of a group and of all groups above it; a container may see only the top.
        for group in {top, folder, *(each for each in folder.parents if top in each.parents)}:
            quotas += _group_quota(group)
    return min(quotas, default=None)


def _group_quota(group: Path) -> list[float]:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text()
    except (OSError, ValueError):
        return []
    return [] if quota in ("max", "-1") else [int(quota) / int(period)]


def set_torch_environment() -> None:
    """Set environment variables for PyTorch on the CPU, here and in child processes.

    Waiting OpenMP threads sleep instead of spin: on a busy machine, spinning threads take cores
    from the threads they wait for, and a network may take ten times as long.

    Only the program `listwise` calls this, before PyTorch is imported; functions of the library
    never do. Variables that the user has set are kept.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if core_count() < _affinity():
        os.environ.setdefault("OMP_NUM_THREADS", str(core_count()))


@contextmanager
def shared_cores() -> Iterator[None]:
    """Inside this context PyTorch uses at most one thread per core of this process.

    PyTorch itself does not know the CPU quota of a container.
    """
    import torch

    before = torch.get_num_threads()
    if before <= core_count():
        yield
        return
    torch.set_num_threads(core_count())
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def seeded(
    seed: int, device: "torch.device", state: "Sequence[torch.Tensor]" = ()
) -> Iterator[None]:
    """Inside this context PyTorch's random numbers, on the CPU and a device, start from a seed.

    They start from a state instead if there is one: that of the CPU, and of a GPU. After the
    context they continue as before it.
    """
    import torch

    gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if gpu else []):
        torch.default_generator.manual_seed(seed)
        if gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        if state:
            torch.set_rng_state(state[0])
        if gpu and len(state) > 1:
            torch.cuda.set_rng_state(state[1], device)
        yield


def submit_ahead(
    pool: Executor,
    function: Callable[[Item], Result],
    items: Iterable[Item],
    ahead: int,
    weight: Callable[[Item], int] = lambda item: 1,
) -> Iterator[Result]:
    """Yield `function(item)` for each item, in order; a pool computes that many results ahead.

    A large item may have the `weight` of several, so that those in work do not fill the memory.
    """
    stream = iter(items)
    waiting = deque[tuple[Future[Result], int]]()

    def submit_next() -> bool:
        for item in islice(stream, 1):  # no name keeps an item or a result: they may be large
            waiting.append((pool.submit(function, item), weight(item)))
            return True
        return False

    try:
        while True:
            while sum(each for _, each in waiting) <= ahead and submit_next():
                pass
            if not waiting:
                return
            yield waiting.popleft()[0].result()
    finally:
        for future, _ in waiting:
            future.cancel()


def drain(items: deque[Item]) -> Iterator[Item]:
    """Yield the items, and forget each one that was used: a file with its content is large."""
    while items:
        yield items.popleft()
