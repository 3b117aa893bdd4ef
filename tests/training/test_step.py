import copy
import threading

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from step_examples import (
    Crowded,
    SoftmaxLoss,
    TinyNet,
    assert_equal_gradients,
    gradients,
    make_batch,
    make_net,
    ordinary,
    tuple_batch,
)
from tiny_net import TINY_NET
from torch import nn

import listwise.losses
from listwise.errors import InputError
from listwise.losses import (
    ContrastiveLoss,
    QuantizedAPLoss,
    TripletLoss,
    class_balanced_weights,
)
from listwise.models import POOLINGS, RetrievalNet
from listwise.training.objective import bind_tuples
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


@pytest.mark.parametrize("micro_batch", [1, 4, 64])
@pytest.mark.parametrize("loss", [TripletLoss(2.0), TripletLoss(form="log-exp"), ContrastiveLoss()])
def test_gradients_bind_tuples_are_those_of_ordinary_backpropagation(loss, micro_batch):
    images, labels = tuple_batch(loss, 4)
    net, mined = make_net(), bind_tuples(loss, 4)
    expected_value, expected = ordinary(net, mined, images, labels)
    value = MultistageStep(net, mined, micro_batch)(images, labels)
    torch.testing.assert_close(value, expected_value, rtol=1e-9, atol=0)
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


def test_the_next_step_draws_other_numbers():
    net, (images, labels) = make_net(drop=0.4), make_batch(12)
    step = MultistageStep(net, SoftmaxLoss(), 5)
    assert step(images, labels) != step(images, labels)


def test_random_numbers_of_the_loss_stay_drawn():
    def loss(descriptors, labels, weights=None, *, queries=None):
        drawn.append(torch.rand(()))
        return SoftmaxLoss()(descriptors, labels)

    drawn: list[torch.Tensor] = []
    MultistageStep(make_net(drop=0.4), loss, 5)(*make_batch(12))
    assert torch.rand(()) != drawn[0]


def test_a_vision_transformer_with_dropout():
    torch.manual_seed(0)
    net = RetrievalNet("test_vit", weights="random").double().train()
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    images, labels = make_batch(5, side=160)
    assert not torch.equal(net(images), net(images))
    torch.manual_seed(3)
    _, expected = ordinary(net, QuantizedAPLoss(), images, labels, 2)
    torch.manual_seed(3)
    MultistageStep(net, QuantizedAPLoss(), 2)(images, labels)
    assert_equal_gradients(gradients(net), expected, 1e-9)


def test_gradients_add_to_those_there():
    net, (images, labels) = make_net(), make_batch(9)
    _, expected = ordinary(net, SoftmaxLoss(), images, labels)
    step = MultistageStep(net, SoftmaxLoss(), 4)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    step(images, labels)
    step(images, labels)
    doubled = {name: 2 * gradient + 1 for name, gradient in expected.items()}
    assert_equal_gradients(gradients(net), doubled, 1e-9)


def test_weights_come_from_the_labels_of_the_whole_batch():
    net, (images, _) = make_net(), make_batch(9)
    labels = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2])
    weights = class_balanced_weights(labels).double()
    _, expected = ordinary(net, QuantizedAPLoss(), images, labels, weights=weights)
    _, unweighted = ordinary(net, QuantizedAPLoss(), images, labels)
    MultistageStep(net, QuantizedAPLoss(), 2, weighting=class_balanced_weights)(images, labels)
    assert_equal_gradients(gradients(net), expected, 1e-9)
    assert not torch.allclose(net.head.weight.grad, unweighted["head.weight"], rtol=1e-3)


def test_a_loss_with_parameters_gets_their_gradient():
    class ProxyLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.proxies = nn.Parameter(torch.eye(3, 6, dtype=torch.float64))

        def forward(self, descriptors, labels, weights=None, *, queries=None):
            return nn.functional.cross_entropy(descriptors @ self.proxies.T, labels)

    net, loss, (images, labels) = make_net(), ProxyLoss(), make_batch(9)
    _, expected = ordinary(net, loss, images, labels)
    expected_proxies = loss.proxies.grad.clone()
    loss.zero_grad()
    MultistageStep(net, loss, 2)(images, labels)
    assert_equal_gradients(gradients(net), expected, 1e-9)
    torch.testing.assert_close(loss.proxies.grad, expected_proxies, rtol=1e-9, atol=0)


