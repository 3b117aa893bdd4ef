import pytest
import torch
from step_examples import SoftmaxLoss, make_batch, make_net
from torch import Tensor, nn

from listwise.models import RetrievalNet
from listwise.training import forward as memory
from listwise.training import loading
from listwise.training.forward import (
    Fit,
    Forward,
    graph_memory,
    images_that_fit,
)
from listwise.training.loading import keep_photos
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


def test_folded_weights_are_not_counted_per_image():
    forward = Forward(RetrievalNet("resnet18", weights="random"), autocast=torch.bfloat16)
    one, two = (graph_memory(forward, torch.rand(n, 3, 32, 32)).bytes for n in (1, 2))
    assert 0 < two - one < 0.1 * one


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


@pytest.mark.parametrize("batch", [101, 112, 113, 4096])
def test_micro_batches_are_few_and_nearly_equal(batch):
    fit = Fit(images=100, useful=16, reason="there is room")
    assert fit.choose(100) == (100, "all 100 images in one pass: there is room")
    micro_batch, choice = fit.choose(batch)
    assert choice == f"micro-batches of {micro_batch}: there is room"
    assert micro_batch <= 16
    sizes = [len(part) for part in torch.arange(batch).split(micro_batch)]
    assert len(sizes) == -(-batch // 16)
    assert sum(micro_batch - size for size in sizes) < len(sizes)


def test_photos_are_kept_where_they_fit(monkeypatch):
    """A device that decodes, with memory of its own."""
    free = {"cpu": 4e9, "meta": 8e9}
    monkeypatch.setattr(loading, "gpu_decodes", lambda device: device.type == "meta")
    monkeypatch.setattr(loading, "free_bytes", lambda device: int(free[device.type]))

    def keep(device="meta"):
        return keep_photos(10, int(1.9e9), torch.device(device))

    kept, line = keep()
    assert (kept.on_device, kept.budget) == (True, 1.9e9)
    assert line == "decoded photos are kept in GPU memory: 1.9 GB of 2.0 GB allowed"
    free["meta"] = 4e9
    kept, line = keep()
    assert (kept.on_device, kept.budget) == (False, 1.9e9)
    assert "kept in host memory: 1.9 GB of 2.0 GB allowed" in line
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # processes share the memory of the host
    kept, line = keep()
    assert kept is None
    assert "decoded again in every update: they would take 1.9 GB" in line
    assert "GPU (1.0 GB) and on the host (1.0 GB)" in line
    assert keep("cpu") == (None, "")
