import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from timm.layers import BatchNormAct2d, Conv2dSame
from torch import nn

from listwise.models import RetrievalNet, folding
from listwise.models.folding import FoldedCopy, folded, folds_hold
from listwise.models.survey import Fold, survey

pytestmark = pytest.mark.slow  # each compares several networks


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(net: nn.Module) -> nn.Module:
    """The network with batch norms that do something, as after training."""
    torch.manual_seed(1)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 2)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, std=0.2)
    return net.eval()


def make_net(
    backbone: str | nn.Module, dtype: torch.dtype = torch.float64, **options
) -> RetrievalNet:
    torch.manual_seed(0)
    weights = "random" if isinstance(backbone, str) else "auto"
    net = RetrievalNet(backbone, weights=weights, **options).to(dtype)
    trained(net)
    return net.train()


def photos(count: int, side: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    coarse = torch.rand(count, 3, 4, 4, generator=generator)
    return (F.interpolate(coarse, (side, side), mode="bilinear") * 255).to(torch.uint8)


def through_copy(folded_copy: FoldedCopy, parts, cotangents, half=True) -> None:
    """Forward and backward of some micro-batches, and what they came to given back."""
    folded_copy.refresh()
    for images, cotangent in zip(parts, cotangents, strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            descriptors = folded_copy.module(images.contiguous(memory_format=torch.channels_last))
        torch.autograd.backward(descriptors, cotangent.to(descriptors.dtype))
        folded_copy.collect()
    folded_copy.add_gradients()


def gradients(net):
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def compare(net, images, tolerance, micro_batch=2):
    """Gradients of the network itself and of its folded_copy, by a random direction."""
    folded_copy = FoldedCopy(net, images[:1], torch.bfloat16)
    direction = torch.randn(len(images), net.dim, generator=torch.Generator().manual_seed(2))
    net.zero_grad()
    plain = net(images)
    torch.autograd.backward(plain, direction.to(plain.dtype))
    expected = gradients(net)
    net.zero_grad()
    through_copy(folded_copy, images.split(micro_batch), direction.split(micro_batch))
    actual = gradients(net)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        assert actual[name].dtype == gradient.dtype
    flat = torch.cat([g.flatten() for g in expected.values()])
    found = torch.cat([actual[name].flatten() for name in expected])
    assert (found - flat).norm() <= tolerance * flat.norm()
    return folded_copy


@given(
    bias=st.booleans(),
    affine=st.booleans(),
    groups=st.sampled_from([1, 2]),
    stride=st.sampled_from([1, 2]),
    padding=st.sampled_from([0, 1]),
    seed=st.integers(0, 2**32 - 1),
)
def test_one_convolution_does_what_the_two_do(bias, affine, groups, stride, padding, seed):
    torch.manual_seed(seed)
    conv = nn.Conv2d(4, 6, 3, stride, padding, groups=groups, bias=bias).double()
    norm = trained(nn.BatchNorm2d(6, eps=0.01, affine=affine).double())
    images = torch.randn(2, 4, 7, 7, dtype=torch.float64)
    (weight,), (shift,) = folded([(conv, norm)])
    actual = F.conv2d(images, weight, shift, stride, padding, groups=groups)
    torch.testing.assert_close(actual, norm(conv(images)), rtol=1e-10, atol=1e-12)


def test_gradients_through_the_fold_are_the_formulas():
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(3, 5, 3).double(), trained(nn.BatchNorm2d(5).double())
    (weight,), (bias,) = folded([(conv, norm)])
    by_weight, by_bias = torch.randn_like(weight), torch.randn_like(bias)
    torch.autograd.backward([weight, bias], [by_weight, by_bias])
    deviation = (norm.running_var + norm.eps).sqrt()
    scale = norm.weight.detach() / deviation
    with torch.no_grad():
        along = (by_weight * conv.weight).sum((1, 2, 3))
        gamma = (along + by_bias * (conv.bias - norm.running_mean)) / deviation
    torch.testing.assert_close(conv.weight.grad, by_weight * scale[:, None, None, None])
    torch.testing.assert_close(conv.bias.grad, by_bias * scale)
    torch.testing.assert_close(norm.weight.grad, gamma)
    torch.testing.assert_close(norm.bias.grad, by_bias)


BACKBONES = [
    "test_resnet",
    "tf_efficientnet_lite0",
    pytest.param("resnet18", marks=pytest.mark.thorough),
]


@pytest.mark.slow
@pytest.mark.parametrize("backbone", BACKBONES)
def test_the_gradient_is_the_unfolded_network_s(backbone):
    net = make_net(backbone, projection=5 if backbone == "test_resnet" else None)
    folded_copy = compare(net, photos(3), 1e-10)
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(folded_copy.folds) == len(norms) > 0
    assert not any(isinstance(m, nn.BatchNorm2d) for m in folded_copy.module.modules())


@pytest.mark.slow
def test_all_of_a_deep_one_is_folded():
    net = RetrievalNet("resnet50", weights="random")
    folded_copy = FoldedCopy(net, photos(1, 32), torch.bfloat16)
    assert len(folded_copy.folds) == 53
    assert {p.dtype for p in folded_copy.module.backbone.parameters()} == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["test_resnet", "test_efficientnet"])
def test_half_precision_is_as_near_as_under_autocast(backbone, monkeypatch):
    monkeypatch.setattr(folding, "TENSOR_CORES", ("cpu",))  # as on a GPU
    net, images = make_net(backbone, torch.float32), photos(3)
    direction = torch.randn(3, net.dim, generator=torch.Generator().manual_seed(2))
    found = []
    for autocast in (False, True):
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            descriptors = net(images)
        torch.autograd.backward(descriptors, direction)
        found.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    exact, usual = found
    net.zero_grad()
    through_copy(FoldedCopy(net, images[:1], torch.bfloat16), [images], [direction])
    ours = torch.cat([p.grad.flatten() for p in net.parameters()])
    assert 0 < (ours - exact).norm() < 1.3 * (usual - exact).norm() < 0.5 * exact.norm()


def test_what_autocast_would_cast_is_cast_and_the_rest_shared():
    net = make_net("test_vit", torch.float32, projection=5)
    folded_copy = compare(net, photos(2, 160), 0.1)
    assert folded_copy.folds == []
    assert folded_copy.module.backbone.patch_embed.proj.in_channels == 3  # more only on a GPU
    assert folded_copy.module.backbone.blocks[0].mlp.fc1.weight.dtype == torch.bfloat16
    assert folded_copy.module.pooling.p is net.pooling.p
    assert folded_copy.module.projection.weight is net.projection.weight
    assert folded_copy.module.backbone.norm.weight is net.backbone.norm.weight
    assert all(p.dtype == torch.float32 for p in net.parameters())


class Example(nn.Module):
    """A convolution and a batch norm, which meet in some way; fresh, it changes nothing."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.conv = nn.Conv2d(3, 3, 1)
        self.norm = nn.BatchNorm2d(3)
        self.act = nn.ReLU(inplace=True)

    def forward(self, images):
        x = self.conv(images)
        if self.way == "changed between":
            return self.norm(self.act(x)).mean((2, 3))
        if self.way == "seen by others":
            return (self.norm(x) + x.exp()).mean((2, 3))
        if self.way == "norm called twice":
            return self.norm(x).relu().mean((2, 3)) + self.norm(images).mean((2, 3))
        if self.way == "conv called twice":
            return self.norm(self.conv(x.relu())).mean((2, 3))
        return self.act(self.norm(x)).mean((2, 3))


@pytest.mark.parametrize(
    "way", ["changed between", "seen by others", "norm called twice", "conv called twice"]
)
def test_what_cannot_be_folded_is_left(way):
    torch.manual_seed(0)
    net, images = Example(way).eval(), torch.rand(2, 3, 5, 5)
    folded_copy = FoldedCopy(net, images, torch.bfloat16)
    assert folded_copy.folds == []
    trained(net)
    folded_copy.refresh()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(folded_copy.module(images), net(images))


def test_many_are_folded_at_once():
    torch.manual_seed(0)
    pairs = []
    for out, eps, bias, affine in ((6, 0.01, True, True), (3, 1e-5, False, False)):
        conv = nn.Conv2d(4, out, 3, bias=bias).double()
        pairs.append((conv, trained(nn.BatchNorm2d(out, eps=eps, affine=affine).double())))
    images = torch.randn(2, 4, 7, 7, dtype=torch.float64)
    for (conv, norm), weight, bias in zip(pairs, *folded(pairs), strict=True):
        torch.testing.assert_close(F.conv2d(images, weight, bias), norm(conv(images)))


@pytest.mark.slow
@pytest.mark.parametrize(("backbone", "channels"), [("TensorFlow", 8), ("test_vit", 4)])
def test_channels_of_zeros_beside_the_colors_change_nothing(backbone, channels, monkeypatch):
    monkeypatch.setattr(folding, "CHANNELS", channels)
    monkeypatch.setattr(folding, "TENSOR_CORES", ("cpu",))
    if backbone == "TensorFlow":  # the first layers of an EfficientNet-Lite
        stem = Conv2dSame(3, 8, 3, 2, bias=False), nn.BatchNorm2d(8), nn.ReLU6()
        backbone = nn.Sequential(*stem, nn.Conv2d(8, 12, 3))
    net, images = make_net(backbone), photos(3, 160 if backbone == "test_vit" else 64)
    folded_copy = compare(net, images, 1e-10)
    check_first_convolution(folded_copy, images, 3, channels)


@pytest.mark.slow
@pytest.mark.parametrize("side", [64, 61, 39])
def test_a_strided_convolution_of_the_colors_becomes_one_of_blocks(side, monkeypatch):
    monkeypatch.setattr(folding, "TENSOR_CORES", ("cpu",))
    net, images = make_net("test_resnet"), photos(3, side)
    check_first_convolution(compare(net, images, 1e-10), images, 12, 16)


@pytest.mark.parametrize(
    ("window", "padding"), [(7, 3), (3, 1), (3, 0), (2, 0), (5, 2), ((3, 6), (1, 2))]
)
@pytest.mark.parametrize("sides", [(20, 21), (17, 16)])
def test_convolutions_of_blocks(window, padding, sides):
    conv = nn.Conv2d(3, 5, window, 2, padding, dtype=torch.float64)
    other = nn.Conv2d(3, 5, window, 2, padding, dtype=torch.float64)
    other.load_state_dict(conv.state_dict())
    blocks = folding.BlockInput(other)
    images = torch.rand(2, 3, *sides, dtype=torch.float64)
    weight = folding._blocks_of(conv.weight)
    other.in_channels = 16
    result = F.conv2d(blocks(other, (images,)), weight, conv.bias)
    torch.testing.assert_close(result, conv(images))


def check_first_convolution(folded_copy, images, used, channels):
    """Check its channels, the last of which are zero, and its memory order."""
    convs = [m for m in folded_copy.module.modules() if isinstance(m, nn.Conv2d)]
    assert convs[0].in_channels == convs[0].weight.shape[1] == channels
    assert convs[0].weight[:, used:].eq(0).all()
    assert convs[0].weight.is_contiguous(memory_format=torch.channels_last)
    seen = []
    convs[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.no_grad():
        folded_copy.module(images.contiguous(memory_format=torch.channels_last))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


def test_a_layer_kept_out_of_autocast_is_left():
    class Careful(Example):
        def forward(self, images):
            with torch.autocast("cpu", enabled=False):
                return super().forward(images)

    net, images = trained(Careful("plain")), torch.rand(2, 3, 5, 5)
    folded_copy = FoldedCopy(net, images, torch.bfloat16)
    assert folded_copy.folds == []
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(folded_copy.module(images), net(images))


def test_a_plain_pair_is_folded():
    net, images = Example("plain").eval(), torch.rand(2, 3, 5, 5)
    assert survey(net, images).folds == [Fold("conv", "norm")]
    assert folds_hold(net, [Fold("conv", "norm")], images)
    assert not folds_hold(Example("seen by others").eval(), [Fold("conv", "norm")], images)


def test_the_network_s_own_weights_decide_at_each_refresh():
    net, images = make_net("test_resnet"), photos(2)
    folded_copy = FoldedCopy(net, images[:1], torch.bfloat16)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(0.7)
        net.backbone.bn1.running_mean.add_(0.1)
        before = folded_copy.module(images)
        folded_copy.refresh()
        expected = net(images)
        torch.testing.assert_close(folded_copy.module(images), expected, rtol=1e-9, atol=0)
    assert not torch.allclose(before, expected, rtol=1e-3)


def test_modes_are_followed():
    net = make_net("test_vit")
    folded_copy = FoldedCopy(net, photos(1, 160), torch.bfloat16)
    for training in (True, False, True):
        net.train(training)
        folded_copy.refresh()
        assert all(block.training is training for block in folded_copy.module.backbone.blocks)


def test_activations_of_a_norm_stay():
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), BatchNormAct2d(4, drop_layer=lambda: nn.Dropout(0.9)), nn.Flatten()
    )
    trained(net)
    folded_copy = FoldedCopy(net, torch.rand(1, 3, 5, 5), torch.bfloat16)
    assert folded_copy.folds == [Fold("0", "1")]
    assert (folded_copy.module(torch.rand(2, 3, 5, 5).bfloat16()) >= 0).all()
    assert not folded_copy.module[1].drop.training
    net[1].drop.train()
    folded_copy.refresh()
    assert folded_copy.module[1].drop.training


def test_frozen_parameters_stay_without_gradient():
    net, images = make_net("test_resnet"), photos(2)
    net.backbone.conv1.requires_grad_(False)
    net.backbone.bn1.requires_grad_(False)
    net.backbone.layer1.requires_grad_(False)
    net.backbone.layer1[0].bn2.weight.requires_grad_(True)
    compare(net, images, 1e-10)
    assert net.backbone.conv1[0].weight.grad is None
    assert net.backbone.layer1[0].conv2.weight.grad is None
    assert net.backbone.layer1[0].bn2.weight.grad.norm() > 0


def test_frozen_layers_of_the_twin_are_frozen():
    net = make_net("test_resnet")
    net.backbone.layer1.requires_grad_(False)
    folded_copy = FoldedCopy(net, photos(1), torch.bfloat16)
    assert not any(p.requires_grad for p in folded_copy.module.backbone.layer1.parameters())
    assert all(p.requires_grad for p in folded_copy.module.backbone.layer2.parameters())
    net.backbone.layer1.requires_grad_(True)
    folded_copy.refresh()
    assert all(p.requires_grad for p in folded_copy.module.backbone.layer1.parameters())


def test_sums_keep_digits_that_half_precision_loses():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
    folded_copy = FoldedCopy(net, torch.rand(1, 3, 5, 5), torch.bfloat16)
    folded_copy.refresh()
    weight = folded_copy.module[0].weight
    assert weight.dtype == torch.bfloat16
    for value in (1.0, *[2.0**-10] * 512):
        weight.grad = torch.full_like(weight, value)
        folded_copy.collect()
    folded_copy.add_gradients()
    torch.testing.assert_close(net[0].weight.grad, torch.full_like(net[0].weight, 1.5))


def test_other_parts_are_noticed():
    net, images = make_net("test_resnet"), photos(1)
    folded_copy = FoldedCopy(net, images, torch.bfloat16)
    assert folded_copy.fits()
    net.load_state_dict(copy.deepcopy(net.state_dict()))
    assert folded_copy.fits()
    net.backbone.conv1 = copy.deepcopy(net.backbone.conv1)
    assert not folded_copy.fits()


@pytest.mark.parametrize("backbone", ["test_resnet", "test_efficientnet"])
def test_without_autocast_the_copy_computes_in_the_precision_of_the_network(backbone):
    net = make_net(backbone, torch.float32)
    images = photos(6)
    direction = torch.randn(len(images), net.dim, generator=torch.Generator().manual_seed(2))
    wide = copy.deepcopy(net).double()
    torch.autograd.backward(wide(images), direction.double())
    folded_copy = FoldedCopy(net, images[:1], None)
    through_copy(folded_copy, images.split(2), direction.split(2), half=False)
    exact, found = (torch.cat([g.flatten() for g in gradients(n).values()]) for n in (wide, net))
    assert found.dtype == torch.float32
    assert (found - exact).norm() <= 1e-4 * exact.norm()
    assert len(folded_copy.folds) == sum(isinstance(m, nn.BatchNorm2d) for m in net.modules()) > 9
    assert {p.dtype for p in folded_copy.module.parameters()} == {torch.float32}
    stem = next(m for m in folded_copy.module.modules() if isinstance(m, nn.Conv2d))
    assert stem.in_channels == 3
    with torch.no_grad():
        assert torch.allclose(folded_copy.module(images), net(images), atol=1e-5)
        for parameter in net.parameters():
            parameter.mul_(1.1)
        folded_copy.refresh()
        assert torch.allclose(folded_copy.module(images), net(images), atol=1e-5)


class Recorder:
    """Counts calls: of a method as a hook, and of itself as a hook."""

    def __init__(self):
        self.calls = []

    def note(self, module, inputs, output):
        self.calls.append("method")

    def __call__(self, module, inputs):
        self.calls.append("object")


def test_hooks_that_are_methods_or_objects_are_called_by_the_copy():
    net, recorder = make_net("test_resnet", torch.float32), Recorder()
    net.pooling.register_forward_hook(recorder.note)
    net.pooling.register_forward_pre_hook(recorder)
    folded_copy = FoldedCopy(net, photos(1), None)
    recorder.calls.clear()
    folded_copy.module(photos(1))
    assert recorder.calls == ["object", "method"]
    folding.sharing_copy(folded_copy.module)(photos(1))
    assert len(recorder.calls) == 4
