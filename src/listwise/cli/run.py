"""What the commands that train share: processes, and what is printed before and after."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from listwise.training import TrainPlan, TrainResult
from listwise.training.run.view import readable_time


@contextmanager
def in_processes() -> Iterator[bool]:
    """Join the other processes if `torchrun` started several; gives whether this is the first."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield True
        return
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    # The others wait while the first validates, which may take longer than the usual ten minutes.
    dist.init_process_group(backend, timeout=timedelta(hours=6))
    try:
        yield dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


def show_plan(plan: TrainPlan, console: Console) -> None:
    """Print what will be trained on what, and why so."""
    for note in plan.notes:
        console.print(
            f"note: {note}", style="yellow", markup=False, highlight=False, soft_wrap=True
        )
    console.print(
        f"{len(plan.train)} photos of {len(plan.train.class_names)} classes to train on, "
        f"{len(plan.validation)} of {len(plan.validation.class_names)} to validate with",
        highlight=False,
        soft_wrap=True,
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
        f"validation mAP {100 * result.first_map:.1f} -> {100 * result.best_map:.1f} "
        f"(best at update {result.best_update} of {result.updates}, "
        f"{readable_time(result.seconds)})\nthe network is in {result.model}",
        style="bold",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