def test_bytes_are_the_network_s_to_read():
    torch.manual_seed(0)
    net = RetrievalNet("test_resnet", weights="random").double()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)  # zero in fresh residual branches: no gradient to compare
    images = torch.randint(0, 256, (6, 3, 96, 96), dtype=torch.uint8)
    labels = torch.arange(6) // 2
    _, expected = ordinary(net, QuantizedAPLoss(), images.double() / 255, labels)
    MultistageStep(net, QuantizedAPLoss(), 4)(images, labels)
    assert_equal_gradients(gradients(net), expected, 1e-9)


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
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        pieces = [net(crop) for crop in images.split(micro_batch)]
    value = SoftmaxLoss()(torch.cat(pieces).float(), labels)
    value.backward()
    expected = gradients(net)
    net.zero_grad()

    seen = []

    def loss(descriptors, labels, weights=None, *, queries=None):
        seen.append((descriptors.dtype, torch.is_autocast_enabled("cpu")))
        return SoftmaxLoss()(descriptors.float(), labels, weights, queries=queries)

    torch.manual_seed(5)
    step = MultistageStep(
        AutocastInside(net) if where == "network" else net,
        loss,
        micro_batch,
        autocast=torch.bfloat16 if where in ("argument", "both") else None,
    )
    with torch.autocast("cpu", torch.bfloat16, enabled=where in ("caller", "both")):
        with torch.no_grad():
            net(images[:2])  # leaves casts without graph in the cache
        torch.manual_seed(5)
        step(images, labels)
    assert seen == [(pieces[0].dtype, False)]
    assert_equal_gradients(gradients(net), expected, 2e-2)


@pytest.mark.parametrize("where", ["argument", "caller"])
def test_float16_is_refused(where):
    net, (images, labels) = make_net(torch.float32), make_batch(11, torch.float32)
    step = MultistageStep(
        net, SoftmaxLoss(), 4, autocast=torch.float16 if where == "argument" else None
    )
    with (
        torch.autocast("cpu", torch.float16, enabled=where == "caller"),
        pytest.raises(InputError, match=r"does not run in float16.*torch\.bfloat16"),
    ):
        step(images, labels)
    assert all(p.grad is None for p in net.parameters())


def test_updates_inside_one_autocast_context_see_the_new_weights():
    net, (images, labels) = make_net(torch.float32), make_batch(11, torch.float32)
    step = MultistageStep(net, SoftmaxLoss(), 4, autocast=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        step(images, labels)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(-0.5)
        second = step(images, labels)
    torch.testing.assert_close(second, step(images, labels), rtol=1e-4, atol=0)


def seasoned_net(dtype: torch.dtype, backbone: str = "test_resnet") -> RetrievalNet:
    """A small network whose batch norms do something; residual by default."""
    torch.manual_seed(0)
    net = RetrievalNet(backbone, weights="random", projection=6).to(dtype)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return net


def coarse_bytes(count: int) -> torch.Tensor:
    colors = torch.rand(count, 3, 3, 3, generator=torch.Generator().manual_seed(4))
    return (nn.functional.interpolate(colors, (64, 64), mode="bilinear") * 255).byte()


@pytest.mark.parametrize("micro_batch", [1, 3, 64])
def test_folding_batch_norm_changes_no_gradient(micro_batch):
    net, images, labels = seasoned_net(torch.float64), coarse_bytes(8), torch.arange(8) // 2
    before = copy.deepcopy(net.state_dict())
    _, expected = ordinary(net, QuantizedAPLoss(), images, labels)
    step = MultistageStep(net, QuantizedAPLoss(), micro_batch, autocast=torch.bfloat16)
    for _ in range(2):
        net.zero_grad()
        step(images, labels)
        assert_equal_gradients(gradients(net), expected, 1e-10)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in step.forward().module.modules())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.slow
def test_half_precision_follows_the_optimizer():
    net, images, labels = (
        seasoned_net(torch.float32, TINY_NET),
        coarse_bytes(8),
        torch.arange(8) // 2,
    )
    step = MultistageStep(net, SoftmaxLoss(), 3, autocast=torch.bfloat16)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    values = []
    for _ in range(8):
        optimizer.zero_grad()
        values.append(float(step(images, labels)))
        optimizer.step()
    assert values[-1] < 0.9 * values[0]
    with torch.no_grad():
        plain = SoftmaxLoss()(net(images), labels)
    assert step(images, labels) == pytest.approx(float(plain), rel=0.05)


