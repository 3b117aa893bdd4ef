"""A forward pass that can be repeated with the same result, and how many images of it fit."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.filesize import decimal
from torch import Tensor, nn

from listwise.errors import InputError
from listwise.models.folding import Folding
from listwise.optional import fuses_convolutions, runs_triton

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


class Forward:
    """Computes the descriptors of images, repeatably with the same random numbers.

    In half precision and on the CPU, frozen batch norm is folded into the convolutions (see
    `listwise.models.folding`).

    Args:
        net: the network.
        autocast: dtype in which it runs; by default that of the caller's autocast, if any.
        compile: compile the network for each size of images; smaller batches are padded, so that
            all have one size.

    Attributes:
        fold: whether to fold batch norm where it is faster.
        fallback: why the network is not compiled; empty otherwise.
    """

    def __init__(self, net: nn.Module, autocast: torch.dtype | None, compile: bool = False) -> None:
        self.net = net
        self.device = device_of(net)
        self.autocast = chosen_autocast(self.device, autocast)
        if self.autocast == torch.float16:
            raise InputError(
                "the step does not run in float16: small gradients would become zero; "
                "use torch.bfloat16, as in torch.autocast(device, torch.bfloat16)"
            )
        self.compile = compile
        self.fold = self.autocast is not None or self.device.type == "cpu"
        self.fallback = ""
        self._folding = Folding(net)
        self._compiled: Callable[[Tensor], Tensor] | None = None
        self._sizes: dict[torch.Size, int] = {}
        self._dtypes = _float_dtypes(net)

    def __call__(self, images: Tensor) -> Tensor:
        """Compute descriptors [b, C] of images [b, 3, H, W], which may be on another device."""
        if not self.compile:
            return self.uncompiled(images)
        count = len(images)
        size = self._sizes[images.shape[1:]] = max(count, self._sizes.get(images.shape[1:], 0))
        if size > count:
            images = torch.cat([images, images[-1:].expand(size - count, -1, -1, -1)])
        if self._compiled is None:
            options = compiler_options(self.device)
            self._compiled = torch.compile(self.net, dynamic=False, options=options)
        with self._best_kernels():
            return self._run(self._compiled, images)[:count]

    def uncompiled(self, images: Tensor) -> Tensor:
        """Compute descriptors without the compiler: [b, 3, H, W] -> [b, C]."""
        return self._run(self.net, images)

    def _run(self, module: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        images = images.to(self.device, non_blocking=True)
        if self.fold:
            images = images.contiguous(memory_format=torch.channels_last)
        # Autocast caches cast weights. Those cast without a graph would get no gradient, and those
        # cast before an update are outdated.
        torch.clear_autocast_cache()
        with (
            self._folding.folded() if self.fold else nullcontext(),
            torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None),
        ):
            descriptors = module(images)
        if descriptors.ndim != 2 or len(descriptors) != len(images):
            raise InputError(
                f"the network returned {list(descriptors.shape)} for {len(images)} images: "
                "it must return one descriptor per image, [B, C]"
            )
        return descriptors

    @contextmanager
    def _best_kernels(self) -> Iterator[None]:
        """Let cuDNN try all its kernels on every new size if the network is compiled."""
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = before or self.compile
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before

    def refresh(self) -> None:
        """Take changes of the network into account; call it before every update."""
        self._folding.refresh()
        self._dtypes = _float_dtypes(self.net)

    def backward(self, descriptors: Tensor, gradient: Tensor) -> None:
        """Backpropagate a gradient [b, C] through the graph of descriptors [b, C]."""
        with self._best_kernels():
            torch.autograd.backward(descriptors, gradient)

    def forget_sizes(self) -> None:
        """Do not pad batches to earlier sizes any more, because they were too large."""
        self._sizes.clear()

    def stop_compiling(self, error: Exception) -> bool:
        """Return whether an error comes from the compiler; if so, do not compile any more."""
        if not self.compile:
            return False
        from torch._dynamo.exc import TorchDynamoException  # slow to import

        if not isinstance(error, TorchDynamoException):
            return False
        reason = " ".join(str(error).strip().partition("\n\n")[0].split())
        self.fallback = f"the network is not compiled, so it runs slower: {reason}"
        self.compile, self._compiled = False, None
        return True

    def recompute(self, images: Tensor, random_state: list[Tensor]) -> Tensor:
        """Compute descriptors again, with the random state of the first time."""
        with torch.random.fork_rng(self._generators()):
            self.set_random_state(random_state)
            return self(images)

    def random_state(self) -> list[Tensor]:
        """Return the state of the random generators that the network uses."""
        states = [torch.cuda.get_rng_state(device) for device in self._generators()]
        return [torch.get_rng_state(), *states]

    def set_random_state(self, state: list[Tensor]) -> None:
        """Restore a `random_state`."""
        torch.set_rng_state(state[0])
        for device, device_state in zip(self._generators(), state[1:], strict=True):
            torch.cuda.set_rng_state(device_state, device)

    def drift(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the difference of two computations of descriptors [b, C]: above 1 is too large."""
        dtypes = {first.dtype, self.autocast or first.dtype, *self._dtypes}
        # Half of the digits: kernels may change the last few digits, other random numbers all.
        tolerance = max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5
        distance = torch.linalg.vector_norm(second.detach() - first, dim=1).max()
        length = torch.linalg.vector_norm(first, dim=1).max()
        return torch.div(distance, length * tolerance)

    def _generators(self) -> list[torch.device]:
        return [self.device] if self.device.type == "cuda" else []


