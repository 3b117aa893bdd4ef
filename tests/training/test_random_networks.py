"""Gradients of random networks of the user's own under `autocast=`, while the networks change.

The folded copy of a network computes in the precision of its layers: in float64 its gradients are
equal to those of ordinary backpropagation, whatever the network looks like.

15 networks by default, 2,000 with LISTWISE_SOAK=1 (`make soak`).
"""

import os
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from custom_parts import pairwise_loss
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import BatchNormAct2d
from torch import nn

from listwise.models import folding
from listwise.training import MultistageStep

SOAK = bool(os.environ.get("LISTWISE_SOAK"))
NETWORKS = 2_000 if SOAK else 15
WIDTH = 4
LAYERS = {
    "conv": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
    "conv without bias": lambda: nn.Conv2d(WIDTH, WIDTH, 1, bias=False),
    "grouped conv": lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=2),
    "norm": lambda: nn.BatchNorm2d(WIDTH),
    "norm without weights": lambda: nn.BatchNorm2d(WIDTH, affine=False),
    "norm with activation": lambda: BatchNormAct2d(WIDTH),
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "dropout": lambda: nn.Dropout(0.0),
    "gate": lambda: Gate(),
    "conv and norm": lambda: nn.Sequential(LAYERS["conv"](), LAYERS["norm"]()),
    "linear": lambda: Channels(),
}
CHANGES = (
    "weights",
    "statistics",
    "gates opened",
    "dropout",
    "hook",
    "pre-hook",
    "frozen",
    "layer replaced",
    "forward replaced",
    "weights shared",
    "eps",
)


@pytest.fixture(scope="module", autouse=True)
def as_on_a_gpu():
    """The first convolution, of three channels, becomes one of blocks of pixels."""
    with pytest.MonkeyPatch.context() as context:
        context.setattr(folding, "TENSOR_CORES", ("cpu",))
        yield


class Gate(nn.Module):
    """Multiplies by a learned number that is 0 at first."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, maps):
        return self.weight * maps


class Channels(nn.Module):
    """A linear layer over the channels."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, maps):
        return self.linear(maps.movedim(1, 3)).movedim(3, 1)


class Network(nn.Module):
    """Layers that each read the sum of some earlier values; a layer may be used several times.

    `plan` has for each call the number of the layer, the values that it reads, and whether the
    weights of the layer are read by other code too.
    """

    def __init__(self, layers, plan):
        super().__init__()
        self.first = nn.Conv2d(3, WIDTH, 3, 2, 1)
        self.layers = nn.ModuleList(LAYERS[name]() for name in layers)
        self.plan = plan

    def forward(self, images):
        values = [self.first(images / 255)]
        used = set()
        for number, sources, reads_weights in self.plan:
            layer = self.layers[number % len(self.layers)]
            places = sorted({place % len(values) for place in sources})
            used |= set(places)
            # Of one value, not a copy of it: so a norm can be the only reader of a convolution.
            given = values[places[0]] if len(places) == 1 else sum(values[i] for i in places)
            value = layer(given)
            if reads_weights and isinstance(layer, nn.Conv2d):
                value = value + layer.weight.mean()
            values.append(value)
        ends = [value for place, value in enumerate(values) if place not in used]
        pooled = torch.cat([value.mean((2, 3)) for value in ends], 1)
        return F.normalize(pooled + 0.1, dim=1)


networks = st.builds(
    Network,
    st.lists(st.sampled_from(list(LAYERS)), min_size=1, max_size=6),
    st.lists(
        st.tuples(
            st.integers(0, 5),
            # Often the value before, as most networks have it.
            st.just([-1]) | st.lists(st.integers(0, 9), min_size=1, max_size=3),
            st.sampled_from([False, False, False, True]),
        ),
        min_size=1,
        max_size=8,
    ),
)


def prepare(net, seed, dtype):
    """Random weights and statistics, as after training; gates stay closed."""
    torch.manual_seed(seed)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            renew_statistics(module)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()
    net.to(dtype).train()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return net


def renew_statistics(norm):
    nn.init.normal_(norm.running_mean, std=0.2)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    if norm.affine:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, std=0.2)


