"""The fast max pooling against PyTorch's, and its kernels."""

import json

import pytest
import torch
import torch.nn.functional as F
from interpreter import run_script
from torch import nn

from listwise.models import max_pool
from listwise.models.max_pool import (
    FastMaxPool,
    max_pool_values,
    replace_max_pools,
    suits_max_pool,
)

SIZES = [(9, 11), (8, 10), (1, 3), (70, 67)]


def maps(height, width, channels=64):
    """Feature maps after a ReLU, with many equal values."""
    generator = torch.Generator().manual_seed(height)
    values = torch.randn(2, channels, height, width, generator=generator).round(decimals=1)
    return values.relu().contiguous(memory_format=torch.channels_last).requires_grad_()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("channels", [64, 24])
def test_values_and_gradients_are_those_of_pytorch(sizes, channels):
    given, expected = maps(*sizes, channels), maps(*sizes, channels)
    wanted = F.max_pool2d(expected, 3, 2, 1)
    gradient = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    torch.autograd.backward(wanted, gradient)
    values = FastMaxPool()(given)
    torch.autograd.backward(values, gradient)
    assert torch.equal(values, wanted)
    torch.testing.assert_close(given.grad, expected.grad)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_float64_stays_float64(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    given = (maps(8, 9).detach().double() + 1e-12).to(device)
    found, expected = given.clone().requires_grad_(), given.clone().requires_grad_()
    values, wanted = FastMaxPool()(found), F.max_pool2d(expected, 3, 2, 1)
    assert torch.equal(values, wanted)
    gradient = torch.linspace(1, 2, wanted.numel(), dtype=wanted.dtype, device=device)
    values.backward(gradient.view_as(wanted))
    wanted.backward(gradient.view_as(wanted))
    assert torch.equal(found.grad, expected.grad)
    assert not suits_max_pool(given)  # the kernels would round to float32


def test_values_without_a_gradient():
    with torch.no_grad():
        assert torch.equal(FastMaxPool()(maps(8, 9)), F.max_pool2d(maps(8, 9), 3, 2, 1))


def test_operators_keep_the_rules_of_the_compiler():
    torch.library.opcheck(max_pool._max_pool, (maps(8, 9),))
    values, offsets = max_pool._max_pool(maps(8, 9).detach())
    torch.library.opcheck(max_pool._max_pool_gradient, (values, offsets, 8, 9))


def test_in_a_compiled_network():
    conv = nn.Conv2d(64, 64, 1)
    net = torch.compile(nn.Sequential(conv, FastMaxPool()), backend="aot_eager")
    given, expected = maps(8, 9), maps(8, 9)
    net(given).sum().backward()
    F.max_pool2d(conv(expected), 3, 2, 1).sum().backward()
    torch.testing.assert_close(given.grad, expected.grad)


def test_only_usual_poolings_are_replaced():
    watched = nn.MaxPool2d(3, 2, 1)
    watched.register_forward_hook(lambda *args: None)
    kept = [
        nn.MaxPool2d(2, 2),
        nn.MaxPool2d(3, 2),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        nn.MaxPool2d(3, 2, 1, return_indices=True),
        nn.MaxPool2d(3, 2, 1, dilation=2),
        nn.AvgPool2d(3, 2, 1),
        watched,
    ]
    net = nn.Sequential(
        nn.Sequential(nn.MaxPool2d(3, 2, 1)), nn.MaxPool2d((3, 3), (2, 2), 1), *kept
    )
    replace_max_pools(net)
    assert isinstance(net[0][0], FastMaxPool)
    assert isinstance(net[1], FastMaxPool)
    assert list(net)[2:] == kept


SCRIPT = """
import json, sys
import torch
import torch.nn.functional as F
from listwise.models import max_pool, max_pool_kernels as kernels

device, cases = sys.argv[1], json.loads(sys.argv[2])
found = []
for height, width, channels, dtype in cases:
    torch.manual_seed(height)
    maps = torch.randn(2, channels, height, width).round(decimals=1).relu()
    maps = maps.contiguous(memory_format=torch.channels_last).to(getattr(torch, dtype))
    wide = maps.double().requires_grad_()
    wanted = F.max_pool2d(wide, 3, 2, 1)
    gradient = torch.randn(wanted.shape).to(maps.dtype)
    wanted.backward(gradient.double())
    values, offsets = (each.fill_(77) for each in max_pool._empty_outputs(maps.to(device)))
    kernels.max_pool(maps.to(device), values, offsets)
    result = torch.full_like(maps, float("nan")).to(device)
    there = gradient.to(device).contiguous(memory_format=torch.channels_last)
    kernels.max_pool_gradient(there, offsets, result)
    error = (result.cpu().double() - wide.grad).norm() / wide.grad.norm()
    found.append([torch.equal(values.cpu().double(), wanted.detach()), error.item()])
print(json.dumps(found))
"""


def check(device, cases):
    found = json.loads(run_script(SCRIPT, device, json.dumps(cases)))
    for case, (same, error) in zip(cases, found, strict=True):
        assert same, case
        assert error < (3e-3 if "bfloat16" in case else 1e-3), case


@pytest.mark.slow
def test_kernels_in_the_interpreter():
    pytest.importorskip("triton", minversion="3.3")
    # One row for each program: the last size has two parts of a row, and only few rows.
    sizes = [*SIZES[:3], (4, 67)]
    check("cpu", [(*each, 64, "float32") for each in sizes] + [(3, 9, 128, "float16")])


def test_kernels_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    cases = [(*sizes, 64, "float32") for sizes in SIZES] + [(130, 131, 128, "bfloat16")]
    check("cuda", cases)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("shape", [(3, 64, 33, 70), (2, 128, 64, 96), (1, 64, 1, 5)])
def test_values_alone_on_a_gpu(shape):
    for dtype in (torch.bfloat16, torch.float16):
        maps = torch.randn(shape, device="cuda").to(dtype, memory_format=torch.channels_last)
        assert suits_max_pool(maps)
        assert torch.equal(max_pool_values(maps), F.max_pool2d(maps, 3, 2, 1))
    assert not suits_max_pool(maps[:, :48])
