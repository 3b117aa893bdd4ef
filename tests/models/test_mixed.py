"""Photos of different shapes in one batch have the descriptors that they have alone."""

import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import nn

from listwise.machine import shared_cores
from listwise.models import POOLINGS, RetrievalNet, folding
from listwise.models.areas import FUSED, OwnAreas, UnsupportedNetwork
from listwise.models.backbone import create_backbone
from listwise.models.embed import MIXED, PhotoNet, inference_network
from listwise.models.folding import make_folded_copy
from listwise.models.mixed import MixedNet, is_plain_resnet, mixes

pytestmark = pytest.mark.slow

# Odd and even sides, photos that fill their canvas along one side, along both, and by little.
SIZES = [(64, 96), (64, 43), (38, 96), (33, 67), (51, 34)]


@pytest.fixture(autouse=True)
def sleeping_threads():
    with shared_cores():
        yield


def double(backbone, pooling="gem"):
    torch.manual_seed(0)
    weights = "random" if isinstance(backbone, str) else "auto"
    net = RetrievalNet(backbone, pooling, weights=weights).double().eval()
    with torch.no_grad():
        for parameter in net.backbone.parameters():  # also those that start at zero
            parameter.add_(0.05 * torch.randn_like(parameter))
    return net


def canvases(sizes, height=None, width=None):
    """Photos of random pixels in larger canvases of random pixels, uint8."""
    generator = torch.Generator().manual_seed(1)
    height = height or max(high for high, _ in sizes)
    width = width or max(wide for _, wide in sizes)
    shape = len(sizes), 3, height, width
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


@torch.no_grad()
def alone(net, photos, sizes):
    return torch.cat(
        [net(photo[None, :, :h, :w]) for photo, (h, w) in zip(photos, sizes, strict=True)]
    )


@torch.no_grad()
def largest_difference(net, photos, sizes):
    return float((MixedNet(net)(photos, sizes) - alone(net, photos, sizes)).abs().max())


# The layers of known networks with few channels, which are much faster in float64.
NARROW = {
    "narrow resnet26d": {"layers": (1, 1, 1, 1), "channels": (16, 16, 32, 32)},
    "narrow convnext_atto": {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)},
}


def named(backbone):
    """A network in float64 by its name in timm, or in `NARROW`."""
    if backbone not in NARROW:
        return double(backbone)
    torch.manual_seed(0)
    return double(create_backbone(backbone.removeprefix("narrow "), **NARROW[backbone]))


# A thorough run has more examples; these networks are too slow for the usual number.
FEW = settings.default.max_examples // 5


@pytest.mark.parametrize(
    "backbone",
    [
        pytest.param("resnet18", marks=pytest.mark.thorough),
        # means over windows that cross the border of odd photos
        "narrow resnet26d",
        pytest.param("resnet26d", marks=pytest.mark.thorough),
        pytest.param("efficientnet_lite0", marks=pytest.mark.thorough),
        "tf_efficientnet_lite0",  # padding that depends on the size of the photo
        # windows without padding, which leave out the last row of odd photos
        "narrow convnext_atto",
        pytest.param("convnext_atto", marks=pytest.mark.thorough),
        pytest.param("mobilenetv2_050", marks=pytest.mark.thorough),
        "mobilenetv3_small_050",  # means over whole photos (squeeze and excite)
        "test_efficientnet.r160_in1k",
    ],
)
def test_descriptors_are_those_of_one_photo_at_a_time(backbone):
    net = named(backbone)
    assert mixes(net)
    assert largest_difference(net, canvases(SIZES), SIZES) < 1e-12
    some = SIZES[1:4]
    assert largest_difference(net, canvases(some, 112, 99), some) < 1e-12