class ByName(nn.Module):
    """Calls its layers with arguments by name."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8).eval()

    def forward(self, images):
        maps = self.norm(input=self.conv(input=images))
        return nn.functional.normalize(maps.float().square().mean((2, 3)), dim=1)


class Remembering(nn.Module):
    """Goes on from what a hook has kept in the network that it was made for."""

    def __init__(self):
        super().__init__()
        self.conv, self.kept = nn.Conv2d(3, 8, 3), {}
        self.conv.register_forward_hook(lambda conv, given, made: self.kept.update(maps=made))

    def forward(self, images):
        self.conv(images)
        maps = self.kept.pop("maps").float()
        return nn.functional.normalize(maps.square().mean((2, 3)), dim=1)


class Locked(ByName):
    """Has something that cannot be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.parametrize("kind", [ByName, Remembering, Locked])
def test_a_network_that_cannot_be_copied_runs_itself(kind):
    torch.manual_seed(0)
    net, (images, labels) = kind(), make_batch(10, torch.float32)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        pieces = [net(crop) for crop in images.split(4)]
    SoftmaxLoss()(torch.cat(pieces), labels).backward()
    expected = gradients(net)
    step = MultistageStep(net, SoftmaxLoss(), 4, autocast=torch.bfloat16)
    for _ in range(2):
        net.zero_grad()
        step(images, labels)
        assert_equal_gradients(gradients(net), expected, 2e-2)


def test_a_new_layer_is_noticed():
    net, images, labels = seasoned_net(torch.float64), coarse_bytes(6), torch.arange(6) // 2
    step = MultistageStep(net, QuantizedAPLoss(), 4, autocast=torch.bfloat16)
    step(images, labels)
    net.projection = nn.Linear(net.projection.in_features, 4).double()
    _, expected = ordinary(net, QuantizedAPLoss(), images, labels)
    step(images, labels)
    assert_equal_gradients(gradients(net), expected, 1e-10)


