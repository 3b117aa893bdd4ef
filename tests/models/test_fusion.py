"""Fused convolutions: the patterns in compiled graphs, and the kernels."""

import json

import pytest
import torch
import torch.nn.functional as F
from interpreter import run_script, skip_if_interpreter_is_broken
from torch import nn

pytest.importorskip("triton", minversion="3.3")

from listwise import optional
from listwise.errors import ListwiseWarning
from listwise.models.fusion import ConvolutionFusion

pytestmark = pytest.mark.slow


class Bottleneck(nn.Module):
    """A residual block; `stride` and `widen` make its shortcut a convolution."""

    def __init__(self, inputs, width, stride=1, shortcut=False, activation=torch.relu):
        super().__init__()
        self.first = nn.Conv2d(inputs, width, 1)
        self.second = nn.Conv2d(width, width, 3, stride, padding=1)
        self.third = nn.Conv2d(width, 2 * width, 1)
        self.shortcut = nn.Conv2d(inputs, 2 * width, 1, stride) if shortcut else nn.Identity()
        self.activation = activation

    def forward(self, x):
        y = self.activation(self.first(x))
        y = self.activation(self.second(y))
        return self.activation(self.third(y) + self.shortcut(x))


def graphs_of(net, fusion, monkeypatch):
    """The network, run by the graphs of the compiler after the fusion, and their operators."""
    # Here, because other workers collect this file too, and the compiler takes seconds to import.
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import decomposition

    monkeypatch.setattr(decomposition, "is_gpu", lambda device: True)  # as on a GPU
    found = []

    def run(module, inputs):
        fusion(module.graph)
        module.graph.lint()
        module.recompile()
        found.append([str(node.target) for node in module.graph.nodes])
        return make_boxed_func(module)

    backend = aot_autograd(
        fw_compiler=run,
        decompositions=decomposition.select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )
    return torch.compile(net, backend=backend, dynamic=False), found


def gradients_of(call, net, images):
    net.zero_grad()
    result = call(images)
    (result * torch.linspace(-1, 1, result.numel()).view_as(result)).sum().backward()
    return [result.detach(), *(p.grad.clone() for p in net.parameters())]


def compare(net, fusion, monkeypatch, size=6):
    torch.manual_seed(0)
    net = net.to(memory_format=torch.channels_last)
    images = torch.randn(3, 64, size, size).contiguous(memory_format=torch.channels_last)
    fused, found = graphs_of(net, fusion, monkeypatch)
    expected = gradients_of(net, net, images)
    for given, wanted in zip(gradients_of(fused, net, images), expected, strict=True):
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-4)
    return found


def on_cpu():
    return ConvolutionFusion("cpu", (torch.float32,))


def test_residual_blocks_are_fused_and_compute_the_same(monkeypatch):
    net = nn.Sequential(
        Bottleneck(64, 64, stride=2, shortcut=True),
        Bottleneck(128, 64),
        Bottleneck(128, 64, shortcut=True),
        nn.Conv2d(128, 64, 1),
    )
    fusion = on_cpu()
    forward, backward = compare(net, fusion, monkeypatch)
    assert forward.count("listwise.relu_convolution.default") == 9
    assert backward.count("listwise.relu_gradient.default") == 9
    assert fusion.fused == [9, 9]
    assert "aten.relu.default" not in forward
    assert "aten.where.self" not in backward
    # Only the bias of the last convolution has no ReLU behind it.
    assert backward.count("aten.sum.dim_IntList") == 1


