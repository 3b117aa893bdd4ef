"""The AP loss against its dense transcription and its relatives: time and memory by batch size."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

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


# pml: pytorch-metric-learning.
METHODS: dict[str, Callable[[], Loss]] = {
    "listwise": _listwise,
    "dense transcription": _dense,
    "FastAP (pml)": _fast_ap,
    "SmoothAP (pml)": _smooth_ap,
}
# How the work grows with the batch, to know what would take too long.
_GROWTH = {"SmoothAP (pml)": 3}


def forward_and_backward(method: str, batch: int, dim: int, threads: int) -> Callable[[], object]:
    """A call that runs a method's loss and its gradient on a batch made from a seed."""
    import torch

    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(batch)
    labels = torch.arange(batch) // CLASS_SIZE
    centers = torch.randn(int(labels[-1]) + 1, dim, generator=generator)
    raw = centers[labels] + 2 * torch.randn(batch, dim, generator=generator)
    descriptors = torch.nn.functional.normalize(raw, dim=1).requires_grad_()
    loss = METHODS[method]()

    def call() -> None:
        descriptors.grad = None
        loss(descriptors, labels).backward()  # type: ignore[no-untyped-call]

    # Libraries load on first use; that is not the loss's memory.
    small = descriptors.detach()[: 2 * CLASS_SIZE].requires_grad_()
    loss(small, labels[: 2 * CLASS_SIZE]).backward()  # type: ignore[no-untyped-call]
    return call


def run(
    sizes: Sequence[int] = SIZES, dim: int = 2048, methods: Sequence[str] = tuple(METHODS)
) -> Iterator[Row]:
    """Measure forward + backward of each method at each batch size, one process at a time."""
    import torch

    if any(size < 2 * CLASS_SIZE or size % CLASS_SIZE for size in sizes):
        raise InputError(f"batch sizes must be multiples of {CLASS_SIZE}, two classes at least")
    limit = int(available_memory() * 0.9)
    for method in methods:
        last: tuple[int, float] | None = None
        gone: str | None = None
        for size in sorted(sizes):
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
