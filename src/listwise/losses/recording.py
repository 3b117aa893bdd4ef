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
from typing import Any

import torch
from torch import Tensor

from listwise.losses.launches import HostBuffer

# Larger batches keep the GPU busy while the host starts kernels. Graphs keep their buffers: 84 MB
# for 1024 float32 descriptors of 2048 dimensions, with the memory of cuBLAS.
LARGEST_BATCH, LARGEST_DESCRIPTORS = 2048, 2**22
GRAPHS = 4  # per thread
# Batches of one shape that are computed before a graph is recorded, as many shapes occur only once;
# and before it is recorded again because others have replaced it.
CALLS_BEFORE, CALLS_BEFORE_AGAIN = 2, 100

Batch = tuple[Tensor, Tensor, Tensor | None]
"""Descriptors [B, C], labels [B] and weights [B] or None."""

_THREAD = threading.local()


class RecordedLoss:
    """The kernels for batches of one shape, recorded as a graph.

    Args:
        kernels: a `gpu.Kernels`, which has been used before.
        batch: descriptors, labels and weights of a batch.
        findings: where the checks of the batch go.
    """

    def __init__(self, kernels: Any, batch: Batch, findings: HostBuffer) -> None:
        self.kernels = kernels
        device = kernels.device
        parts = torch.zeros(kernels.parts_shape, dtype=kernels.parts_dtype, device=device)
        self._buffers = kernels.allocate(parts)
        weighted = batch[2] is not None
        self._weights = torch.ones(kernels.size, device=device) if weighted else None
        self._graph = torch.cuda.CUDAGraph()
        self._fill(batch, findings)
        with _side_stream(device):
            # Once without recording: cuBLAS cannot start in this thread while it is recorded.
            self._compute()
            with _recording(self._graph):
                self._loss, self._gradient = self._compute()

    def __call__(self, batch: Batch, findings: HostBuffer) -> tuple[Tensor, Tensor]:
        """Compute the loss of a batch, and its gradient [B, padded] in float32.

        The checks go to `findings`.
        """
        self._fill(batch, findings)
        self._graph.replay()
        return self._loss.clone(), self._gradient.clone()

    def _fill(self, batch: Batch, findings: HostBuffer) -> None:
        descriptors, labels, weights = batch
        if not self.kernels.exact:
            self._buffers.parts[:, : self.kernels.dim].copy_(descriptors)
        if weights is not None and self._weights is not None:
            self._weights.copy_(weights)
        self.kernels.fill(self._buffers, descriptors, labels, self._weights, findings)

    def _compute(self) -> tuple[Tensor, Tensor]:
        self.kernels.histograms(self._buffers)
        loss = self.kernels.precision(self._buffers, self._weights)
        parts, kinds, _, slopes = self._buffers
        return loss, self.kernels.unit_gradient(parts, kinds, slopes)


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """Use another stream, because the default stream cannot be recorded.

    It is always the same one for the current stream.
    """
    current = torch.cuda.current_stream(device)
    streams: dict[int, torch.cuda.Stream] = vars(_THREAD).setdefault("streams", {})
    if current.cuda_stream not in streams:
        # High priority: PyTorch gives out its streams again, and other code uses the usual ones.
        made = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        streams[current.cuda_stream] = made
    # cuBLAS keeps 32 MB of memory for each stream, so there are few.
    stream = streams[current.cuda_stream]
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Record kernels instead of running them."""
    collects = gc.isenabled()
    gc.disable()  # it could free other graphs, which is not allowed meanwhile
    try:
        # Other threads may use the GPU meanwhile.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()
    finally:
        if collects:
            gc.enable()


def recorded_loss(kernels: Any, batch: Batch, findings: HostBuffer) -> RecordedLoss | None:
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
        graphs[key] = RecordedLoss(kernels, batch, findings)
    except RuntimeError:  # the kernels are started one by one
        kernels.recordable = False
        return None
    if len(graphs) > GRAPHS:
        _, replaced = graphs.popitem(last=False)
        replaced.kernels.calls_before_recording = CALLS_BEFORE_AGAIN
    return graphs[key]