def change(net, kind, place):
    """Change a network as a user may do it between two updates."""
    layer = net.layers[place % len(net.layers)]
    inner = list(layer.modules())[-1]
    with torch.no_grad():
        if kind == "weights":
            for parameter in net.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        elif kind == "gates opened":
            for gate in net.modules():
                if isinstance(gate, Gate):
                    gate.weight.fill_(0.7)
    if kind == "statistics":
        for norm in net.modules():
            if isinstance(norm, nn.BatchNorm2d):
                renew_statistics(norm)
    elif kind == "dropout":
        for module in net.modules():
            if isinstance(module, nn.Dropout):
                module.p = 1.0  # the only other one without chance
    elif kind == "hook":
        inner.register_forward_hook(lambda module, given, output: 1.5 * output)
    elif kind == "pre-hook":
        inner.register_forward_pre_hook(lambda module, given: (given[0] + 0.3,))
    elif kind == "frozen":
        layer.requires_grad_(False)
    elif kind == "layer replaced":
        new = nn.Sequential(LAYERS["conv"](), LAYERS["norm"]()).to(net.first.weight.dtype)
        net.layers[place % len(net.layers)] = new.eval()
    elif kind == "forward replaced":
        original = inner.forward
        inner.forward = lambda maps: 0.5 * original(maps)
    elif kind == "weights shared":
        convs = [m for m in net.layers.modules() if isinstance(m, nn.Conv2d)]
        alike = [m for m in convs if m.weight.shape == convs[0].weight.shape]
        for conv in alike:
            conv.weight = alike[0].weight
    elif kind == "eps":
        for norm in net.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.eps = 0.5


def linear_loss(descriptors, labels):
    """A loss without a minimum, near which the errors of rounding would be all that is left."""
    generator = torch.Generator().manual_seed(2)
    return (descriptors * torch.randn(descriptors.shape, generator=generator)).sum()


def plain_gradients(net, images, labels, autocast=False, loss=pairwise_loss):
    """Ordinary backpropagation: the loss, and gradients by name."""
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        descriptors = net(images)
    value = loss(descriptors.to(images.dtype), labels)
    value.backward()
    return value.detach(), gradients(net)


def step_gradients(step, images, labels):
    step.net.zero_grad()
    return step(images, labels), gradients(step.net)


def gradients(net):
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def batch(dtype):
    generator = torch.Generator().manual_seed(1)
    images = 255 * torch.rand(5, 3, 8, 8, generator=generator, dtype=dtype)
    return images, torch.tensor([0, 0, 1, 1, 1])


def runs(net):
    """Whether ordinary backpropagation works: a layer that changes its input may prevent it."""
    images, labels = batch(net.first.weight.dtype)
    with suppress(RuntimeError):
        plain_gradients(net, images, labels)
        # Views and copies depend on the memory order, which the step chooses.
        plain_gradients(net, images.contiguous(memory_format=torch.channels_last), labels)
        return True
    return False


@settings(max_examples=NETWORKS, derandomize=not SOAK)
@given(
    net=networks,
    seed=st.integers(0, 999),
    micro_batch=st.sampled_from([2, 5]),
    changes=st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 5)), max_size=3),
)
def test_the_gradient_stays_exact_while_the_network_changes(net, seed, micro_batch, changes):
    prepare(net, seed, torch.float64)
    images, labels = batch(torch.float64)
    step = MultistageStep(net, pairwise_loss, micro_batch, autocast=torch.bfloat16)
    for kind, place in [("none", 0), *changes]:
        change(net, kind, place)
        if not any(p.requires_grad for p in net.parameters()) or not runs(net):
            return
        value, expected = plain_gradients(net, images, labels)
        found_value, found = step_gradients(step, images, labels)
        torch.testing.assert_close(found_value, value, rtol=1e-9, atol=1e-12)
        largest = max((g.abs().max().item() for g in expected.values()), default=0.0)
        for name, gradient in expected.items():
            actual = found.get(name, torch.zeros_like(gradient))
            wrong = (actual - gradient).abs().max().item()
            assert wrong <= 1e-8 * max(largest, 1e-4), (kind, name, wrong)
        assert found.keys() <= expected.keys()


@settings(max_examples=NETWORKS // 3, derandomize=not SOAK)
@given(net=networks, seed=st.integers(0, 999))
def test_bfloat16_is_as_near_as_under_autocast(net, seed):
    prepare(net, seed, torch.float32)
    change(net, "gates opened", 0)
    images, labels = batch(torch.float32)
    if not runs(net):
        return
    exact, usual = (
        plain_gradients(net, images, labels, autocast, linear_loss)[1] for autocast in (False, True)
    )
    step = MultistageStep(net, linear_loss, 5, autocast=torch.bfloat16)
    _, ours = step_gradients(step, images, labels)
    whole, *errors = (
        torch.cat([found[name].flatten() for name in exact]) for found in (exact, ours, usual)
    )
    error, usual_error = ((found - whole).norm() for found in errors)
    assert error <= 2 * usual_error + 0.05 * whole.norm()
