"""Gradients of random networks of the user's own under `autocast=`, while the networks change.

Folded convolutions compute in the precision of their layers: in float64 their gradients are equal
to those of ordinary backpropagation, whatever the network looks like.

15 networks by default, 2,000 with LISTWISE_SOAK=1 (`make soak`).
"""

import os

import torch
import torch.nn.functional as F
from custom_parts import pairwise_loss
from hypothesis import given, settings
from hypothesis import strategies as st
from step_examples import gradients, ordinary
from timm.layers import BatchNormAct2d
from torch import nn

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
    "block": lambda: nn.Sequential(LAYERS["conv"](), LAYERS["norm"](), nn.ReLU(inplace=True)),
}


class Network(nn.Module):
    """Layers one after the other; neighbors may be folded."""

    def __init__(self, layers):
        super().__init__()
        self.first = nn.Conv2d(3, WIDTH, 3, 2, 1)
        self.layers = nn.Sequential(*(LAYERS[name]() for name in layers))

    def forward(self, images):
        maps = self.layers(self.first(images / 255))
        return F.normalize(maps.mean((2, 3)) + 0.1, dim=1)


networks = st.builds(Network, st.lists(st.sampled_from(list(LAYERS)), min_size=1, max_size=8))


def prepare(net, seed):
    """Random weights and statistics, as after training."""
    torch.manual_seed(seed)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            renew_statistics(module)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()
    net.double().train()
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


def change_weights(net, place):
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def change_statistics(net, place):
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm2d):
            renew_statistics(norm)
            norm.eps = 0.5


def add_hooks(net, place):
    last = [*net.layers[place].modules()][-1]
    last.register_forward_hook(lambda module, given, output: 1.5 * output)
    last.register_forward_pre_hook(lambda module, given: (given[0] + 0.3,))


def freeze(net, place):
    net.layers[place].requires_grad_(False)


def replace_layer(net, place):
    net.layers[place] = LAYERS["block"]().double().eval()


def replace_forward(net, place):
    last = [*net.layers[place].modules()][-1]
    original = last.forward
    last.forward = lambda maps: 0.5 * original(maps)


CHANGES = (change_weights, change_statistics, add_hooks, freeze, replace_layer, replace_forward)


@settings(max_examples=NETWORKS, derandomize=not SOAK)
@given(
    net=networks,
    seed=st.integers(0, 999),
    micro_batch=st.sampled_from([2, 5]),
    changes=st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 5)), max_size=3),
)
def test_the_gradient_stays_exact_while_the_network_changes(net, seed, micro_batch, changes):
    prepare(net, seed)
    generator = torch.Generator().manual_seed(1)
    images = 255 * torch.rand(5, 3, 8, 8, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 0, 1, 1, 1])
    step = MultistageStep(net, pairwise_loss, micro_batch, autocast=torch.bfloat16)
    for change, place in [(change_weights, 0), *changes]:
        change(net, place % len(net.layers))
        value, expected = ordinary(net, lambda d, y, weights: pairwise_loss(d, y), images, labels)
        found_value, found = step(images, labels), gradients(net)
        torch.testing.assert_close(found_value, value, rtol=1e-9, atol=1e-12)
        largest = max(gradient.abs().max().item() for gradient in expected.values())
        for name, gradient in expected.items():
            actual = found.get(name, torch.zeros_like(gradient))
            wrong = (actual - gradient).abs().max().item()
            assert wrong <= 1e-8 * max(largest, 1e-4), (change, name, wrong)
        assert found.keys() <= expected.keys()
