"""What a training step can reach at most: a machine's speed on plain work, and an image's cost."""

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from listwise.models import RetrievalNet

# Descriptors of a batch are computed twice and backpropagated once, at twice a forward's work.
PASSES = 4


def fastest_step(net: RetrievalNet, size: int, device: torch.device) -> float:
    """Images a second of a step whose every convolution ran at one of the machine's two limits.

    These are the operations a second of a large bfloat16 product, and the bytes a second of a large
    copy, both measured.
    """
    gpu = device.type == "cuda"
    side = 8192 if gpu else 256
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    flops = 2 * side**3 / seconds_of(lambda: a @ b, device)
    source = torch.empty(2**31 if gpu else 2**24, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / seconds_of(lambda: target.copy_(source), device)
    costs = convolution_costs(net, size)
    return 1 / sum(PASSES * max(work / flops, moved / bandwidth) for work, moved in costs)


def convolution_costs(net: RetrievalNet, size: int) -> list[tuple[float, float]]:
    """Operations and bytes, in and out in bfloat16, of each convolution for one image."""
    costs: list[tuple[float, float]] = []

    def note(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        weights = module.weight[0].numel()
        costs.append((2.0 * output.numel() * weights, 2.0 * (inputs[0].numel() + output.numel())))

    still = copy.deepcopy(net).to("meta")  # shapes only
    for module in still.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(note)
    with torch.no_grad():
        still(torch.empty(1, 3, size, size, device="meta"))
    return costs


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """The mean of a few runs, after two that warm up."""
    for _ in range(2):
        call()
    started = synchronized_time(device)
    for _ in range(repeats):
        call()
    return (synchronized_time(device) - started) / repeats


def synchronized_time(device: torch.device) -> float:
    """Seconds of a clock, once a GPU has finished what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
