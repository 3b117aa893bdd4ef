"""Benchmark the AP loss, a dense transcription and other losses: time and memory by batch size."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

import torch
from torch import Tensor

from benchmarks.measure import DoesNotFit, Measurement, measure
from benchmarks.table import readable_seconds
from listwise.errors import InputError
from listwise.losses import QuantizedAPLoss
from listwise.machine import Machine

CLASS_SIZE = 16
PATIENCE = 180.0  # seconds; longer measurements are skipped
REPEATS = 20  # on a GPU
NOT_INSTALLED = "not installed (pip install 'listwise[compare]')"

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LossMeasurement:
    """Forward and backward of a method at a batch size, or why it was skipped."""

    method: Annotated[str, "method"]
    batch: Annotated[int, "B", "{:d}"]
    seconds: Annotated[float | None, "time", readable_seconds] = None
    extra_bytes: Annotated[int | None, "memory", "{:,.0f} MB", 1e-6] = None
    skipped: str | None = None


def dense_loss(descriptors: Tensor, labels: Tensor, bins: int = 20) -> Tensor:
    """Compute the loss by the paper's equations, transcribed directly: B × M × B tensors."""
    delta = 2 / (bins - 1)
    centers = 1 - torch.arange(bins, device=descriptors.device) * delta
    others = 1 - torch.eye(len(labels), device=descriptors.device)
    relevance = (labels[:, None] == labels) * others
    scores = descriptors @ descriptors.T
    assigned = (1 - (scores[:, None, :] - centers[:, None]).abs() / delta).clamp(min=0)
    relevant = (assigned * relevance[:, None, :]).sum(-1)
    every = (assigned * others[:, None, :]).sum(-1)
    precision = relevant.cumsum(-1) / every.cumsum(-1).clamp(min=1e-12)
    return 1 - ((precision * relevant).sum(-1) / relevance.sum(-1)).mean()


def three_products(descriptors: Tensor, labels: Tensor) -> Tensor:
    """Compute only the matrix products that every exact computation of the loss needs.

    These are the scores, once forward and once backward, and weights [B, B] times descriptors.
    """
    for _ in range(2):
        scores = descriptors @ descriptors.T
    return scores @ descriptors


def _metric_learning(name: str, **settings: Any) -> Loss:
    """Return a loss of pytorch-metric-learning."""
    from pytorch_metric_learning import losses

    loss: Loss = getattr(losses, name)(**settings)
    return loss


# pml: pytorch-metric-learning.
METHODS: dict[str, Callable[[], Loss]] = {
    "listwise": QuantizedAPLoss,
    "dense transcription": lambda: dense_loss,
    "FastAP (pml)": lambda: _metric_learning("FastAPLoss", num_bins=20),
    "SmoothAP (pml)": lambda: _metric_learning("SmoothAPLoss"),
}
# Exponent of the time over the batch size, to predict what takes too long.
_GROWTH = {"SmoothAP (pml)": 3}
# On a GPU: the loss, and the precision of descriptors (tf32: float32 with TF32 products).
GPU_METHODS: dict[str, tuple[Loss, str]] = {
    "listwise": (QuantizedAPLoss(), "float32"),
    "listwise, bfloat16": (QuantizedAPLoss(), "bfloat16"),
    "dense transcription": (dense_loss, "float32"),
    "three products, float32": (three_products, "float32"),
    "three products, tf32": (three_products, "tf32"),
    "three products, bfloat16": (three_products, "bfloat16"),
}


def methods_on(device: str) -> tuple[str, ...]:
    """Return the names of the methods for a device."""
    return tuple(GPU_METHODS if device.startswith("cuda") else METHODS)


