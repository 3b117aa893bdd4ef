"""Photos of different shapes in one batch have the descriptors that they have alone."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import Conv2dSame
from torch import nn

from listwise.models import POOLINGS, RetrievalNet
from listwise.models.areas import UnsupportedNetwork
from listwise.models.backbone import create_backbone
from listwise.models.embed import MIXED, PhotoNet
from listwise.models.mixed import MixedNet, is_plain_resnet, mixes

pytestmark = pytest.mark.slow

# Odd and even sides, photos that fill their canvas along one side, along both, and by little.
SIZES = [(64, 96), (64, 43), (38, 96), (33, 67), (51, 34)]


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


def test_a_resnet_as_published_needs_no_trial():
    net = named("resnet18")
    assert is_plain_resnet(net)
    assert largest_difference(net, canvases(SIZES), SIZES) < 1e-12
    net.backbone.layer1[0].register_forward_hook(lambda module, inputs, output: output.flip(3))
    assert not is_plain_resnet(net)
    assert not mixes(net)
    assert not is_plain_resnet(named("test_efficientnet.r160_in1k"))


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
        (nn.Conv2d(8, 8, 2, padding="valid"),),
        (nn.Conv2d(8, 8, 2, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=3)),
    ],
    ids=str,
)
def test_options_of_layers(layers):
    net = double(Padded(*layers), "spoc")
    assert mixes(net)
    assert largest_difference(net, canvases(SIZES, 150, 140), SIZES) < 1e-12


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


class Scaled(nn.Module):
    """Adds what depends on the whole photo, times a small number per channel, or one in all."""

    def __init__(self, scale):
        super().__init__()
        self.scale = nn.Parameter(scale)

    def forward(self, x):
        return x + self.scale * x.std(dim=(2, 3), keepdim=True)


class Excited(nn.Module):
    """Multiplies channels by a function of their largest values, or of the norm, or of flatness."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        match self.kind:
            case "amax":
                found = x.amax((2, 3), keepdim=True)
            case "adaptive":
                found = F.adaptive_max_pool2d(x, 1)
            case "topk":
                found = x.flatten(2).topk(1).values[..., None]
            case "norm":
                found = F.lp_pool2d(x, 2, x.shape[2:])
            case "saturated":
                return x * F.hardsigmoid(x.std((2, 3), keepdim=True) - 10)
            case "branch":
                return x + 1 if (x.flatten(2).diff().abs().mean((1, 2)) < 0.1).any() else x
        return x * torch.sigmoid(found)

    def extra_repr(self):
        return self.kind


@pytest.mark.parametrize(
    "layer",
    [
        Enlarging(),
        Gated(),
        *map(Excited, ("amax", "adaptive", "topk", "norm", "saturated", "branch")),
        *(Scaled(torch.full(shape, 1e-6)) for shape in ((8, 1, 1), (1, 8, 1, 1), ())),
        nn.InstanceNorm2d(8),
        nn.ReflectionPad2d(1),
        nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"),
        nn.AvgPool2d(3, 2, 1, ceil_mode=True),
        nn.AdaptiveAvgPool2d(7),
        Conv2dSame(8, 8, 3, 2),  # padding that depends on the size of the photo
    ],
    ids=str,
)
def test_other_networks_are_found_by_a_trial(layer):
    assert not mixes(double(Padded(layer, nn.Conv2d(8, 8, 3, padding=1)), "spoc"))


@pytest.mark.parametrize("name", ["edgenext_xx_small", "fastvit_sa12"])
def test_attention_behind_a_small_layer_scale_is_found(name):
    assert not mixes(named(name))


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
