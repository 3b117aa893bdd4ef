import copy

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from step_examples import (
    Crowded,
    SoftmaxLoss,
    assert_equal_gradients,
    gradients,
    make_batch,
    make_net,
    ordinary,
)
from tiny_net import TINY_NET
from torch import nn

import listwise.losses
from listwise.errors import InputError
from listwise.losses import QuantizedAPLoss
from listwise.models import POOLINGS, RetrievalNet
from listwise.training.step import Counts, MultistageStep

# These have arguments; test_step_distributed.py has them.
ARGUMENTS = {"HierarchicalAPLoss", "MatryoshkaLoss", "ProxyAnchorLoss"}
LOSSES = [SoftmaxLoss] + [
    loss
    for name, loss in vars(listwise.losses).items()
    if isinstance(loss, type) and name not in ARGUMENTS
]
BORROWED = (listwise.losses.FastAPLoss, listwise.losses.MultiSimilarityLoss)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# Every loss with GeM, and every pooling with the loss of the paper; the other pairs are thorough.
PAIRS = [
    pytest.param(
        *(loss, pooling),
        marks=() if pooling == "gem" or loss is QuantizedAPLoss else pytest.mark.thorough,
    )
    for loss in LOSSES
    for pooling in POOLINGS
]


@pytest.mark.parametrize(("loss", "pooling"), PAIRS)
@pytest.mark.parametrize("micro_batch", [1, 4, 5, 11, 64])
def test_gradients_are_those_of_ordinary_backpropagation(loss, pooling, micro_batch):
    if loss in BORROWED:
        pytest.importorskip("pytorch_metric_learning")
    net, (images, labels) = make_net(pooling=pooling), make_batch(11)
    expected_value, expected = ordinary(net, loss(), images, labels)
    value = MultistageStep(net, loss(), micro_batch)(images, labels)
    torch.testing.assert_close(value, expected_value, rtol=1e-9, atol=0)
    assert not value.requires_grad
    assert_equal_gradients(gradients(net), expected, 1e-9)


@given(size=st.integers(4, 20), micro_batch=st.integers(1, 24), seed=st.integers(0, 2**32 - 1))
def test_dropout_and_stochastic_depth_draw_the_same_numbers_again(size, micro_batch, seed):
    net, (images, labels) = make_net(drop=0.4), make_batch(size)
    torch.manual_seed(seed)
    _, expected = ordinary(net, SoftmaxLoss(), images, labels, micro_batch)
    # By chance every image of a small batch may drop the same layer.
    assume(all(gradient.norm() > 0 for gradient in expected.values()))
    after = torch.get_rng_state()
    torch.manual_seed(seed)
    MultistageStep(net, SoftmaxLoss(), micro_batch)(images, labels)
    assert_equal_gradients(gradients(net), expected, 1e-9)
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize(
    ("micro_batch", "forwards"), [(1, 20), (3, 20), (9, 20), (10, 10), (64, 10), ("auto", 10)]
)
def test_counts_are_the_images_that_went_through(micro_batch, forwards):
    net, (images, labels) = make_net(), make_batch(10)
    step = MultistageStep(net, SoftmaxLoss(), micro_batch)
    step(images, labels)  # lets "auto" measure first
    seen = []
    net.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    step(images, labels)
    assert sum(seen) == forwards
    assert step.counts == Counts(forwards=2 * forwards, backwards=20, updates=2)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@needs_cuda
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("micro_batch", [3, 64])
def test_images_go_to_the_network_s_device(pinned, micro_batch):
    net, (images, labels) = make_net(drop=0.4).cuda(), make_batch(11)
    torch.cuda.manual_seed(3)
    _, expected = ordinary(net, QuantizedAPLoss(), images.cuda(), labels.cuda(), micro_batch)
    after = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(3)
    images = images.pin_memory() if pinned else images
    MultistageStep(net, QuantizedAPLoss(), micro_batch)(images, labels)
    assert_equal_gradients(gradients(net), expected, 1e-9)
    assert torch.equal(torch.cuda.get_rng_state(), after)


