"""The GPU kernels against the plain path, run by Triton's interpreter where there is no GPU."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# The interpreter must be chosen before Triton is imported, so the comparison runs in a process.
SCRIPT = """
import json, sys
import torch
from listwise.losses import gpu, histogram

device = sys.argv[1]
gpu.TILE_ROWS, gpu.TILE_COLUMNS = 16, 24
found = []
for size, bins, include_self, start, stop, dtype in json.loads(sys.argv[2]):
    generator = torch.Generator().manual_seed(size)
    dtype = getattr(torch, dtype)
    raw = torch.randn(size, 8, generator=generator, dtype=torch.float64)
    raw[3] = raw[5]
    descriptors = torch.nn.functional.normalize(raw, dim=1).to(dtype)
    # Every second of a longer tensor: labels need not lie side by side in memory.
    labels = torch.randint(0, 5, (2 * size,), generator=generator)[::2]
    exact = descriptors.double()
    there = descriptors.to(device), labels.to(device).repeat_interleave(2)[::2]
    plain = histogram._label_histograms(exact, labels, bins, include_self, start, stop)
    fast = gpu.label_histograms(*there, bins, include_self, start, stop).cpu()
    gradient = torch.rand(2, stop - start, bins, generator=generator, dtype=torch.float64)
    expected = histogram._label_histograms_backward(
        gradient, exact, labels, include_self, start, stop
    )
    slopes = torch.zeros(size, 2 * (2 * bins - 1))
    slopes[start:stop] = histogram._slopes(gradient).float()
    given = gpu.label_histograms_backward(
        slopes.to(device), *there, bins, include_self, start, stop
    ).cpu().double()
    # At a score of exactly one the slope depends on the last bit, but points along the
    # descriptor itself, where the normalisation before it takes no gradient.
    expected -= (expected * exact).sum(1, keepdim=True) * exact
    given -= (given * exact).sum(1, keepdim=True) * exact
    found.append([
        (fast.double() - plain).abs().max().item(),
        ((given - expected).norm() / expected.norm()).item(),
    ])
print(json.dumps(found))
"""
CASES = [
    (40, 20, False, 0, 40, "float32"),
    (37, 5, True, 0, 37, "float32"),
    (37, 20, False, 7, 22, "float32"),
    (33, 70, False, 0, 33, "float32"),
    (29, 2, True, 3, 29, "float16"),
    (50, 20, False, 0, 50, "bfloat16"),
    (40, 20, False, 17, 18, "float32"),
]


def run(device, interpret):
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0"}
    command = [sys.executable, "-c", SCRIPT, device, json.dumps(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    for case, (histogram_error, gradient_error) in zip(CASES, json.loads(done.stdout), strict=True):
        assert histogram_error < 3e-5, case
        # High parts of 8 entries only: averaging over real descriptors' hundreds makes it less.
        assert gradient_error < (5e-3 if case[-1] == "bfloat16" else 1e-3), case


def test_kernels_in_the_interpreter():
    run("cpu", interpret=True)


def test_kernels_on_a_gpu():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    run("cuda", interpret=False)


def test_float32_scores_stay_exact_where_tf32_is_allowed():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    from listwise.losses.histogram import products

    rows = torch.randn(256, 128, generator=torch.Generator().manual_seed(0)).cuda()
    plain = products(rows, rows)
    try:
        torch.set_float32_matmul_precision("high")
        assert torch.equal(products(rows, rows), plain)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
