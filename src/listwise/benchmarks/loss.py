"""The AP loss against its dense transcription and its relatives: time and memory by batch size."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from listwise.benchmarks.measure import DoesNotFit, available_memory, measure
from listwise.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384)
CLASS_SIZE = 16
PATIENCE = 180.0  # seconds; what would take longer is skipped and said

Loss = Callable[["Tensor", "Tensor"], "Tensor"]


@dataclass(frozen=True)
class Row:
    """One cell of the table: a method at a batch size, or why it was skipped."""

    method: str
    batch: int
    seconds: float | None
    extra_bytes: int | None
    skipped: str | None

    def as_json(self) -> dict[str, object]:
        """The row as plain data."""
        return asdict(self)


def dense_loss(descriptors: "Tensor", labels: "Tensor", bins: int = 20) -> "Tensor":
    """The paper's equations as one would first write them: tensors of B × M × B scores."""
    import torch

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


def _listwise() -> Loss:
    from listwise.losses import QuantizedAPLoss

    return QuantizedAPLoss()


def _dense() -> Loss:
    return dense_loss


def _fast_ap() -> Loss:
    from pytorch_metric_learning.losses import FastAPLoss

    loss: Loss = FastAPLoss(num_bins=20)
    return loss


def _smooth_ap() -> Loss:
    from pytorch_metric_learning.losses import SmoothAPLoss

    loss: Loss = SmoothAPLoss()
    return loss


def three_products(descriptors: "Tensor", labels: "Tensor") -> "Tensor":
    """The matrix products that no exact way around the loss avoids, and nothing else.

    Scores once forward and once backward, and weights [B, B] with descriptors.
    """
    for _ in range(2):
        scores = descriptors @ descriptors.T
    return scores @ descriptors


# pml: pytorch-metric-learning.
METHODS: dict[str, Callable[[], Loss]] = {
    "listwise": _listwise,
    "dense transcription": _dense,
    "FastAP (pml)": _fast_ap,
    "SmoothAP (pml)": _smooth_ap,
}
# How the work grows with the batch, to know what would take too long.
_GROWTH = {"SmoothAP (pml)": 3}
# On a GPU: the loss or None for the products alone, and the precision of descriptors (tf32 is how
# float32 is multiplied).
GPU_METHODS: dict[str, tuple[Callable[[], Loss] | None, str]] = {
    "listwise": (_listwise, "float32"),
    "listwise, bfloat16": (_listwise, "bfloat16"),
    "dense transcription": (_dense, "float32"),
    "three products, float32": (None, "float32"),
    "three products, tf32": (None, "tf32"),
    "three products, bfloat16": (None, "bfloat16"),
}
_REPEATS = 20


def methods_on(device: str) -> tuple[str, ...]:
    """Names of what is measured on a device, "cpu" or "cuda"."""
    return tuple(GPU_METHODS if device == "cuda" else METHODS)


