"""What the commands that train share: processes, and what is printed before and after."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from listwise.training import Plan, TrainResult


@contextmanager
def in_processes(device: str) -> Iterator[bool]:
    """Join the other processes if `torchrun` started several; gives whether this is the first."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield True
        return
    gpu = torch.cuda.is_available() and device != "cpu"
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if gpu else "gloo")
    try:
        yield dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


def show_plan(plan: Plan, console: Console) -> None:
    """Print what will be trained on what, and why so."""
    for note in plan.notes:
        console.print(f"note: {note}", style="yellow", markup=False, highlight=False)
    console.print(
        f"{len(plan.train)} photos of {len(plan.train.class_names)} classes to train on, "
        f"{len(plan.validation)} of {len(plan.validation.class_names)} to validate with"
    )
    if not plan.reasons:
        return
    table = Table("setting", "value", "why", title="Settings chosen for you", title_justify="left")
    settings = plan.config.model_dump()
    for name, reason in plan.reasons.items():
        value = settings
        for part in name.split("."):
            value = value[part]
        table.add_row(name, str(value), reason)
    console.print(table)


def show_result(result: TrainResult, console: Console, as_json: bool) -> None:
    """Print what a run came to."""
    if as_json:
        print(json.dumps(asdict(result), default=str))
        return
    console.print(
        f"validation mAP {100 * result.first_map:.1f} -> [bold]{100 * result.best_map:.1f}[/bold] "
        f"(best at update {result.best_update} of {result.updates}, {result.seconds:.0f} s)\n"
        f"the network is in [bold]{result.model}[/bold]",
        highlight=False,
    )