class TwoReaders(nn.Module):
    """The output of a convolution before its ReLU is read again."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 1)

    def forward(self, x):
        y = self.first(x)
        z = self.second(torch.relu(y) + y)
        return torch.relu(z).mean((2, 3)) + z.mean((2, 3))


def before_relu(layer):
    return nn.Sequential(layer, nn.ReLU(), nn.Conv2d(64, 64, 1))


@pytest.mark.parametrize(
    ("net", "fused"),
    [
        (TwoReaders(), [0, 0]),
        (nn.Sequential(nn.Conv2d(64, 48, 1), nn.ReLU(), nn.Conv2d(48, 64, 1)), [0, 0]),
        (before_relu(nn.Conv2d(64, 64, 3, stride=2, padding=1, dilation=2)), [1, 1]),
        (before_relu(nn.Conv2d(64, 64, 3, bias=False)), [0, 0]),
        # Their bias has a gradient, too.
        (before_relu(nn.Conv2d(64, 64, 1, groups=2)), [0, 1]),
        (before_relu(nn.ConvTranspose2d(64, 64, 1)), [0, 1]),
        (nn.Sequential(nn.Conv2d(64, 64, 1), nn.SiLU(), nn.Conv2d(64, 64, 1)), [0, 0]),
        (nn.Sequential(nn.Conv2d(64, 64, 1), nn.LeakyReLU()), [0, 0]),
        (Bottleneck(64, 64, activation=F.silu, shortcut=True), [0, 0]),
    ],
)
def test_only_the_patterns_are_fused(net, fused, monkeypatch):
    fusion = on_cpu()
    compare(net, fusion, monkeypatch)
    assert fusion.fused == fused


def test_the_fusion_is_used_with_versions_of_torch_that_it_was_tested_with(monkeypatch):
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert version <= optional.NEWEST_TORCH, "run these tests on a GPU, and raise NEWEST_TORCH"
    assert optional.fuses_convolutions()
    monkeypatch.setattr(torch, "__version__", "99.1.0")
    optional.fuses_convolutions.cache_clear()
    with pytest.warns(ListwiseWarning, match=r"without the fusion.*99\.1\.0 is newer"):
        assert not optional.fuses_convolutions()
    optional.fuses_convolutions.cache_clear()


SCRIPT = """
import json, sys
import torch
from listwise.models import fusion

device, cases = sys.argv[1], json.loads(sys.argv[2])
torch.set_num_threads(1)


def apart(given, expected):
    return ((given.cpu().double() - expected).norm() / expected.norm()).item()


def compare(size, channels, dtype, add):
    torch.manual_seed(size)
    random = lambda: torch.randn(size, channels).to(getattr(torch, dtype))
    gradient, added, active = random(), random() if add else None, random().relu()
    there = lambda tensor: None if tensor is None else tensor.to(device)
    result = torch.full_like(active, float("nan")).to(device)
    sums = fusion.run_gradient_kernel(there(gradient), there(added), there(active), result)
    total = gradient.double() + (added.double() if add else 0)
    expected = torch.where(active > 0, total, 0)
    return [apart(result, expected), apart(sums, expected.sum(0))]


def operators(dtype):
    torch.manual_seed(0)
    maps = torch.randn(3, 64, 7, 9).to(dtype).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(128, 64, 3, 3).to(dtype) / 24, torch.randn(128).to(dtype)
    added = torch.randn(3, 128, 4, 5).to(dtype).contiguous(memory_format=torch.channels_last)
    wide = lambda *tensors: [None if each is None else each.double() for each in tensors]
    there = lambda *tensors: [None if each is None else each.to(device) for each in tensors]
    settings = ([2, 2], [1, 1], [1, 1])
    errors = []
    for more in (added, None):
        inputs = maps, weight, bias, more
        expected = fusion.relu_convolution(*wide(*inputs), *settings)
        errors.append(apart(fusion.relu_convolution(*there(*inputs), *settings), expected))
        inputs = added, more, added.flip(0).relu()
        for given, wanted in zip(
            fusion.relu_gradient(*there(*inputs)), fusion.relu_gradient(*wide(*inputs))
        ):
            errors.append(apart(given, wanted))
    return errors


found = [compare(*case) for case in cases]
if device == "cuda":
    found += [operators(torch.bfloat16), operators(torch.float16)]
print(json.dumps(found))
"""
CASES = [
    (300, 128, "float16", True),
    (256, 64, "float16", False),
    (37, 192, "float32", True),
]
GPU_CASES = [(100_003, 256, "bfloat16", True), (5000, 2048, "bfloat16", False)]


def run(device, cases):
    return json.loads(run_script(SCRIPT, device, json.dumps(cases)))


def test_kernels_in_the_interpreter():
    skip_if_interpreter_is_broken()
    for case, errors in zip(CASES, run("cpu", CASES), strict=True):
        assert max(errors) < 1e-3, (case, errors)


def test_kernels_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    for errors in run("cuda", CASES + GPU_CASES):
        assert max(errors) < 5e-3, errors