def small_resnet(block, **options):
    backbone = ResNet(block, [2, 1, 1, 1], 0, channels=(8, 8, 16, 16), global_pool="", **options)
    return double(backbone)


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_published_resnets_need_no_trial(block):
    net = small_resnet(block)
    assert is_plain_resnet(net)
    assert largest_difference(net, canvases(SIZES), SIZES) < 1e-12
    net.backbone.layer2.register_forward_hook(lambda part, inputs, output: output.flip(2))
    assert not is_plain_resnet(net)
    assert not mixes(net)


def test_other_resnets_need_a_trial():
    reflecting = small_resnet(BasicBlock)
    reflecting.backbone.layer1[0].conv1.padding_mode = "reflect"
    flipping = small_resnet(BasicBlock)
    features = flipping.backbone.forward_features
    flipping.backbone.forward_features = lambda images: features(images.flip(2))
    assert not mixes(flipping)
    for net in (
        reflecting,
        flipping,
        small_resnet(Bottleneck, block_args={"attn_layer": "se"}),
        small_resnet(BasicBlock, avg_down=True),
        double("test_convnext.r160_in1k"),
    ):
        assert not is_plain_resnet(net)


@pytest.mark.parametrize("pooling", sorted(POOLINGS))
def test_every_pooling_covers_the_photo_alone(pooling):
    net = double("test_resnet.r160_in1k", pooling)
    assert mixes(net)
    assert largest_difference(net, canvases(SIZES, 128, 160), SIZES) < 1e-12


@pytest.fixture(scope="module", params=["test_resnet.r160_in1k", "test_convnext.r160_in1k"])
def small(request):
    return double(request.param)


side = st.integers(33, 80)


@settings(max_examples=FEW, deadline=None)
@given(sizes=st.lists(st.tuples(side, side), min_size=1, max_size=5), more=st.integers(0, 70))
def test_any_shapes(small, sizes, more):
    height, width = (max(sides) for sides in zip(*sizes, strict=True))
    assert largest_difference(small, canvases(sizes, height + more, width), sizes) < 1e-12


class Padded(nn.Module):
    """A network with every supported option of poolings and convolutions."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), *layers)

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize(
    "layers",
    [
        (nn.MaxPool2d(3, 2, 1),),  # of negative values too
        (nn.MaxPool2d(3, 2, 1, ceil_mode=True),),
        (nn.MaxPool2d(2, ceil_mode=True), nn.Conv2d(8, 8, 3, padding=1)),
        (nn.MaxPool2d(3, 1, 1, dilation=2),),
        (nn.AvgPool2d(3, 2, 1),),
        (nn.AvgPool2d(3, 2, 1, count_include_pad=False),),
        (nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),),
        (nn.AvgPool2d(2, ceil_mode=True), nn.Conv2d(8, 8, 5, padding=2)),
        (nn.AvgPool2d(3, 2),),
        (nn.Conv2d(8, 8, (1, 5), padding=(0, 4), dilation=2, groups=4),),
        (nn.Conv2d(8, 8, 4, padding="same"), nn.Conv2d(8, 8, 2, padding="valid")),
        (nn.Conv2d(8, 8, 2, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=3)),
    ],
    ids=str,
)
def test_options_of_layers(layers):
    net = double(Padded(*layers), "spoc")
    assert mixes(net)
    assert largest_difference(net, canvases(SIZES, 150, 140), SIZES) < 1e-12


class Residual(nn.Module):
    """Sums and activations in every order, some of which can be part of a convolution."""

    def __init__(self, inplace):
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.act = nn.ReLU(inplace=inplace)

    def forward(self, x):
        shortcut = self.second(x)
        y = self.second(self.act(self.first(x)))
        y += shortcut
        y = self.act(y)
        z = self.first(y)
        both = z.relu() + z  # what is activated is used again
        both += both
        last = self.first(both)
        last += last
        last += y
        last += both
        short = self.first(both)
        longer = self.second(y)
        short += longer  # both are convolutions
        short = self.act(short)
        y += self.second(short)  # only the second is one
        left = self.second(y)
        right = self.second(short)
        left += right
        last += left + right  # used again, and not activated
        return torch.cat([last, self.second(last)], dim=1)


@pytest.mark.parametrize("inplace", [True, False])
def test_bias_sum_and_activation_in_one_pass(inplace, monkeypatch):
    layers = Residual(inplace), nn.Conv2d(16, 8, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)
    net = double(Padded(*layers, Residual(inplace)), "spoc")
    expected = alone(net, canvases(SIZES), SIZES)
    monkeypatch.setitem(FUSED, "cpu", True)
    finished = []
    finish = OwnAreas._finish

    def spy(self, output, unfinished, relu):
        finished.append((unfinished.other is not None, relu))
        return finish(self, output, unfinished, relu)

    monkeypatch.setattr(OwnAreas, "_finish", spy)
    with torch.no_grad():
        found = MixedNet(net)(canvases(SIZES), SIZES)
    assert (found - expected).abs().max() < 1e-12
    fused = {(True, True), (False, True)} if inplace else {(False, True)}
    assert fused <= set(finished)


@pytest.mark.parametrize("backbone", ["test_resnet.r160_in1k", "narrow resnet26d"])
def test_a_resnet_in_one_pass(backbone, monkeypatch):
    monkeypatch.setitem(FUSED, "cpu", True)
    assert largest_difference(named(backbone), canvases(SIZES), SIZES) < 1e-12


class Enlarging(nn.Module):
    def forward(self, x):
        return F.interpolate(x, scale_factor=2.0, mode="bilinear")


class Gated(nn.Module):
    """Adds an operation that is not supported, times zero as long as it is not trained."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.gate * x.norm(dim=(2, 3), keepdim=True)