def device_of(net: nn.Module) -> torch.device:
    """Return the device of a network."""
    return next(net.parameters()).device


def chosen_autocast(device: torch.device, given: torch.dtype | None) -> torch.dtype | None:
    """Return the given dtype; by default that of the caller's autocast, if any."""
    inherited = torch.is_autocast_enabled(device.type)
    return given or (torch.get_autocast_dtype(device.type) if inherited else None)


def _float_dtypes(net: nn.Module) -> set[torch.dtype]:
    return {p.dtype for p in net.parameters() if p.is_floating_point()}


def compiler_options(device: torch.device) -> dict[str, Any]:
    """Return the options of torch.compile for a network on a device."""
    # The compiler's own random numbers would differ between the two stages.
    options: dict[str, Any] = {"fallback_random": True}
    if (
        device.type == "cuda"
        and runs_triton(device)
        and torch.cuda.get_device_capability(device) >= (8, 0)
        and fuses_convolutions()
    ):
        from listwise.models.fusion import ConvolutionFusion  # slow to import

        options["post_grad_custom_pre_pass"] = ConvolutionFusion()
    return options


def upload_ahead(crops: Sequence[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Yield the micro-batches [b, 3, H, W]; copy the next one from pinned memory meanwhile."""
    if device.type != "cuda" or not all(crop.is_pinned() for crop in crops):
        yield from crops
        return
    here = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(crop: Tensor) -> Tensor:
        side.wait_stream(here)  # copy while one micro-batch is computed, not earlier
        with torch.cuda.stream(side):
            return crop.to(device, non_blocking=True)

    coming = send(crops[0])
    for following in (*crops[1:], None):
        here.wait_stream(side)
        arrived = coming
        arrived.record_stream(here)
        if following is not None:
            coming = send(following)
        yield arrived


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
    # The rest does not depend on the number of images: folded and cast weights.
    image_bytes = max(two.bytes - one.bytes, 1)
    fixed = max(one.bytes - image_bytes, 0) + COPIES_OF_PARAMETERS * sum(
        p.nbytes for p in forward.net.parameters() if p.requires_grad
    )
    reason = f"one image needs {decimal(image_bytes)} of activations, {decimal(free)} are free"
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

    images = images.clone()  # a view would count the storage of the whole batch
    # The descriptors keep the graph alive until the count is done; else addresses could be reused.
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        descriptors = forward.uncompiled(images)
    for lasting in (*forward.net.parameters(), *forward.net.buffers()):
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
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # another system than Linux
        return ASSUMED_FREE
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


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
