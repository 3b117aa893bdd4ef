"""What this machine has to compute with: cores, GPUs, precision; and how to share its cores."""

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from listwise.errors import InputError


@dataclass(frozen=True)
class Machine:
    """What there is to compute with; `cores` are this process's share of them."""

    device: str
    cores: int
    bfloat16: bool

    @staticmethod
    def detect(device: str = "auto") -> "Machine":
        """The machine this runs on."""
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
        """Processes to decode photos with.

        Without a GPU the network itself needs the cores, and crops are cheap beside it.
        """
        gpu = self.device.startswith("cuda")
        return max(1, self.cores - 1) if gpu else min(2, self.cores)


def core_count() -> int:
    """Cores that this process may use.

    They are limited by its affinity and by the CPU quota of its container, and shared with the
    other processes that torchrun started on this machine.
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
    """The CPU quota of this process's control group in cores (`docker run --cpus`), if it has one.

    `root` is the folder in which `proc` and `sys` are.
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
        # Version 2 has one tree for all controllers, version 1 a tree for each.
        top = root / "sys/fs/cgroup" / (controllers and "cpu")
        folder = top / path.lstrip("/")
        # A group's own limit and those of the groups above it; in a container it may see only top.
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


def set_thread_environment() -> None:
    """Let the OpenMP threads of this process and its children sleep while they wait.

    By default they spin. On a machine with other work to do, threads that spin take the cores from
    those they wait for, and a network may take ten times as long. This must be called before
    PyTorch is imported, and changes the whole process: it is for programs, not for libraries, which
    use `shared_cores`. What the user has set stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if core_count() < _affinity():
        os.environ.setdefault("OMP_NUM_THREADS", str(core_count()))


@contextmanager
def shared_cores() -> Iterator[None]:
    """Compute on the CPU with PyTorch so that other work on this machine does not stop it.

    No more threads than cores are used, and waiting threads sleep soon. It works on PyTorch with
    GNU OpenMP, which lets threads spin only as long as a process has no more of them than there
    are cores: a thread that sleeps and has its own team of threads makes them more.
    """
    import torch

    before = torch.get_num_threads()
    threads = min(before, core_count())
    if threads != before:
        torch.set_num_threads(threads)
    done = threading.Event()
    try:
        if threads > 1 and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
            started = threading.Event()
            thread = threading.Thread(
                target=_hold_team, args=(threads, started, done), name="team", daemon=True
            )
            thread.start()
            started.wait()
        yield
    finally:
        done.set()
        if threads != before:
            torch.set_num_threads(before)


def _hold_team(threads: int, started: threading.Event, done: threading.Event) -> None:
    """Start a team of OpenMP threads, and keep it until `done`."""
    import torch

    try:
        # Large enough that every thread has a part.
        torch.zeros(threads << 16, dtype=torch.uint8).add_(1)
    finally:
        started.set()
    done.wait()