@pytest.mark.parametrize(
    "layer",
    [
        Enlarging(),
        Gated(),
        nn.InstanceNorm2d(8),
        nn.ReflectionPad2d(1),
        nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
        nn.AvgPool2d(3, 2, 1, ceil_mode=True),
        nn.AdaptiveAvgPool2d(7),
    ],
    ids=str,
)
def test_other_networks_are_found_by_a_trial(layer):
    assert not mixes(double(Padded(layer, nn.Conv2d(8, 8, 3, padding=1)), "spoc"))


def test_a_network_that_cannot_be_copied_is_not_mixed():
    class Single(nn.Conv2d):
        def __deepcopy__(self, memo):
            raise RuntimeError("there can be only one")

    torch.manual_seed(0)
    assert not mixes(RetrievalNet(Padded(Single(8, 8, 3)), "spoc"))


@pytest.mark.parametrize("backbone", ["test_vit.r160_in1k", "test_resnet.r160_in1k"])
@torch.no_grad()
def test_photos_of_any_shape_are_computed_one_way_or_the_other(backbone, monkeypatch):
    # The position embedding of a vision transformer depends on the size of each photo.
    monkeypatch.setitem(MIXED, "cpu", True)
    net = double(backbone)
    photo_net = PhotoNet(net, None)
    assert photo_net.mixed is (backbone == "test_resnet.r160_in1k")
    photos = canvases(SIZES)
    found = photo_net(photos, SIZES)
    assert (found - alone(net, photos, SIZES)).abs().max() < 1e-12


@torch.no_grad()
def test_photos_smaller_than_a_kernel_are_computed_alone(monkeypatch):
    monkeypatch.setitem(MIXED, "cpu", True)
    net = double(Padded(nn.Conv2d(8, 8, 7)), "spoc")
    sizes = [(13, 40), (30, 40)]  # 1 row and 9 rows remain
    photos = canvases(sizes)
    assert (PhotoNet(net, None)(photos, sizes) - alone(net, photos, sizes)).abs().max() < 1e-12
    warned = pytest.warns(UserWarning, match="some photos are described one at a time")
    with pytest.raises(UnsupportedNetwork, match="smaller than a kernel"):
        MixedNet(net)(photos, [(12, 40), (30, 40)])
    with warned, pytest.raises(RuntimeError, match=r"[Kk]ernel size"):
        PhotoNet(net, None)(photos, [(12, 40), (30, 40)])


