"""How many images' graphs fit into memory at once."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from listwise.training.forward import Forward

# Backward needs room beside what the graph keeps (gradients of activations, workspaces), and
# only CUDA can try again after running out: on the CPU the system ends the process.
SAFE_PART = {"cuda": 0.75, "cpu": 0.5}
# The gradients, and the two moments that Adam will want after the first step.
COPIES_OF_PARAMETERS = 3
# Larger graphs are slower on the CPU: their memory goes back to the system and is cleared again
# for every step, which costs more than the forward that one pass saves.
CPU_GRAPH_BYTES = 10**9
CPU_MICRO_BATCH = 16
# Enough to keep a large GPU busy; more would only take memory from what else is there. Kernels
# for tensors of more elements than 32 bits can count are slower, or missing.
CUDA_MICRO_BATCH = 256
CUDA_ELEMENTS = 2**31 - 1
ASSUMED_FREE = 2 * 2**30


@dataclass(frozen=True)
class Fit:
    """How many images' graphs fit, how many help when a batch does not, and why."""

    images: int
    useful: int
    reason: str

    def choose(self, batch: int) -> tuple[int, str]:
        """The micro-batch for a batch, with a sentence; all of it if it fits: that saves a pass."""
        if batch <= self.images:
            return batch, f"all {batch} images in one pass: {self.reason}"
        # As few parts as can be, and equal ones: a compiled network fills the last one up.
        parts = math.ceil(batch / min(self.images, self.useful))
        micro_batch = math.ceil(batch / parts)
        return micro_batch, f"micro-batches of {micro_batch}: {self.reason}"


def images_that_fit(forward: Forward, images: Tensor) -> Fit:
    """Measure what one image's graph keeps and divide the free memory by it.

    Of the images [B, 3, H, W] the first two are used, a single one twice.
    """
    pair = images[:2] if len(images) > 1 else images.repeat(2, 1, 1, 1)
    free = free_bytes(forward.device)
    random_state = forward.random_state()
    one, two = saved(forward, pair[:1]), saved(forward, pair)
    forward.set_random_state(random_state)
    # The rest is there once for any number of images: autocast's casts of the weights.
    image_bytes = max(two.bytes - one.bytes, 1)
    fixed = max(one.bytes - image_bytes, 0) + COPIES_OF_PARAMETERS * sum(
        p.nbytes for p in forward.net.parameters() if p.requires_grad
    )
    reason = f"one image keeps {readable(image_bytes)} of activations, {readable(free)} are free"
    if forward.device.type == "cuda":
        count = max(1, int((SAFE_PART["cuda"] * free - fixed) // image_bytes))
        useful = max(1, min(CUDA_MICRO_BATCH, 2 * CUDA_ELEMENTS // max(two.largest, 1)))
        return Fit(count, useful, reason)
    room = min(SAFE_PART["cpu"] * free - fixed, CPU_GRAPH_BYTES)
    return Fit(max(1, int(room // image_bytes)), CPU_MICRO_BATCH, reason)


class Saved(NamedTuple):
    """What a graph keeps: its bytes, and the elements of the largest tensor."""

    bytes: int
    largest: int


def saved(forward: Forward, images: Tensor) -> Saved:
    """What the graph of some images [b, 3, H, W] keeps, without parameters and buffers."""
    kept: dict[int, tuple[int, int]] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes(), tensor.numel()
        return tensor

    # A view would count the storage of the whole batch; and what the first forward makes of the
    # weights has a graph of its own.
    images = forward.ready(images.clone())
    # The graph must live until the count is done, or an address could be used twice.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        descriptors = forward.uncompiled(images)
    for lasting in (*forward.module.parameters(), *forward.module.buffers()):
        kept.pop(lasting.untyped_storage().data_ptr(), None)
    found = Saved(
        sum(size for size, _ in kept.values()), max((n for _, n in kept.values()), default=0)
    )
    del descriptors
    return found


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        # What PyTorch holds in reserve is free for PyTorch.
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserve
    return min(_available_to_system(), _available_to_container())


def _available_to_system() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):
        return ASSUMED_FREE


def _available_to_container(group: Path = Path("/sys/fs/cgroup")) -> int:
    """What the memory limit of a container leaves; /proc/meminfo knows nothing of it."""
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 2**63
    # Files in the cache count as used but give way.
    return max(0, limit - used + int(counts.get("inactive_file", 0)))


def readable(size: float) -> str:
    """A number of bytes for people: 212 MB, 11.2 GB."""
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
