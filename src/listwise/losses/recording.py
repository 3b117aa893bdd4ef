"""Start the kernels of a small batch together: they are recorded once as a CUDA graph.

With a thousand images the kernels take a tenth of a millisecond, and starting them one by one takes
several times as long. A graph starts them all by one call, and computes the same bits. Its buffers
are fixed, so the results are copied out of them, and one graph serves one thread and one stream.
"""

import gc
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from listwise.losses.launches import HostBuffer

# Larger batches keep the GPU busy while the host starts kernels. A graph of the largest batch
# keeps 60 MB of memory.
LARGEST_BATCH, LARGEST_DESCRIPTORS = 2048, 2**22
GRAPHS = 4  # per thread
# Batches of one shape that are computed before a graph is recorded, as many shapes occur only once;
# and before it is recorded again because others have replaced it.
CALLS_BEFORE, CALLS_BEFORE_AGAIN = 2, 100

_THREAD = threading.local()


class Replayed(NamedTuple):
    """The loss, and its gradient as the product [B, padded] and its factor, a scalar."""

    loss: Tensor
    product: Tensor
    factor: Tensor


class RecordedLoss:
    """The kernels for batches of one shape, recorded as a graph.

    Args:
        kernels: a `gpu.Kernels`, which has been used before.
        weighted: whether the batches have weights.
    """

    def __init__(self, kernels: Any, weighted: bool) -> None:
        self.kernels = kernels
        device = kernels.device
        parts = torch.zeros(kernels.parts_shape, dtype=kernels.parts_dtype, device=device)
        self._buffers = kernels.allocate(parts)
        self._weights = torch.ones(kernels.size, device=device) if weighted else None
        self._one = torch.ones((), device=device)
        self._graph = torch.cuda.CUDAGraph()
        with _recording(self._graph, device):
            kernels.histograms(self._buffers)
            self._loss = kernels.precision(self._buffers, self._weights)
            self._product = kernels.product(self._buffers, self._one)

    def __call__(
        self,
        descriptors: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        findings: HostBuffer,
    ) -> Replayed:
        """Compute the loss of a batch and its gradient; the checks go to `findings`."""
        kernels, buffers = self.kernels, self._buffers
        if not kernels.exact:
            buffers.parts[:, : kernels.dim].copy_(descriptors)
        if weights is not None and self._weights is not None:
            self._weights.copy_(weights)
        kernels.fill(buffers, descriptors, labels, self._weights, findings)
        self._graph.replay()
        factor = buffers.slopes[kernels.slope_count + 1]
        return Replayed(self._loss.clone(), self._product.clone(), factor.clone())


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, device: torch.device) -> Iterator[None]:
    """Record kernels instead of running them."""
    current = torch.cuda.current_stream(device)
    streams: dict[int, torch.cuda.Stream] = vars(_THREAD).setdefault("streams", {})
    if current.cuda_stream not in streams:
        # High priority: PyTorch gives out its streams again, and other code uses the usual ones.
        made = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        streams[current.cuda_stream] = made
    # cuBLAS keeps 32 MB of memory for each stream that it is recorded on, so there are few.
    stream = streams[current.cuda_stream]
    stream.wait_stream(current)
    collects = gc.isenabled()
    gc.disable()  # it could free other graphs, which is not allowed meanwhile
    try:
        with torch.cuda.stream(stream):
            # Other threads may use the GPU meanwhile.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()
    current.wait_stream(stream)


def recorded_loss(kernels: Any, weighted: bool) -> RecordedLoss | None:
    """Return the graph of a `gpu.Kernels` for the current thread and stream, or None."""
    small = kernels.size <= LARGEST_BATCH and kernels.size * kernels.dim <= LARGEST_DESCRIPTORS
    if kernels.device.type != "cuda" or not small or not kernels.recordable:
        return None
    if torch.cuda.is_current_stream_capturing():  # the caller records a graph
        return None
    graphs: OrderedDict[tuple[int, int], RecordedLoss]
    graphs = vars(_THREAD).setdefault("graphs", OrderedDict())
    key = id(kernels), torch.cuda.current_stream(kernels.device).cuda_stream
    if key in graphs:
        graphs.move_to_end(key)
        return graphs[key]
    if kernels.calls_before_recording > 0:  # the kernels are compiled by then
        return None
    try:
        graphs[key] = RecordedLoss(kernels, weighted)
    except RuntimeError:  # the kernels are started one by one
        kernels.recordable = False
        return None
    if len(graphs) > GRAPHS:
        _, replaced = graphs.popitem(last=False)
        replaced.kernels.calls_before_recording = CALLS_BEFORE_AGAIN
    return graphs[key]
