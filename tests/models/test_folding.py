"""A network with folded batch norm has the descriptors and gradients of the network itself."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from timm.layers import BatchNormAct2d
from tiny_net import trained
from torch import nn

from listwise.models import RetrievalNet
from listwise.models.backbone import create_backbone
from listwise.models.folding import FoldedConv, FoldedCopy, Folding, in_blocks


def photos(count: int, side: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    coarse = torch.rand(count, 3, 4, 4, generator=generator)
    return (F.interpolate(coarse, (side, side), mode="bilinear") * 255).to(torch.uint8)


def run(net, images, autocast=False):
    """Compute descriptors, and the gradients of the parameters in a random direction."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        descriptors = net(images)
    generator = torch.Generator().manual_seed(2)
    direction = torch.randn(descriptors.shape, generator=generator)
    torch.autograd.backward(descriptors, direction.to(descriptors.dtype))
    return descriptors.detach()


def gradients(net):
    found = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    return found


def check(net: nn.Module, images: torch.Tensor, folding: Folding | None = None) -> int:
    """Compare a network in float64 with its folding, in training and inference; count the pairs."""
    folding = folding or Folding(net)
    folding.refresh()
    layers = dict(net.named_modules(remove_duplicate=False))
    descriptors = run(net, images)
    expected = gradients(net)
    with folding.folded():
        torch.testing.assert_close(run(net, images), descriptors, rtol=1e-9, atol=1e-11)
    assert dict(net.named_modules(remove_duplicate=False)) == layers
    found = gradients(net)
    assert found.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-9 * largest)
    with torch.no_grad():
        copy = FoldedCopy(net)
        torch.testing.assert_close(copy.net(images), descriptors, rtol=1e-9, atol=1e-11)
        for tensor in (*net.parameters(), *net.buffers()):
            if tensor.is_floating_point():
                tensor.mul_(1.25)
        copy.refresh()
        torch.testing.assert_close(copy.net(images), net(images), rtol=1e-9, atol=1e-11)
    return len(folding.pairs)


@given(
    bias=st.booleans(),
    affine=st.booleans(),
    groups=st.sampled_from([1, 2]),
    stride=st.sampled_from([1, 2]),
    padding=st.sampled_from([0, 1]),
    seed=st.integers(0, 2**32 - 1),
)
def test_one_convolution_computes_what_both_layers_do(bias, affine, groups, stride, padding, seed):
    torch.manual_seed(seed)
    conv = nn.Conv2d(4, 6, 3, stride, padding, groups=groups, bias=bias).double()
    norm = trained(nn.BatchNorm2d(6, eps=0.01, affine=affine).double())
    images = torch.randn(2, 4, 7, 7, dtype=torch.float64)
    torch.testing.assert_close(FoldedConv(conv, norm)(images), norm(conv(images)))
    assert check(nn.Sequential(conv, norm, nn.Flatten()), images) == 1


@given(
    sides=st.tuples(st.integers(8, 20), st.integers(8, 20)),
    window=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_a_stride_of_two_is_a_convolution_of_blocks(sides, window, padding):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, *sides, dtype=torch.float64, generator=generator)
    weight = torch.randn(4, 3, *window, dtype=torch.float64, generator=generator)
    expected = F.conv2d(images, weight, stride=2, padding=padding)
    torch.testing.assert_close(F.conv2d(*in_blocks(images, weight, padding)), expected)


def narrow(name):
    """A timm model with few channels; some have options of their own for that."""
    options = {
        "resnet26d": {"layers": (1, 1, 1, 1), "channels": (16, 16, 32, 32)},
        "resnet18": {"layers": (1, 1, 1, 1), "channels": (8, 8, 16, 16)},
    }
    return create_backbone(name, **options.get(name, {}))


BACKBONES = [
    "test_resnet",  # a deep stem
    "resnet18",
    "resnet26d",  # means before the convolutions of shortcuts
    "tf_efficientnet_lite0",  # padding that depends on the size of the photo
    "mobilenetv3_small_050",  # squeeze and excitation
    "test_efficientnet",  # blocks without depthwise convolutions
    "regnetx_002",
]


@pytest.mark.slow
@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_batch_norm_of_a_known_network_is_folded(backbone):
    torch.manual_seed(0)
    net = RetrievalNet(narrow(backbone), projection=5).double()
    norms = [part for part in trained(net).modules() if isinstance(part, nn.BatchNorm2d)]
    assert check(net.train(), photos(2)) == len(norms) > 3


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["test_convnext", "test_vit"])
def test_a_network_without_batch_norm_stays_as_it_is(backbone):
    net = RetrievalNet(backbone, weights="random").double()
    assert check(net.eval(), photos(2, 160)) == 0


class Custom(nn.Module):
    """A class that the folding does not know, around layers that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
        self.gate = nn.Parameter(torch.zeros(()))  # hides the second reader before it is trained

    def forward(self, images):
        return (self.layers(images) + self.gate * self.layers[0](images)).mean((2, 3))


def test_nothing_in_a_module_of_another_class_is_folded():
    torch.manual_seed(0)
    net = trained(nn.Sequential(Custom()).double())
    assert check(net, torch.rand(2, 3, 5, 5, dtype=torch.float64)) == 0


def sequence():
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
    net = nn.Sequential(nn.Conv2d(3, 3, 1), conv, norm, nn.ReLU(), nn.Flatten()).double()
    return trained(net)


CHANGES = {
    "the convolution is used twice": lambda net: net.__setitem__(0, net[1]),
    "the norm is used twice": lambda net: net.insert(1, net[2]),
    "batch norm is not frozen": lambda net: net[2].train(),
    "a hook": lambda net: net[1].register_forward_hook(lambda conv, given, made: 2 * made),
    "a pre-hook": lambda net: net[2].register_forward_pre_hook(lambda norm, given: given[0] + 1),
    "a backward hook": lambda net: net[2].register_full_backward_hook(lambda *_: None),
    "a replaced method": lambda net: setattr(net[1], "forward", lambda maps: 0.5 * maps),
    "another padding": lambda net: setattr(net[1], "padding_mode", "reflect"),
    "another layer": lambda net: net.__setitem__(2, nn.InstanceNorm2d(3).double()),
    "no statistics": lambda net: net.__setitem__(2, nn.BatchNorm2d(3, track_running_stats=False)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_network_are_taken_into_account(change):
    net, images = sequence(), torch.rand(2, 3, 5, 5, dtype=torch.float64)
    folding = Folding(net)
    assert check(net, images, folding) == 1
    CHANGES[change](net.double())
    net.double()
    folding.refresh()
    assert folding.pairs == []
    with folding.folded():
        layers = list(net)
    assert layers == list(net)


def test_the_weights_of_the_moment_are_used():
    net, images = sequence(), torch.rand(2, 3, 5, 5, dtype=torch.float64)
    folding = Folding(net)
    for _ in range(2):
        assert check(net, images, folding) == 1
        with torch.no_grad():
            for tensor in (*net.parameters(), net[2].running_mean):
                tensor.add_(0.1)
        net[2].eps = 0.5
        net[1].requires_grad_(False)  # frozen parameters get no gradient
        net[2].bias.requires_grad_(False)


def test_activation_and_dropout_of_a_norm_stay():
    norm = BatchNormAct2d(4, drop_layer=lambda: nn.Dropout(0.9))
    net = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Flatten()).double()
    images = torch.rand(2, 3, 5, 5, dtype=torch.float64)
    assert check(trained(net), images) == 1
    norm.drop.train()
    with Folding(net).folded():
        assert (net(images) == 0).double().mean() > 0.5
