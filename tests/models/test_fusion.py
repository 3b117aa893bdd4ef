"""Fused 1 × 1 convolutions: the patterns in compiled graphs, and the kernels."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

pytest.importorskip("triton", minversion="3.3")

import torch._inductor.decomposition as decomposition
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from listwise.models.fusion import PointwiseFusion


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
    return PointwiseFusion("cpu", (torch.float32,))


def test_residual_blocks_are_fused_and_compute_the_same(monkeypatch):
    net = nn.Sequential(
        Bottleneck(64, 64, stride=2, shortcut=True),
        Bottleneck(128, 64),
        Bottleneck(128, 64, shortcut=True),
        nn.Conv2d(128, 64, 1),
    )
    fusion = on_cpu()
    forward, backward = compare(net, fusion, monkeypatch)
    assert forward.count("listwise.relu_convolution.default") == 6
    # Left: the ReLU after each 3 × 3 convolution.
    assert forward.count("aten.relu.default") == 3
    # The inputs of three third convolutions, of two blocks, and of the last convolution.
    assert backward.count("listwise.relu_gradient.default") == 6
    assert fusion.fused == [6, 6]
    # Without a ReLU of 1 × 1 convolutions only those of the 3 × 3 convolutions are left.
    assert backward.count("aten.where.self") == 3


def test_without_gradients(monkeypatch):
    net = Bottleneck(64, 64, shortcut=True).to(memory_format=torch.channels_last)
    images = torch.randn(2, 64, 5, 5).contiguous(memory_format=torch.channels_last)
    fused, found = graphs_of(net, on_cpu(), monkeypatch)
    with torch.no_grad():
        torch.testing.assert_close(fused(images), net(images), rtol=1e-4, atol=1e-4)
    (graph,) = found
    assert graph.count("listwise.relu_convolution.default") == 2


class TwoReaders(nn.Module):
    """The output of a convolution before its ReLU is read again."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 1)

    def forward(self, x):
        y = self.first(x)
        z = self.second(torch.relu(y) + y)
        return torch.relu(z).mean((2, 3)) + z.mean((2, 3))


@pytest.mark.parametrize(
    "net",
    [
        TwoReaders(),
        nn.Sequential(nn.Conv2d(64, 48, 1), nn.ReLU(), nn.Conv2d(48, 64, 1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(64, 64, 1, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(64, 64, 1, stride=2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(64, 64, 1, groups=2), nn.ReLU()),
        nn.Sequential(nn.Conv2d(64, 64, 3), nn.ReLU()),
        nn.Sequential(nn.ConvTranspose2d(64, 64, 1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(64, 64, 1), nn.SiLU(), nn.Conv2d(64, 64, 1), nn.LeakyReLU()),
        Bottleneck(64, 64, activation=nn.functional.silu, shortcut=True),
    ],
)
def test_other_patterns_stay_as_they_are(net, monkeypatch):
    fusion = on_cpu()
    compare(net, fusion, monkeypatch)
    assert fusion.fused == [0, 0]


def test_types_and_devices_without_a_kernel_stay_as_they_are(monkeypatch):
    fusion = PointwiseFusion()
    compare(Bottleneck(64, 64, shortcut=True), fusion, monkeypatch)
    assert fusion.fused == [0, 0]


def test_other_versions_have_other_entries_in_the_cache():
    assert on_cpu().uuid() == on_cpu().uuid() != PointwiseFusion().uuid()


# The interpreter must be chosen before Triton is imported, so the comparison runs in a process.
SCRIPT = """
import json, sys
import torch
from listwise.models import fusion, fusion_kernels as kernels

device, cases = sys.argv[1], json.loads(sys.argv[2])
torch.set_num_threads(1)


def apart(given, expected):
    return ((given.cpu().double() - expected).norm() / expected.norm()).item()


def compare(size, inputs, outputs, dtype, add):
    torch.manual_seed(size)
    random = lambda *shape: torch.randn(*shape).to(getattr(torch, dtype))
    maps, weight, bias = random(size, inputs), random(outputs, inputs) / 8, random(outputs)
    added, active = random(size, outputs) if add else None, random(size, outputs).relu()
    there = lambda tensor: None if tensor is None else tensor.to(device)
    result = torch.full_like(active, float("nan")).to(device)
    kernels.relu_convolution(*map(there, (maps, weight, bias, added)), result)
    more = added.double() if add else 0
    expected = (maps.double() @ weight.double().T + bias.double() + more).relu()
    errors = [apart(result, expected)]
    result.fill_(float("nan"))
    other = random(inputs, outputs) / 8
    sums = kernels.relu_gradient(*map(there, (maps, other, added, active)), result)
    expected = torch.where(active > 0, maps.double() @ other.double() + more, 0)
    return errors + [apart(result, expected), apart(sums, expected.sum(0))]


def operators(dtype):
    torch.manual_seed(0)
    maps = torch.randn(3, 64, 7, 9).to(dtype).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.randn(128, 64, 1, 1).to(dtype) / 8, torch.randn(128).to(dtype)
    added = torch.randn(3, 128, 7, 9).to(dtype).contiguous(memory_format=torch.channels_last)
    wide = lambda *tensors: [tensor.double() for tensor in tensors]
    there = lambda *tensors: [tensor.to(device) for tensor in tensors]
    expected = fusion.relu_convolution(*wide(maps, weight, bias, added))
    given = fusion.relu_convolution(*there(maps, weight, bias, added))
    errors = [apart(given, expected)]
    inputs = (added, weight, maps, maps.relu())
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
    (200, 64, 128, "float16", True),
    (128, 128, 64, "float16", False),
    (37, 192, 192, "float32", True),
]
GPU_CASES = [
    (100_003, 64, 256, "bfloat16", True),
    (5000, 1024, 256, "bfloat16", False),
    (5000, 512, 2048, "float16", True),
]


def run(device, cases):
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1" if device == "cpu" else "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", SCRIPT, device, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_kernels_in_the_interpreter():
    for case, errors in zip(CASES, run("cpu", CASES), strict=True):
        assert max(errors) < 1e-3, (case, errors)


def test_kernels_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    cases = [case for case in CASES if "float32" not in case] + GPU_CASES
    for errors in run("cuda", cases):
        assert max(errors) < 5e-3, errors
