"""Find out how many images fit into memory together with their graphs."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from listwise.training.forward import Forward

# The part of the free memory that graphs may take. The backward pass needs more memory than the
# graph (gradients of activations, workspaces). On CUDA a step that runs out of memory can be
# repeated; on the CPU the system kills the process.
SAFE_PART = {"cuda": 0.75, "cpu": 0.5}
# The gradients, and the two moments that Adam keeps after the first step.
COPIES_OF_PARAMETERS = 3
# Larger graphs are slower on the CPU: their memory is returned to the system and cleared again in
# every step, which takes longer than the forward pass that is saved.
CPU_GRAPH_BYTES = 10**9
CPU_MICRO_BATCH = 16
# Enough images to keep a large GPU busy. Kernels for tensors with more elements than a 32-bit
# number can count are slower, or do not exist.
CUDA_MICRO_BATCH = 256
CUDA_ELEMENTS = 2**31 - 1
ASSUMED_FREE = 2 * 2**30


@dataclass(frozen=True)
class Fit:
    """How many images fit into memory together with their graphs.

    Attributes:
        images: the number of images that fit.
        useful: the largest micro-batch worth using if a whole batch does not fit.
        reason: why, as a phrase.
    """

    images: int
    useful: int
    reason: str

    def choose(self, batch: int) -> tuple[int, str]:
        """Return the micro-batch for a batch of this size, and a sentence that explains it."""
        if batch <= self.images:
            return batch, f"all {batch} images in one pass: {self.reason}"
        # As few parts as possible, of equal size: a compiled network pads the last one.
        parts = math.ceil(batch / min(self.images, self.useful))
        micro_batch = math.ceil(batch / parts)
        return micro_batch, f"micro-batches of {micro_batch}: {self.reason}"


def images_that_fit(forward: Forward, images: Tensor) -> Fit:
    """Measure the memory of one image's graph, and divide the free memory by it.

    Shapes: images [B, 3, H, W]; the first two are used.
    """
    pair = images[:2] if len(images) > 1 else images.repeat(2, 1, 1, 1)
    free = free_bytes(forward.device)
    random_state = forward.random_state()
    one, two = graph_memory(forward, pair[:1]), graph_memory(forward, pair)
    forward.set_random_state(random_state)
    # The rest does not depend on the number of images: autocast's copies of the weights.
    image_bytes = max(two.bytes - one.bytes, 1)
    fixed = max(one.bytes - image_bytes, 0) + COPIES_OF_PARAMETERS * sum(
        p.nbytes for p in forward.net.parameters() if p.requires_grad
    )
    reason = (
        f"one image needs {readable_bytes(image_bytes)} of activations, "
        f"{readable_bytes(free)} are free"
    )
    if forward.device.type == "cuda":
        count = max(1, int((SAFE_PART["cuda"] * free - fixed) // image_bytes))
        useful = max(1, min(CUDA_MICRO_BATCH, 2 * CUDA_ELEMENTS // max(two.largest, 1)))
        return Fit(count, useful, reason)
    available = min(SAFE_PART["cpu"] * free - fixed, CPU_GRAPH_BYTES)
    return Fit(max(1, int(available // image_bytes)), CPU_MICRO_BATCH, reason)


class GraphMemory(NamedTuple):
    """The memory of a graph in bytes, and the number of elements of its largest tensor."""

    bytes: int
    largest: int


def graph_memory(forward: Forward, images: Tensor) -> GraphMemory:
    """Measure the memory of the graph of images [b, 3, H, W], without parameters and buffers."""
    kept: dict[int, tuple[int, int]] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes(), tensor.numel()
        return tensor

    # A view would count the storage of the whole batch. `ready` goes first, because what it
    # computes from the weights has a graph of its own.
    images = forward.ready(images.clone())
    # The descriptors keep the graph alive until the count is done; else addresses could be reused.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        descriptors = forward.uncompiled(images)
    for lasting in (*forward.module.parameters(), *forward.module.buffers()):
        kept.pop(lasting.untyped_storage().data_ptr(), None)
    found = GraphMemory(
        sum(size for size, _ in kept.values()), max((n for _, n in kept.values()), default=0)
    )
    del descriptors
    return found


def free_bytes(device: torch.device) -> int:
    """Return the number of bytes that can still be allocated on a device."""
    if device.type == "cuda":
        # Memory that PyTorch has reserved but not used is free for PyTorch.
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
    """Return the bytes left under a container's memory limit, which /proc/meminfo does not show."""
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 2**63
    # Cached files count as used, but the system drops them when memory is needed.
    return max(0, limit - used + int(counts.get("inactive_file", 0)))


def readable_bytes(size: float) -> str:
    """Format a number of bytes for people, such as 212 MB or 11.2 GB."""
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
