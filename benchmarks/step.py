"""Benchmark a whole training step at the paper's setting: images per second, and the limit."""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from listwise.errors import InputError
from listwise.losses import QuantizedAPLoss
from listwise.machine import Machine
from listwise.models import RetrievalNet
from listwise.training import MultistageStep
from listwise.training.forward import Forward, free_bytes

ITERATIONS = 200  # iterations of the paper's training
CLASS_SIZE = 4
CHECKED = 16  # images of the batch on which gradients are compared
FOLD_SIDE = 128  # their side in float64
FOLD_TOLERANCE = 1e-8
# A step runs the forward pass twice, and one backward pass of twice its work.
PASSES = 4

SINGLE = "float32, one image at a time"
AUTOCAST = "bfloat16 autocast"
FOLDED = "folded, bfloat16"
COMPILED = "folded, bfloat16, compiled"
METHODS = (SINGLE, AUTOCAST, FOLDED, COMPILED)
# On a CPU.
PLAIN = "float32"
FOLDED_FLOAT32 = "folded, float32, channels last"
CPU_METHODS = (PLAIN, FOLDED_FLOAT32, AUTOCAST, FOLDED)


@dataclass(frozen=True)
class StepMeasurement:
    """A method of computing the step; rates are in images per second.

    Attributes:
        method: name of the method.
        measured: number of images in the timed steps.
        forward: rate of the forward pass.
        both: rate of the forward and backward passes.
        step: rate of the whole step with the loss and the update of Adam.
        ratio: rate of the step relative to the first row.
        minutes: time of 200 steps of the whole batch.
        peak_bytes: peak GPU memory.
        of_limit: share of the rate of `fastest_step`.
        gradient_error: relative distance to the gradient of plain float32 backpropagation.
        first_seconds: time of the first pass.
    """

    method: Annotated[str, "method"]
    measured: int | None = None
    forward: Annotated[float | None, "forward /s", "{:,.0f}"] = None
    both: Annotated[float | None, "with backward /s", "{:,.0f}"] = None
    step: Annotated[float | None, "step /s", "{:,.1f}"] = None
    ratio: Annotated[float | None, "ratio", "{:.1f} ×"] = None
    minutes: Annotated[float | None, "200 steps", "{:,.1f} min"] = None
    peak_bytes: Annotated[int | None, "GPU memory", "{:.0f} GB", 1e-9] = None
    of_limit: Annotated[float | None, "of the limit", "{:.0%}"] = None
    gradient_error: Annotated[float | None, "gradient off by", "{:.1g}"] = None
    first_seconds: float | None = None


def run(
    device: str = "auto",
    backbone: str = "resnet101",
    size: int = 800,
    batch: int = 4096,
    micro_batch: int = 128,
    updates: int = 1,
) -> Iterator[StepMeasurement]:
    """Measure each method of computing the step; crops come from memory, weights are random.

    The slower methods are timed on a part of the batch.

    Args:
        device: cpu, cuda, cuda:1, or auto, which uses a GPU if one is available.
        backbone: name of a timm model.
        size: side of the square crops, in pixels.
        batch: images per step.
        micro_batch: images whose activations are in memory together.
        updates: number of timed steps.
    """
    if batch < 2 * CHECKED or batch % CLASS_SIZE:
        raise InputError(f"`batch` must be a multiple of {CLASS_SIZE}, and {2 * CHECKED} or more")
    place = torch.device(Machine.detect(device).device)
    gpu = place.type == "cuda"
    with exact_float32():
        net = make_net(backbone, size, place)
        images, labels = make_batch(batch, size, pinned=gpu)
        if gpu and images.nbytes < free_bytes(place) // 4:
            images = images.to(place)  # as in training, where crops stay on the GPU if they fit
        limit = fastest_step(net, size, place)
        few, few_labels = images[:CHECKED].to(place), labels[:CHECKED].to(place)
        wrong = fold_error(net, few[..., :FOLD_SIDE, :FOLD_SIDE], few_labels)
        if not wrong < FOLD_TOLERANCE:
            raise RuntimeError(
                f"the folded gradient differs from the plain one by {wrong:.0e} in float64"
            )
        plain = plain_gradient(net, few, few_labels)
        single: float | None = None
        for method in METHODS if gpu else CPU_METHODS:
            count = {SINGLE: min(batch, 64), COMPILED: batch}.get(method, min(batch, 512))
            step = make_step(method, net, micro_batch)
            row = measure_step(step, method, images[:count], labels[:count], updates, limit, plain)
            assert row.step is not None
            single = single or row.step
            minutes = ITERATIONS * batch / row.step / 60
            yield replace(row, ratio=row.step / single, minutes=minutes)
            del step


