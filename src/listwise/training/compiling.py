"""Compile the kernels of the loss while a run is prepared: the first time takes seconds."""

import threading
from contextlib import suppress

import torch
from torch import Tensor
from torch.nn.functional import normalize

from listwise.losses import QuantizedAPLoss
from listwise.training.distributed import world
from listwise.training.step import MultistageStep


def compile_loss(
    step: MultistageStep, labels: Tensor, dim: int, device: torch.device
) -> threading.Thread | None:
    """Compute the loss of random descriptors in a thread, which compiles its GPU kernels.

    Args:
        step: the step whose loss it is. Only the AP loss has kernels, and it keeps no state.
        labels: [B] the labels of a batch.
        dim: the length of the descriptors.
        device: the GPU.

    Returns:
        The thread; None if there is nothing to compile.
    """
    if type(step.loss) is not QuantizedAPLoss or world()[1] > 1:
        return None

    def compute() -> None:
        # An error would occur again in the first update, which reports it.
        with suppress(Exception), torch.autocast(device.type, enabled=False):
            generator = torch.Generator(device).manual_seed(0)
            rows = torch.randn(len(labels), dim, generator=generator, device=device)
            descriptors = normalize(rows, dim=1).requires_grad_()
            torch.autograd.backward(step.compute_loss(descriptors, labels.to(device)))

    thread = threading.Thread(target=compute, name="compiling")
    thread.start()
    return thread