@needs_cuda
def test_auto_recovers_when_cuda_runs_out_of_memory():
    net, (images, labels) = make_net().cuda(), make_batch(96, side=256)
    _, expected = ordinary(net, QuantizedAPLoss(), images.cuda(), labels.cuda())
    torch.cuda.empty_cache()
    one_image = 8 * 256 * 256 * 8
    room = torch.cuda.memory_allocated() + 100 * one_image
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        step = MultistageStep(net, QuantizedAPLoss())
        step(images, labels)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert step.micro_batch < 96
    assert step.choice.endswith("ran out of memory")
    assert_equal_gradients(gradients(net), expected, 1e-9)


class AutocastInside(nn.Module):
    """A network that opens autocast itself."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images):
        with torch.autocast("cpu", torch.bfloat16):
            return self.net(images)


@pytest.mark.parametrize("where", ["argument", "caller", "both", "network"])
@pytest.mark.parametrize("micro_batch", [2, 5, 64])
def test_autocast(where, micro_batch):
    net, (images, labels) = make_net(torch.float32, drop=0.3), make_batch(11, torch.float32)
    seen = []

    def loss(descriptors, labels, weights=None, *, queries=None):
        seen.append((descriptors.dtype, torch.is_autocast_enabled("cpu")))
        return SoftmaxLoss()(descriptors.float(), labels, weights, queries=queries)

    inside = AutocastInside(net)
    torch.manual_seed(5)
    _, expected = ordinary(inside, loss, images, labels, micro_batch)
    given = torch.bfloat16 if where in ("argument", "both") else None
    step = MultistageStep(inside if where == "network" else net, loss, micro_batch, autocast=given)
    with torch.autocast("cpu", torch.bfloat16, enabled=where in ("caller", "both")):
        with torch.no_grad():
            net(images[:2])  # leaves casts without graph in the cache
        torch.manual_seed(5)
        step(images, labels)
    assert len(set(seen)) == 1
    assert not seen[0][1]
    actual = {f"net.{name}": gradient for name, gradient in gradients(net).items()}
    assert_equal_gradients(actual, expected, 2e-2)


@pytest.mark.parametrize("given", [torch.float16, None])
def test_float16_is_refused(given):
    net, (images, labels) = make_net(torch.float32), make_batch(11, torch.float32)
    step = MultistageStep(net, SoftmaxLoss(), 4, autocast=given)
    with (
        torch.autocast("cpu", torch.float16, enabled=given is None),
        pytest.raises(InputError, match=r"does not run in float16.*torch\.bfloat16"),
    ):
        step(images, labels)


def seasoned_case(backbone: str = "test_resnet", dtype: torch.dtype = torch.float64):
    """A small network whose batch norms do something, eight images and their labels."""
    torch.manual_seed(0)
    net = RetrievalNet(backbone, weights="random", projection=6).to(dtype)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 2)
    colors = torch.rand(8, 3, 3, 3, generator=torch.Generator().manual_seed(4))
    images = (nn.functional.interpolate(colors, (64, 64), mode="bilinear") * 255).byte()
    return net, images, torch.arange(8) // 2


@pytest.mark.parametrize("micro_batch", [1, 3, 64])
def test_folding_batch_norm_changes_no_gradient(micro_batch):
    net, images, labels = seasoned_case()
    before = copy.deepcopy(net.state_dict())
    _, expected = ordinary(net, QuantizedAPLoss(), images, labels)
    step = MultistageStep(net, QuantizedAPLoss(), micro_batch, autocast=torch.bfloat16)
    for _ in range(2):
        net.zero_grad()
        step(images, labels)
        assert_equal_gradients(gradients(net), expected, 1e-10)
    assert step.fallback == ""
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.fixture
def compiler(monkeypatch):
    """Stands for what makes machine code of a graph; keeps the number of images of each.

    It fails if the list has None.
    """
    sizes: list[int | None] = []
    compiled = torch.compile

    def backend(graph, inputs, **options):
        if None in sizes:
            raise RuntimeError("no compiler here")
        sizes.append(next(len(i) for i in inputs if i.dtype == torch.uint8))
        return graph

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda net, **how: compiled(net, backend=backend, **how))
    yield sizes
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_compiled_network_sees_one_size_only(compiler, autocast):
    net, images, labels = seasoned_case(TINY_NET)
    step = MultistageStep(net, QuantizedAPLoss(), 3, autocast=autocast, compile=True)
    for count in (8, 7, 8):
        _, expected = ordinary(net, QuantizedAPLoss(), images[:count], labels[:count] // 2)
        step(images[:count], labels[:count] // 2)
        assert_equal_gradients(gradients(net), expected, 1e-10)
    assert compiler == [3, 3]  # without and with graph
    assert step.fallback == ""


def test_without_a_compiler_the_step_continues(compiler):
    compiler.append(None)
    net, images, labels = seasoned_case(TINY_NET)
    _, expected = ordinary(net, QuantizedAPLoss(), images, labels)
    step = MultistageStep(net, QuantizedAPLoss(), 3, autocast=torch.bfloat16, compile=True)
    step(images, labels)
    assert_equal_gradients(gradients(net), expected, 1e-10)
    assert "not compiled" in step.fallback
    assert "no compiler here" in step.fallback
    assert "\n" not in step.fallback


@needs_cuda
def test_compiled_on_a_gpu_it_learns_the_same():
    torch._dynamo.reset()
    net, images, labels = seasoned_case(dtype=torch.float32)
    net.cuda()
    found = []
    for compiled in (False, True):
        net.zero_grad()
        step = MultistageStep(net, SoftmaxLoss(), 3, autocast=torch.bfloat16, compile=compiled)
        step(images, labels)
        assert step.fallback == ""
        found.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    assert (found[1] - found[0]).norm() < 0.2 * found[0].norm()


def test_live_batch_norm_is_refused_by_name():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 4))
    images, labels = make_batch(8, torch.float32)
    step = MultistageStep(net, SoftmaxLoss(), 4)
    with pytest.raises(InputError, match=r"'1'.*is not frozen.*\.eval\(\)") as error:
        step(images, labels)
    assert "\n" not in str(error.value)
    assert all(p.grad is None for p in net.parameters())
    net[1].eval()
    step(images, labels)
    assert net[1].weight.grad.norm() > 0


class Centered(nn.Module):
    """Subtracts the mean of the micro-batch."""

    def forward(self, x):
        return x - x.mean(0)


def test_statistics_of_a_micro_batch_are_refused():
    net = nn.Sequential(make_net(), Centered())
    net[0].train()
    images, labels = make_batch(8)
    state = torch.get_rng_state()
    with pytest.raises(InputError, match="depends on the other images") as error:
        MultistageStep(net, SoftmaxLoss(), 4)(images, labels)
    assert "\n" not in str(error.value)
    assert all(p.grad is None for p in net.parameters())
    assert net[0].training
    assert torch.equal(torch.get_rng_state(), state)


class Branching(nn.Module):
    """Reads the output of a convolution beside its batch norm, for some images or by chance."""

    def __init__(self, random):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.random = random

    def forward(self, x):
        found = self.conv(x)
        normed = self.bn(found)
        chosen = torch.rand(()) < 0.5 if self.random else x.mean((1, 2, 3), keepdim=True) < 0.0
        return torch.where(chosen, normed + found, normed).relu()


@pytest.mark.parametrize("random", [False, True])
def test_networks_whose_path_depends_on_the_image_or_on_chance_are_computed_as_they_are(random):
    torch.manual_seed(0)
    net = RetrievalNet(Branching(random)).double().eval()
    norm = net.backbone.bn
    norm.running_mean.uniform_(-1, 1)
    norm.running_var.uniform_(0.5, 2)
    images, labels = make_batch(12)
    images[5:] -= 1
    torch.manual_seed(3)
    descriptors = net(images)
    loss = SoftmaxLoss()(descriptors, labels)
    loss.backward()
    expected = gradients(net)
    net.zero_grad()
    torch.manual_seed(3)
    value = MultistageStep(net, SoftmaxLoss(), 12 if random else 5)(images, labels)
    assert value == pytest.approx(loss.item(), rel=1e-12)
    assert_equal_gradients(gradients(net), expected, 1e-9)


def test_frozen_parameters_get_no_gradient():
    net, (images, labels) = make_net(), make_batch(9)
    net.stem.requires_grad_(False)
    _, expected = ordinary(net, SoftmaxLoss(), images, labels)
    MultistageStep(net, SoftmaxLoss(), 4)(images, labels)
    assert net.stem.weight.grad is None
    assert_equal_gradients(gradients(net), expected, 1e-9)
    net.requires_grad_(False)
    with pytest.raises(InputError, match="no trainable parameter"):
        MultistageStep(net, SoftmaxLoss(), 4)(images, labels)


class Unrepeatable(nn.Module):
    """A network with random numbers that PyTorch does not know of."""

    def __init__(self, net: nn.Module, noise: float) -> None:
        super().__init__()
        self.net = net
        self.noise = noise
        self.generator = np.random.default_rng(0)

    def forward(self, images):
        return self.net(images + self.noise * self.generator.random())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_network_that_cannot_be_repeated_is_refused(dtype):
    net, (images, labels) = make_net(dtype), make_batch(9, dtype)
    before = {p: torch.ones_like(p) for p in net.parameters()}
    for parameter, gradient in before.items():
        parameter.grad = gradient
    step = MultistageStep(Unrepeatable(net, 0.5), SoftmaxLoss(), 4)
    with pytest.raises(InputError, match="different descriptors in stages 1 and 3"):
        step(images, labels)
    assert all(p.grad is gradient and gradient.eq(1).all() for p, gradient in before.items())
    MultistageStep(Unrepeatable(net, 0.0), SoftmaxLoss(), 4)(images, labels)
    MultistageStep(Unrepeatable(net, 0.5), SoftmaxLoss(), 64)(images, labels)


def test_auto_halves_the_micro_batch_until_it_fits():
    net, (images, labels) = make_net(drop=0.3), make_batch(13)
    crowded = Crowded(net, room=3)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    step = MultistageStep(crowded, SoftmaxLoss())
    assert step.micro_batch == "auto"
    torch.manual_seed(7)
    step(images, labels)
    actual = gradients(net)
    assert step.micro_batch == 3
    assert step.choice == "micro-batches of 3: 6 ran out of memory"
    assert step.counts == Counts(forwards=26, backwards=13, updates=1)
    assert crowded.failures == 2

    torch.manual_seed(7)
    _, expected = ordinary(net, SoftmaxLoss(), images, labels, 3)
    assert_equal_gradients(actual, {name: 1 + g for name, g in expected.items()}, 1e-9)
    step(images, labels)
    assert crowded.failures == 2

    crowded.room = 0
    net.zero_grad()
    with pytest.raises(torch.OutOfMemoryError, match="a single image does not fit: use"):
        step(images, labels)
    with pytest.raises(torch.OutOfMemoryError, match="micro-batches of 4 do not fit: make"):
        MultistageStep(crowded, SoftmaxLoss(), 4)(images, labels)
    assert all(p.grad is None for p in net.parameters())


FOUR = torch.zeros(4, 3, 8, 8)


@pytest.mark.parametrize(
    ("images", "labels", "reason"),
    [
        (torch.zeros(3, 8, 8), torch.zeros(3), "do not match"),
        (torch.zeros(0, 3, 8, 8), torch.zeros(0), "do not match"),
        (FOUR, torch.zeros(5), "do not match"),
        (FOUR, torch.zeros(4, 1), "do not match"),
        (FOUR.tolist(), torch.zeros(4), "`images` must be a tensor, not list"),
        (FOUR, [0, 0, 1, 1], "`labels` must be a tensor, not list"),
        (FOUR, torch.zeros(4), r"\[2, 4, 6, 6\] for 2 images"),
    ],
)
def test_unsuitable_arguments_are_refused(images, labels, reason):
    with pytest.raises(InputError, match=reason):
        MultistageStep(nn.Conv2d(3, 4, 3), SoftmaxLoss(), 2)(images, labels)
    with torch.no_grad(), pytest.raises(InputError, match=r"outside of torch\.no_grad"):
        MultistageStep(nn.Conv2d(3, 4, 3), SoftmaxLoss(), 2)(images, labels)
    for micro_batch in (0, -1, 2.5, "all", True):
        with pytest.raises(InputError, match='a whole number of at least 1 or "auto"'):
            MultistageStep(nn.Conv2d(3, 4, 3), SoftmaxLoss(), micro_batch)


def test_a_parameter_of_both_network_and_loss_gets_one_gradient():
    class Tied(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def forward(self, descriptors, labels, weights=None):
            return nn.functional.cross_entropy(descriptors @ self.weight[:, :6].T, labels)

    net, (images, labels) = make_net(), make_batch(9)
    loss = Tied(net.head.weight)
    _, expected = ordinary(net, lambda d, y, w: loss(d, y), images, labels)
    step = MultistageStep(net, loss, 4)
    for _ in range(2):
        step(images, labels)
    twice = {name: 2 * gradient for name, gradient in expected.items()}
    assert_equal_gradients(gradients(net), twice, 1e-9)
