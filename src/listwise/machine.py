"""What this machine has to compute with: cores, GPUs, precision."""

import os
from dataclasses import dataclass

import torch

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
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        share = (cores or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return Machine(device, max(1, share), gpu and torch.cuda.is_bf16_supported())

    def workers(self) -> int:
        """Processes to decode photos with.

        Without a GPU the network itself needs the cores, and crops are cheap beside it.
        """
        gpu = self.device.startswith("cuda")
        return max(1, self.cores - 1) if gpu else min(2, self.cores)
