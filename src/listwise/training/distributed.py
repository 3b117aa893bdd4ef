"""Communication between the processes of one training step; with one process, none is needed."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


@contextmanager
def process_group() -> Iterator[bool]:
    """Join the other processes if `torchrun` started several; yield whether this is the first."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield True
        return
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    # The others wait while the first validates, which may take longer than the default timeout of
    # ten minutes.
    dist.init_process_group(backend, timeout=timedelta(hours=6))
    try:
        yield dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


def world() -> tuple[int, int]:
    """Return the rank of this process and the number of processes; (0, 1) if there is only one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gather_numbers(number: int, device: torch.device) -> list[int]:
    """Return the number that each process passed, in rank order."""
    own = torch.tensor([number], dtype=torch.int64, device=device)
    numbers: list[int] = gather_rows(own, [1] * world()[1]).tolist()
    return numbers


def gather_rows(rows: Tensor, parts: Sequence[int]) -> Tensor:
    """Return the rows of all processes in rank order: [parts[rank], ...] -> [sum(parts), ...]."""
    if len(parts) == 1:
        return rows
    # Collective operations need equal sizes, so shorter parts are padded.
    padded = rows.new_zeros(max(parts), *rows.shape[1:])
    padded[: len(rows)] = rows
    pieces = [torch.empty_like(padded) for _ in parts]
    dist.all_gather(pieces, padded)
    return torch.cat([piece[:part] for piece, part in zip(pieces, parts, strict=True)])


def sum_over_processes(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor in place by its sum over all processes, in one message per dtype.

    Every process passes tensors of the same shapes in the same order. Half-precision tensors
    are summed in float32.
    """
    if world()[1] == 1:
        return
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        groups.setdefault(dtype, []).append(tensor)
    for dtype, group in groups.items():
        flat = torch.cat([tensor.reshape(-1).to(dtype) for tensor in group])
        dist.all_reduce(flat)
        totals = torch.split(flat, [tensor.numel() for tensor in group])
        for tensor, total in zip(group, totals, strict=True):
            tensor.copy_(total.view_as(tensor))


def sum_gradients(parameters: Sequence[Tensor]) -> None:
    """Sum `.grad` over all processes; a parameter that has none in any process keeps none."""
    if world()[1] == 1 or not parameters:
        return
    device = parameters[0].device
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=device)
    dist.all_reduce(used)
    gradients = []
    for parameter, users in zip(parameters, used.tolist(), strict=True):
        if users:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    sum_over_processes(gradients)


@contextmanager
def failing_together(device: torch.device) -> Iterator[None]:
    """Run local work; if it raises in one process, raise in all of them.

    Without this, the other processes would wait in their next collective operation until it times
    out. If any process runs out of memory, all raise `torch.OutOfMemoryError`, so all of them can
    try again in the same way.
    """
    if world()[1] == 1:
        yield
        return
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    failure = 0 if error is None else 1 if isinstance(error, torch.OutOfMemoryError) else 2
    failures = gather_numbers(failure, device)
    worst = max(failures)
    if error is not None and failure == worst:
        raise error
    if worst:
        ranks = ", ".join(str(rank) for rank, code in enumerate(failures) if code == worst)
        if worst == 1:
            raise torch.OutOfMemoryError(f"process {ranks} ran out of memory")
        raise RuntimeError(
            f"this training step failed in process {ranks}; see the error message of that process"
        )
