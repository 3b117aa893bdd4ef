import dataclasses

import pytest
import torch
from step_examples import SoftmaxLoss, make_batch, make_net
from torch import Tensor, nn

from listwise.models import RetrievalNet
from listwise.training import memory
from listwise.training.forward import Forward
from listwise.training.memory import Fit, free_bytes, graph_memory, images_that_fit, readable_bytes
from listwise.training.step import MultistageStep


class Held:
    """A tensor that a graph keeps; counts its bytes while it does."""

    now = peak = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        Held.now += tensor.nbytes
        Held.peak = max(Held.peak, Held.now)

    def __del__(self) -> None:
        Held.now -= self.tensor.nbytes


def peak_of_graphs(batch: int, micro_batch: int) -> int:
    """The most bytes that graphs of the network kept at any moment of a step."""
    net, (images, labels) = make_net(torch.float32), make_batch(batch, torch.float32)
    net.register_forward_pre_hook(lambda *_: hooks.__enter__())
    net.register_forward_hook(lambda *_: hooks.__exit__())
    hooks = torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor)
    Held.now = Held.peak = 0
    MultistageStep(net, SoftmaxLoss(), micro_batch)(images, labels)
    assert Held.now == 0
    return Held.peak


def test_the_peak_does_not_grow_with_the_batch():
    peak = peak_of_graphs(16, micro_batch=8)
    assert peak > 0
    assert peak_of_graphs(128, micro_batch=8) == peak
    assert peak_of_graphs(128, micro_batch=128) > 10 * peak


class Scale(nn.Module):
    """Two layers whose graph is known: it keeps the input of each, the weights apart."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(3 * 4 * 4), torch.ones(3 * 4 * 4)])

    def forward(self, images: Tensor) -> Tensor:
        for weight in self.weights:
            images = images.flatten(1) * weight
        return images


def test_what_is_saved_is_what_the_graph_keeps():
    images = torch.rand(20, 3, 4, 4)
    forward = Forward(Scale(), autocast=None)
    image = 3 * 4 * 4 * 4
    assert graph_memory(forward, images[:1]) == (2 * image, 3 * 4 * 4)
    assert graph_memory(forward, images[:5]) == (10 * image, 5 * 3 * 4 * 4)


def test_casts_of_the_weights_are_not_counted_per_image():
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 1000))
    forward = Forward(net, autocast=torch.bfloat16)
    fit = images_that_fit(forward, torch.rand(4, 3, 8, 8))
    assert "one image needs 384 B of activations" in fit.reason  # 192 inputs of two bytes


def test_the_fold_of_the_weights_is_not_counted_for_an_image():
    net = RetrievalNet("resnet18", weights="random")
    images = torch.rand(2, 3, 32, 32)
    first = graph_memory(Forward(net, autocast=torch.bfloat16), images[:1]).bytes
    forward = Forward(net, autocast=torch.bfloat16)
    again = [graph_memory(forward, images[:1]).bytes for _ in range(2)]
    assert first == again[0] == again[1]
    assert graph_memory(forward, images).bytes > 1.5 * first


def test_free_memory_decides(monkeypatch):
    forward, (images, _) = Forward(make_net(), autocast=None), make_batch(8)
    one, two = graph_memory(forward, images[:1]).bytes, graph_memory(forward, images[:2]).bytes
    weights = 3 * sum(p.nbytes for p in forward.net.parameters())
    fixed = weights + 2 * one - two
    for expected in (1, 7, 1000):
        free = 2 * (fixed + expected * (two - one) + 10)
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
        assert images_that_fit(forward, images).images == expected
        assert images_that_fit(forward, images[:1]).images == expected
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0)
    assert images_that_fit(forward, images).images == 1
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**15)
    assert images_that_fit(forward, images).images == 10**9 // (two - one)


def test_a_gpu_s_memory_is_not_filled_for_nothing(monkeypatch):
    forward, (images, _) = Forward(make_net(), autocast=None), make_batch(8)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**12)
    monkeypatch.setattr(forward, "device", torch.device("cuda"))
    monkeypatch.setattr(forward, "ready", lambda images: images)
    monkeypatch.setattr(forward, "_generators", list)
    fit = images_that_fit(forward, images)
    assert fit.images > 10**4
    assert fit.choose(4 * fit.images)[0] <= 256
    assert dataclasses.replace(fit, images=1000).choose(4096)[0] == 256
    assert dataclasses.replace(fit, images=100).choose(4096)[0] == 100
    largest = 8 * 8 * 8  # elements of an image after the first convolution
    monkeypatch.setattr(memory, "CUDA_ELEMENTS", 128 * largest)
    assert images_that_fit(forward, images).choose(4 * fit.images)[0] == 128


def test_a_batch_that_fits_is_taken_whole():
    fit = Fit(images=100, useful=16, reason="there is room")
    assert fit.choose(100) == (100, "all 100 images in one pass: there is room")
    assert dataclasses.replace(fit, images=5).choose(101)[0] == 5


@pytest.mark.parametrize("batch", [101, 112, 113, 4096])
def test_micro_batches_are_few_and_nearly_equal(batch):
    micro_batch, choice = Fit(images=100, useful=16, reason="there is room").choose(batch)
    assert choice == f"micro-batches of {micro_batch}: there is room"
    assert micro_batch <= 16
    sizes = [len(part) for part in torch.arange(batch).split(micro_batch)]
    assert len(sizes) == -(-batch // 16)
    assert sum(micro_batch - size for size in sizes) < len(sizes)


def test_a_container_s_limit_counts(tmp_path):
    assert memory._available_to_container(tmp_path) > 10**15
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("600\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 200\n")
    assert memory._available_to_container(tmp_path) > 10**15
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory._available_to_container(tmp_path) == 600


def test_free_memory_is_believable():
    assert 10**6 < free_bytes(torch.device("cpu")) < 10**14


@pytest.mark.parametrize(
    ("size", "text"),
    [(384, "384 B"), (999.7, "1 kB"), (2_100, "2.1 kB"), (212e6, "212 MB"), (11.24e9, "11.2 GB")],
)
def test_sizes_are_readable(size, text):
    assert readable_bytes(size) == text