def measure_step(
    step: MultistageStep,
    method: str,
    images: Tensor,
    labels: Tensor,
    updates: int,
    limit: float,
    plain: Tensor,
) -> StepMeasurement:
    """Time a step and its passes; images [B, 3, H, W] and labels [B] are in memory."""
    device = step.forward().device
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    assert isinstance(step.micro_batch, int)
    passes(step.forward(), images, step.micro_batch, 1, backward=False)
    passes(step.forward(), images, step.micro_batch, 1, backward=True)
    first = time.perf_counter() - started
    repeats = max(1, min(8, len(images) // step.micro_batch))
    forward = passes(step.forward(), images, step.micro_batch, repeats, backward=False)
    both = passes(step.forward(), images, step.micro_batch, repeats, backward=True)
    error = gradient_error(step, images[:CHECKED], labels[:CHECKED], plain)
    rate = whole_steps(step, images, labels, updates)
    return StepMeasurement(
        method,
        measured=len(images),
        forward=forward,
        both=both,
        step=rate,
        peak_bytes=torch.cuda.max_memory_allocated(device) if gpu else 0,
        of_limit=rate / limit,
        gradient_error=error,
        first_seconds=first,
    )


def passes(
    forward: Forward, images: Tensor, micro_batch: int, repeats: int, *, backward: bool
) -> float:
    """Return the images per second through the network, in micro-batches of [B, 3, H, W]."""
    crops = torch.split(images[: repeats * micro_batch].to(forward.device), micro_batch)
    forward.refresh()
    started = synchronized_time(forward.device)
    count = 0
    with torch.set_grad_enabled(backward):
        for crop in crops:
            descriptors = forward(crop)
            if backward:
                forward.backward(descriptors, descriptors.detach())
            count += len(crop)
    seconds = synchronized_time(forward.device) - started
    forward.net.zero_grad()
    return count / seconds


def whole_steps(step: MultistageStep, images: Tensor, labels: Tensor, updates: int) -> float:
    """Return the images per second of steps with Adam; images [B, 3, H, W] on any device."""
    device = step.forward().device
    state = {name: value.clone() for name, value in step.net.state_dict().items()}
    optimizer = torch.optim.Adam(step.net.parameters(), lr=1e-6, fused=device.type == "cuda")
    small = min(len(images), 2 * int(step.micro_batch))
    # The first loss of a size may tune kernels, which the other 199 steps do not.
    first_loss(step, images, labels)
    for timed in (False, True):
        count = len(images) if timed else small
        started = synchronized_time(device)
        for _ in range(updates if timed else 1):
            optimizer.zero_grad(set_to_none=True)
            step(images[:count], labels[:count])
            optimizer.step()
        seconds = synchronized_time(device) - started
    step.net.load_state_dict(state)
    step.net.zero_grad()
    return updates * len(images) / seconds


def first_loss(step: MultistageStep, images: Tensor, labels: Tensor) -> None:
    """Compute the loss and gradient of random descriptors, as many as there are images."""
    forward = step.forward()
    with torch.no_grad():
        dim = forward.uncompiled(images[:1]).shape[1]
    descriptors = F.normalize(torch.randn(len(images), dim, device=forward.device), dim=1)
    descriptors.requires_grad_()
    torch.autograd.backward(step.loss(descriptors, labels.to(forward.device)))


def make_step(method: str, net: RetrievalNet, micro_batch: int) -> MultistageStep:
    """Return the step of a method."""
    if method == SINGLE:
        return MultistageStep(net, QuantizedAPLoss(), 1)
    if method in (PLAIN, FOLDED_FLOAT32):
        step = MultistageStep(net, QuantizedAPLoss(), micro_batch)
        step.forward().fold = method == FOLDED_FLOAT32
        return step
    if method == AUTOCAST:
        return MultistageStep(under_autocast(net), QuantizedAPLoss(), micro_batch)
    return MultistageStep(
        net, QuantizedAPLoss(), micro_batch, autocast=torch.bfloat16, compile=method == COMPILED
    )


def under_autocast(net: nn.Module) -> nn.Module:
    """The network in plain bfloat16 autocast, with channels last."""

    class UnderAutocast(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, images: Tensor) -> Tensor:
            images = images.contiguous(memory_format=torch.channels_last)
            with torch.autocast(images.device.type, torch.bfloat16):
                descriptors: Tensor = self.net(images)
            return descriptors

    return UnderAutocast()


def make_net(backbone: str, size: int, device: torch.device) -> RetrievalNet:
    """Return a network with random weights and realistic batch norm statistics."""
    torch.manual_seed(0)
    net = RetrievalNet(backbone, weights="random").to(device)
    for norm in [module for module in net.modules() if isinstance(module, _BatchNorm)]:
        if not norm.weight.any():
            # The last norm of a residual branch starts at zero. A GPU computes faster on zeros, and
            # with large values the gradient of a random network is mostly rounding.
            torch.nn.init.uniform_(norm.weight, 0.05, 0.1)
        torch.nn.init.normal_(norm.bias, -0.1, 0.1)
        norm.momentum = None  # the plain mean
        norm.reset_running_stats()
        norm.train()
    with torch.no_grad():
        net(make_batch(2 * CHECKED, min(size, 256))[0][:CHECKED].to(device))
    return net.train()


def make_batch(batch: int, size: int, pinned: bool = False) -> tuple[Tensor, Tensor]:
    """Generate crops uint8 [B, 3, size, size], similar within a class, and labels [B]."""
    generator = torch.Generator().manual_seed(0)
    kinds = min(batch, 64)  # repeated with other noise, because drawing takes longer than the step
    labels = torch.arange(batch) // CLASS_SIZE
    classes = torch.rand(kinds // CLASS_SIZE, 3, 6, 6, generator=generator)
    coarse = classes[labels[:kinds]] + 0.2 * torch.rand(kinds, 3, 6, 6, generator=generator)
    smooth = F.interpolate(coarse, (size, size), mode="bilinear")
    smooth += 0.1 * torch.randn(1, 3, size, size, generator=generator)
    patterns = (smooth.clamp(0, 1) * 255).to(torch.uint8)
    if pinned:
        patterns = patterns.cuda()  # moving gigabytes is faster on the GPU
    images = torch.empty(batch, 3, size, size, dtype=torch.uint8, pin_memory=pinned)
    for first in range(0, batch, kinds):
        part = images[first : first + kinds]
        # Shifted a little further each time, so that no two images are equal.
        part.copy_(patterns[: len(part)].roll(7 * (first // kinds), dims=2))
    return images, labels


def plain_gradient(net: RetrievalNet, images: Tensor, labels: Tensor) -> Tensor:
    """Return the gradient of one backward pass of the whole batch, as one vector."""
    net.zero_grad()
    torch.autograd.backward(QuantizedAPLoss()(net(images), labels))
    return _gradient(net)


def gradient_error(step: MultistageStep, images: Tensor, labels: Tensor, plain: Tensor) -> float:
    """Return the relative distance between the gradients of a step and of plain backpropagation."""
    step.net.zero_grad()
    step(images, labels)
    # If a batch is ranked perfectly, the gradient is only rounding.
    return float((_gradient(step.net) - plain).norm() / plain.norm().clamp(min=1e-9))


def fold_error(net: RetrievalNet, images: Tensor, labels: Tensor) -> float:
    """Return the relative distance between the folded and the plain gradient in float64."""
    wide = copy.deepcopy(net).double()
    plain = plain_gradient(wide, images, labels)
    return gradient_error(make_step(FOLDED, wide, CHECKED // 2), images, labels, plain)


def _gradient(net: nn.Module) -> Tensor:
    gradient = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    net.zero_grad()
    return gradient


@contextmanager
def exact_float32() -> Iterator[None]:
    """Compute float32 convolutions without rounding to TF32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def fastest_step(net: RetrievalNet, size: int, device: torch.device) -> float:
    """Return the images per second of a step whose convolutions all run at the machine's limits.

    The limits are the measured operations per second of a large bfloat16 product, and the measured
    bytes per second of a large copy.
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
    """Return the operations and the bfloat16 bytes of each convolution for one image."""
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
    """Return the mean seconds of a few runs, after two warm-up runs."""
    for _ in range(2):
        call()
    started = synchronized_time(device)
    for _ in range(repeats):
        call()
    return (synchronized_time(device) - started) / repeats


def synchronized_time(device: torch.device) -> float:
    """Return the time of a clock after the GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