def example(batch: int, dim: int, device: str) -> tuple[Tensor, Tensor]:
    """Generate unit descriptors [B, C] and labels [B], CLASS_SIZE per class, shuffled."""
    generator = torch.Generator(device).manual_seed(batch)
    labels = torch.randperm(batch, generator=generator, device=device) // CLASS_SIZE
    centers = torch.randn(batch // CLASS_SIZE, dim, generator=generator, device=device)
    noise = torch.randn(batch, dim, generator=generator, device=device)
    return torch.nn.functional.normalize(centers[labels] + 2 * noise, dim=1), labels


def forward_and_backward(method: str, batch: int, dim: int, threads: int) -> Callable[[], object]:
    """Return a call that computes the loss and gradient of a method on a generated batch."""
    torch.set_num_threads(threads)
    descriptors, labels = example(batch, dim, "cpu")
    descriptors.requires_grad_()
    loss = METHODS[method]()

    def call() -> None:
        descriptors.grad = None
        torch.autograd.backward(loss(descriptors, labels))

    # Libraries load on first use, which must not count as memory of the loss.
    small, small_labels = example(2 * CLASS_SIZE, dim, "cpu")
    torch.autograd.backward(loss(small.requires_grad_(), small_labels))
    return call


def run(
    sizes: Sequence[int] = (256, 512, 1024, 2048, 4096, 8192, 16384),
    dim: int = 2048,
    methods: Sequence[str] | None = None,
    device: str = "auto",
) -> Iterator[LossMeasurement]:
    """Measure forward + backward of each method at each batch size, one at a time.

    On the CPU each runs in a process of its own. On a GPU times are medians between two events,
    and memory is what PyTorch held at most beyond the descriptors and labels.

    Args:
        sizes: batch sizes.
        dim: dimensions of a descriptor.
        methods: methods to measure, as the table names them; all by default.
        device: cpu, cuda, cuda:1, or auto, which uses a GPU if one is available.
    """
    device = Machine.detect(device).device
    known = methods_on(device)
    if methods is not None and not set(methods) <= set(known):
        unknown = next(method for method in methods if method not in known)
        raise InputError(f"unknown {unknown!r} in `methods`: choose from {'; '.join(known)}")
    if any(size < 2 * CLASS_SIZE or size % CLASS_SIZE for size in sizes):
        raise InputError(f"`sizes` must be multiples of {CLASS_SIZE}, and {2 * CLASS_SIZE} or more")
    on_gpu = device.startswith("cuda")
    for method in known if methods is None else methods:
        last: LossMeasurement | None = None
        for size in sorted(sizes):
            skipped = _reason_to_skip(last, size)
            last = LossMeasurement(method, size, skipped=skipped)
            if skipped is None:
                try:
                    if on_gpu:
                        found = _measure_on_gpu(method, size, dim, device)
                    else:
                        threads = torch.get_num_threads()
                        found = measure(forward_and_backward, method, size, dim, threads)
                    last = LossMeasurement(method, size, found.seconds, found.extra_bytes)
                except (DoesNotFit, ImportError) as error:
                    reason = str(error) if isinstance(error, DoesNotFit) else NOT_INSTALLED
                    last = LossMeasurement(method, size, skipped=reason)
            yield last


def _reason_to_skip(last: LossMeasurement | None, size: int) -> str | None:
    """Return why a size is skipped, judging by the smaller size before it."""
    if last is None:
        return None
    if last.seconds is None:
        return last.skipped
    expected = last.seconds * (size / last.batch) ** _GROWTH.get(last.method, 2)
    return f"would take about {expected:.0f} s" if expected > PATIENCE else None


def _measure_on_gpu(method: str, size: int, dim: int, device: str) -> Measurement:
    """Return the median seconds of a step on a GPU, and the peak memory it added, in bytes."""
    loss, precision = GPU_METHODS[method]
    setting: Any = torch.backends.cuda.matmul
    before = setting.fp32_precision
    setting.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    try:
        descriptors, labels = example(size, dim, device)
        if precision == "bfloat16":
            descriptors = descriptors.bfloat16()
        descriptors.requires_grad_(loss is not three_products)

        def step() -> None:
            descriptors.grad = None
            value = loss(descriptors, labels)
            if value.requires_grad:
                torch.autograd.backward(value)

        for _ in range(3):
            step()
        descriptors.grad = None
        torch.cuda.synchronize(device)
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        with torch.cuda.device(device):  # events measure the current GPU
            times = [_seconds_on_gpu(step) for _ in range(REPEATS)]
        return Measurement(median(times), torch.cuda.max_memory_allocated(device) - held)
    except torch.cuda.OutOfMemoryError as error:
        raise DoesNotFit(torch.cuda.get_device_properties(device).total_memory) from error
    finally:
        setting.fp32_precision = before


def _seconds_on_gpu(call: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