def example(batch: int, dim: int, device: str) -> tuple["Tensor", "Tensor"]:
    """Unit descriptors [B, C] of classes of CLASS_SIZE images in a random order, and labels [B]."""
    import torch

    generator = torch.Generator(device).manual_seed(batch)
    labels = torch.randperm(batch, generator=generator, device=device) // CLASS_SIZE
    centers = torch.randn(batch // CLASS_SIZE, dim, generator=generator, device=device)
    noise = torch.randn(batch, dim, generator=generator, device=device)
    return torch.nn.functional.normalize(centers[labels] + 2 * noise, dim=1), labels


def forward_and_backward(method: str, batch: int, dim: int, threads: int) -> Callable[[], object]:
    """A call that runs a method's loss and its gradient on a batch made from a seed."""
    import torch

    torch.set_num_threads(threads)
    descriptors, labels = example(batch, dim, "cpu")
    descriptors.requires_grad_()
    loss = METHODS[method]()

    def call() -> None:
        descriptors.grad = None
        loss(descriptors, labels).backward()  # type: ignore[no-untyped-call]

    # Libraries load on first use; that is not the loss's memory.
    small, small_labels = example(2 * CLASS_SIZE, dim, "cpu")
    loss(small.requires_grad_(), small_labels).backward()  # type: ignore[no-untyped-call]
    return call


def run(
    sizes: Sequence[int] = SIZES,
    dim: int = 2048,
    methods: Sequence[str] | None = None,
    device: str = "cpu",
) -> Iterator[Row]:
    """Measure forward + backward of each method at each batch size, one at a time.

    On the CPU each runs in a process of its own. On a GPU times are medians between two events,
    and memory is what PyTorch held at most beyond the descriptors and labels.

    Args:
        sizes: batch sizes B.
        dim: dimensions C of a descriptor.
        methods: some of `methods_on(device)`; all by default.
        device: "cpu" or "cuda".
    """
    if any(size < 2 * CLASS_SIZE or size % CLASS_SIZE for size in sizes):
        raise InputError(f"batch sizes must be multiples of {CLASS_SIZE}, two classes at least")
    measured = _run_on_gpu if device == "cuda" else _run_on_cpu
    return measured(sorted(sizes), dim, methods_on(device) if methods is None else methods)


def _run_on_cpu(sizes: Sequence[int], dim: int, methods: Sequence[str]) -> Iterator[Row]:
    import torch

    limit = int(available_memory() * 0.9)
    for method in methods:
        last: tuple[int, float] | None = None
        gone: str | None = None
        for size in sizes:
            if gone is None and last is not None:
                expected = last[1] * (size / last[0]) ** _GROWTH.get(method, 2)
                if expected > PATIENCE:
                    gone = f"would take some {expected:.0f} s"
            if gone is None:
                try:
                    found = measure(
                        forward_and_backward,
                        method,
                        size,
                        dim,
                        torch.get_num_threads(),
                        memory_limit=limit,
                    )
                except DoesNotFit:
                    gone = f"does not fit in {limit / 1e9:.0f} GB"
                except RuntimeError as error:
                    if "ModuleNotFoundError" not in str(error):
                        raise
                    gone = "not installed (pip install 'listwise[compare]')"
                else:
                    last = size, found.seconds
                    yield Row(method, size, found.seconds, found.extra_bytes, None)
                    continue
            yield Row(method, size, None, None, gone)


def _run_on_gpu(sizes: Sequence[int], dim: int, methods: Sequence[str]) -> Iterator[Row]:
    import torch

    if not torch.cuda.is_available():
        raise InputError("this machine has no CUDA GPU: measure on the CPU")
    for method in methods:
        gone: str | None = None
        for size in sizes:
            if gone is None:
                try:
                    seconds, extra = _measure_on_gpu(method, size, dim)
                except torch.cuda.OutOfMemoryError:
                    total = torch.cuda.get_device_properties().total_memory
                    gone = f"does not fit in {total / 1e9:.0f} GB"
                else:
                    yield Row(method, size, seconds, extra, None)
                    continue
            yield Row(method, size, None, None, gone)


def _measure_on_gpu(method: str, size: int, dim: int) -> tuple[float, int]:
    """Median seconds of a step, and the most memory it added, in bytes."""
    import torch

    make, precision = GPU_METHODS[method]
    descriptors, labels = example(size, dim, "cuda")
    if precision == "bfloat16":
        descriptors = descriptors.bfloat16()
    descriptors.requires_grad_(make is not None)
    loss = three_products if make is None else make()
    setting: Any = torch.backends.cuda.matmul
    before = setting.fp32_precision
    setting.fp32_precision = "tf32" if precision == "tf32" else "ieee"

    def step() -> None:
        descriptors.grad = None
        value = loss(descriptors, labels)
        if make is not None:
            value.backward()  # type: ignore[no-untyped-call]

    try:
        for _ in range(3):
            step()
        descriptors.grad = None
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        times = [_seconds_on_gpu(step) for _ in range(_REPEATS)]
        return median(times), torch.cuda.max_memory_allocated() - held
    finally:
        setting.fp32_precision = before


def _seconds_on_gpu(call: Callable[[], None]) -> float:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
