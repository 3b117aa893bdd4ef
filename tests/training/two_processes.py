"""Run a function in two processes that train together on the CPU."""

import gc
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def in_two_processes(work: Callable[..., Any], folder: Path, *arguments: object) -> list[Any]:
    """What `work(rank, *arguments)` returns in each process."""
    given = (work, str(folder), arguments)
    mp.start_processes(_start, given, nprocs=2, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def _start(rank: int, work: Callable[..., Any], folder: str, arguments: tuple[Any, ...]) -> None:
    gc.freeze()  # as in programs.py
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    torch.save(work(rank, *arguments), f"{folder}/{rank}.pt")
    dist.destroy_process_group()