class SecondReader(nn.Module):
    """Two convolutions with batch norm; something else reads between them behind a gate."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.stem, self.first = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.gate = nn.Parameter(torch.zeros(()))
        self.drop = nn.Dropout(0.5)
        self.options = {"double": False}
        for norm in (self.first, self.norm):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.running_mean, std=0.2)
            nn.init.uniform_(norm.running_var, 0.5, 2)
            norm.eval()
        if way == "hook":
            self.norm.register_forward_hook(lambda norm, given, made: made + self.gate * given[0])

    def forward(self, images):
        start = self.first(self.stem(images)).relu()
        between = self.conv(start)
        maps = self.norm(between)
        if self.way == "gate":
            maps = maps + self.gate * between
        if self.way == "gate without gradient":
            maps = maps + self.gate * between.data
        if self.way == "gate in training" and self.training:
            maps = maps + self.gate * between
        if self.way == "weights":
            maps = maps + self.gate * nn.functional.conv2d(start, self.conv.weight, padding=1)
        if self.options["double"]:
            maps = 2 * maps + start
        return nn.functional.normalize(self.drop(maps.relu().mean((2, 3))), dim=1)


def check_against_ordinary(net, step, images, labels):
    torch.manual_seed(9)
    _, expected = ordinary(net, SoftmaxLoss(), images, labels, step.micro_batch)
    torch.manual_seed(9)
    step(images, labels)
    found = gradients(net)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        largest = max(g.abs().max() for g in expected.values())
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-10 * largest)
    return expected


WAYS = ["plain", "gate", "gate without gradient", "gate in training", "weights", "hook"]


@pytest.mark.parametrize("opened", [0.0, 0.7])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_closed_gate_hides_is_not_folded(way, opened):
    torch.manual_seed(0)
    net, (images, labels) = SecondReader(way).double(), make_batch(10)
    step = MultistageStep(net, SoftmaxLoss(), 4, autocast=torch.bfloat16)
    expected = check_against_ordinary(net, step, images, labels)
    if way != "plain":
        assert expected["gate"].abs() > 1e-5
    nn.init.constant_(net.gate, opened)
    net.zero_grad()
    check_against_ordinary(net, step, images, labels)
    left = [m for m in step.forward().module.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len(left) == (0 if way == "plain" else 1)  # the other one is folded all the same
    assert step.fallback == ""


def test_a_backward_hook_of_a_batch_norm_is_kept():
    torch.manual_seed(0)
    net, (images, labels) = SecondReader("plain").double(), make_batch(10)
    net.norm.register_full_backward_hook(lambda norm, given, made: (3 * given[0],))
    step = MultistageStep(net, SoftmaxLoss(), 4, autocast=torch.bfloat16)
    check_against_ordinary(net, step, images, labels)


CHANGES = {
    "dropout": lambda net: setattr(net.drop, "p", 0.1),
    "stride": lambda net: setattr(net.conv, "stride", (2, 2)),
    "option": lambda net: net.options.update(double=True),
    "way": lambda net: setattr(net, "way", "gate"),
    "mode": lambda net: net.drop.eval(),
    "hook": lambda net: net.conv.register_forward_hook(lambda conv, given, made: 2 * made),
    "pre-hook": lambda net: net.norm.register_forward_pre_hook(lambda norm, given: 2 * given[0]),
    "backward hook": lambda net: net.conv.register_full_backward_hook(
        lambda conv, given, made: (3 * given[0],)
    ),
    "method": lambda net: setattr(net.norm, "forward", torch.tanh),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_to_the_network_is_noticed(change):
    torch.manual_seed(0)
    net, (images, labels) = SecondReader("plain").double(), make_batch(10)
    step = MultistageStep(net, SoftmaxLoss(), 4, autocast=torch.bfloat16)
    before = check_against_ordinary(net, step, images, labels)
    CHANGES[change](net)
    net.zero_grad()
    after = check_against_ordinary(net, step, images, labels)
    if after.keys() == before.keys():
        assert not torch.allclose(after["stem.weight"], before["stem.weight"], rtol=1e-3)


def test_a_network_that_changes_before_every_update_runs_itself():
    torch.manual_seed(0)
    net, (images, labels) = SecondReader("plain").double(), make_batch(10)
    step = MultistageStep(net, SoftmaxLoss(), 4, autocast=torch.bfloat16)
    for update in range(6):
        net.drop.p = 0.1 * update
        net.zero_grad()
        check_against_ordinary(net, step, images, labels)
    assert step.forward().module is net
    assert "change before every update" in step.fallback


def test_an_unchanged_network_is_copied_once():
    net, (images, labels) = SecondReader("plain").double(), make_batch(10)
    step = MultistageStep(net, SoftmaxLoss(), 4, autocast=torch.bfloat16)
    step(images, labels)
    module = step.forward().module
    net.drop.p = float("0.5")  # another number, but equal
    net.load_state_dict(copy.deepcopy(net.state_dict()))
    net.eval().drop.train()
    net.train()
    net.norm.eval()
    net.first.eval()
    step(images, labels)
    assert step.forward().module is module


@pytest.fixture
def compiler(monkeypatch):
    """Stands for what makes machine code of a graph; keeps the number of images of each."""
    sizes: list[int] = []
    compiled = torch.compile

    def backend(graph, inputs, **options):
        sizes.append(next(len(i) for i in inputs if i.dtype == torch.uint8))
        return graph

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda net, **how: compiled(net, backend=backend, **how))
    yield sizes
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_compiled_network_sees_one_size_only(compiler, autocast):
    net, images, labels = (
        seasoned_net(torch.float64, TINY_NET),
        coarse_bytes(8),
        torch.arange(8) // 2,
    )
    step = MultistageStep(net, QuantizedAPLoss(), 3, autocast=autocast, compile=True)
    for count in (8, 7, 8):
        _, expected = ordinary(net, QuantizedAPLoss(), images[:count], labels[:count] // 2)
        step(images[:count], labels[:count] // 2)
        assert_equal_gradients(gradients(net), expected, 1e-10)
    assert compiler == [3, 3]  # without and with graph
    assert step.fallback == ""


@pytest.mark.slow
def test_less_memory_makes_the_compiled_size_smaller(compiler):
    net, images, labels = (
        seasoned_net(torch.float64, TINY_NET),
        coarse_bytes(8),
        torch.arange(8) // 2,
    )
    crowded = Crowded(net, room=2)
    step = MultistageStep(crowded, QuantizedAPLoss(), compile=True)
    _, expected = ordinary(net, QuantizedAPLoss(), images, labels)
    step(images, labels)
    assert step.micro_batch == 2
    assert_equal_gradients(gradients(net), expected, 1e-10)


def test_without_a_compiler_the_step_continues(monkeypatch):
    def backend(graph, inputs, **options):
        raise RuntimeError("no compiler here")

    compiled = torch.compile
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", lambda net, **how: compiled(net, backend=backend, **how))
    net, images, labels = (
        seasoned_net(torch.float64, TINY_NET),
        coarse_bytes(8),
        torch.arange(8) // 2,
    )
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
    net, images, labels = seasoned_net(torch.float32).cuda(), coarse_bytes(8), torch.arange(8) // 2
    found = []
    for compiled in (False, True):
        net.zero_grad()
        step = MultistageStep(net, SoftmaxLoss(), 3, autocast=torch.bfloat16, compile=compiled)
        step(images, labels)
        assert step.fallback == ""
        found.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    assert (found[1] - found[0]).norm() < 0.2 * found[0].norm()


def test_errors_that_are_not_the_compiler_s_are_raised(compiler):
    net, images, labels = (
        seasoned_net(torch.float64, TINY_NET),
        coarse_bytes(8),
        torch.arange(8) // 2,
    )
    step = MultistageStep(net, QuantizedAPLoss(), 3, compile=True)
    with pytest.raises(InputError, match="images must be"):
        step(images[:, :2], labels)


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


def test_memory_too_small_for_one_image_is_an_error_with_advice():
    net, (images, labels) = make_net(), make_batch(9)
    crowded = Crowded(net, room=2)
    step = MultistageStep(crowded, SoftmaxLoss())
    step(images, labels)
    net.zero_grad()
    crowded.room = 0
    with pytest.raises(torch.OutOfMemoryError, match="a single image does not fit: use"):
        step(images, labels)
    with pytest.raises(torch.OutOfMemoryError, match="micro-batches of 4 do not fit: make"):
        MultistageStep(crowded, SoftmaxLoss(), 4)(images, labels)
    assert all(p.grad is None for p in net.parameters())


def test_auto_reports_its_choice_and_follows_the_batch():
    net = make_net()
    step = MultistageStep(net, SoftmaxLoss())
    step(*make_batch(6))
    assert step.micro_batch == 6
    assert step.choice.startswith("all 6 images in one pass: one image needs ")
    step(*make_batch(9))
    assert step.micro_batch == 9


def test_auto_draws_no_random_numbers_of_its_own():
    net, (images, labels) = make_net(drop=0.4), make_batch(12)
    twin = copy.deepcopy(net)
    torch.manual_seed(2)
    MultistageStep(net, SoftmaxLoss())(images, labels)
    torch.manual_seed(2)
    MultistageStep(twin, SoftmaxLoss(), 12)(images, labels)
    assert_equal_gradients(gradients(net), gradients(twin), 1e-9)


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (torch.zeros(3, 8, 8), torch.zeros(3)),
        (torch.zeros(0, 3, 8, 8), torch.zeros(0)),
        (torch.zeros(4, 3, 8, 8), torch.zeros(5)),
        (torch.zeros(4, 3, 8, 8), torch.zeros(4, 1)),
    ],
)
def test_batches_that_do_not_match_are_refused(images, labels):
    with pytest.raises(InputError, match="do not match"):
        MultistageStep(make_net(), SoftmaxLoss(), 4)(images, labels)


def test_a_feature_map_is_no_descriptor():
    images, labels = make_batch(4, torch.float32)
    with pytest.raises(InputError, match=r"\[2, 4, 6, 6\] for 2 images"):
        MultistageStep(nn.Conv2d(3, 4, 3), SoftmaxLoss(), 2)(images, labels)


@pytest.mark.parametrize("given", ["images", "labels"])
def test_lists_are_refused(given):
    images, labels = make_batch(6)
    arguments = {"images": images, "labels": labels}
    arguments[given] = arguments[given].tolist()
    with pytest.raises(InputError, match=f"`{given}` must be a tensor, not list"):
        MultistageStep(make_net(), SoftmaxLoss(), 4)(**arguments)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_step_is_refused(context):
    images, labels = make_batch(6)
    with context(), pytest.raises(InputError, match=r"outside of torch\.no_grad") as error:
        MultistageStep(make_net(), SoftmaxLoss(), 4)(images, labels)
    assert "\n" not in str(error.value)


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


def test_micro_batch_may_be_any_whole_number():
    assert MultistageStep(TinyNet(), SoftmaxLoss(), np.int64(3)).micro_batch == 3


@pytest.mark.parametrize("micro_batch", [0, -1, 2.5, "all", True])
def test_micro_batch_must_be_a_number_or_auto(micro_batch):
    with pytest.raises(
        InputError, match=r'`micro_batch` must be a whole number of at least 1 or "auto"'
    ):
        MultistageStep(TinyNet(), SoftmaxLoss(), micro_batch)