class NarrowResNet(nn.Module):
    """The layers of a ResNet-18, its first one of 7 × 7 pixels among them, with few channels."""

    def __init__(self):
        super().__init__()
        options = {"layers": (1, 1, 1, 1), "channels": (16, 16, 32, 32), "num_classes": 0}
        self.net = timm.create_model("resnet18", **options)

    def forward(self, x):
        return self.net.forward_features(x)


def first_channels(net):
    """The input channels of the first convolution: 3, or more where it reads blocks of pixels."""
    return next(part for part in net.modules() if isinstance(part, nn.Conv2d)).in_channels


@pytest.mark.parametrize(
    ("backbone", "fused"),
    [
        ("test_resnet.r160_in1k", False),
        ("test_resnet.r160_in1k", True),
        (NarrowResNet, True),
        ("test_efficientnet.r160_in1k", False),
    ],
)
@torch.no_grad()
def test_half_precision_is_as_close_as_alone(backbone, fused, monkeypatch, mixed_batches):
    # The network for half precision has other layers: folded, and on a GPU a first one of blocks.
    monkeypatch.setattr(folding, "TENSOR_CORES", ("cpu",))
    monkeypatch.setitem(FUSED, "cpu", fused)
    monkeypatch.setattr(PhotoNet, "_alone", None)  # no batch may be computed photo by photo
    torch.manual_seed(0)
    net = RetrievalNet(backbone, weights="random") if isinstance(backbone, str) else None
    net = (net or RetrievalNet(backbone())).eval()
    sizes = SIZES[3:]  # few, because half precision is slow on a CPU
    photos = canvases(sizes)
    half, single = PhotoNet(net, torch.bfloat16), inference_network(net, torch.bfloat16)
    assert first_channels(single) == folding.BLOCK_CHANNELS
    with torch.autocast("cpu", torch.bfloat16):
        found = half(photos, sizes)
        expected = alone(single, photos, sizes)
    assert len(mixed_batches) == 1
    assert (found * expected).sum(1).min() > 0.9999
    assert (found * alone(net, photos, sizes)).sum(1).min() > 0.999


@pytest.mark.parametrize("backbone", ["test_resnet.r160_in1k", "mobilenetv2_050"])
@torch.no_grad()
def test_the_folded_network_is_exact_in_float64(backbone, monkeypatch):
    monkeypatch.setattr(folding, "TENSOR_CORES", ("cpu",))  # as on a GPU
    net = double(backbone)
    folded = make_folded_copy(net, torch.rand(1, 3, 64, 64), torch.bfloat16).module.eval()
    folded.double()
    assert first_channels(folded) == folding.BLOCK_CHANNELS
    assert largest_difference(folded, canvases(SIZES), SIZES) < 1e-12


def test_weights_are_shared():
    net = double("test_resnet.r160_in1k")
    mixed = MixedNet(net)
    photos = canvases(SIZES)
    with torch.no_grad():
        before = mixed(photos, SIZES)
        next(net.backbone.parameters()).mul_(-1)
        after = mixed(photos, SIZES)
    assert (before - after).abs().max() > 1e-3
    assert (after - alone(net, photos, SIZES)).abs().max() < 1e-12


@torch.jit.script
def squared(x: torch.Tensor) -> torch.Tensor:
    return x * x


class Scripted(nn.Module):
    """Reads the output of a convolution where nobody can observe it."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        nn.init.uniform_(self.norm.bias, 1, 2)

    def forward(self, x):
        return squared(self.norm(self.conv(x)))


def test_a_trial_of_the_folded_network_finds_what_reads_a_waiting_bias():
    net = RetrievalNet(Scripted(), "spoc").eval()
    assert mixes(net)
    assert not mixes(net, folded=True)
    assert mixes(RetrievalNet("test_resnet.r160_in1k", weights="random"), folded=True)
