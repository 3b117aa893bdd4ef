"""The GPU kernels against the paper's equations, run by Triton's interpreter without a GPU."""

import json
import os

import pytest
from interpreter import run_script, skip_if_interpreter_is_broken

pytest.importorskip("triton", minversion="3.3")

SOAK = bool(os.environ.get("LISTWISE_SOAK"))
SCRIPT = """
import json, sys
import reference
import torch
from listwise.errors import InputError
from listwise.losses import QuantizedAPLoss, gpu

device, cases = sys.argv[1], json.loads(sys.argv[2])
torch.set_num_threads(1)
if device == "cpu":
    # Several tiles, squares of tiles and strips even of a small batch.
    tiling = gpu.tiling(32, 64, 64, 1, 4, 1)
    gpu.HISTOGRAM_TILING = gpu.WEIGHT_TILING = {True: tiling, False: tiling}
    gpu.SMALL_TILING = tiling
    gpu.STRIP_ROWS, gpu.STRIP_COLUMNS = 32, 64


def loss(descriptors, labels, weights, bins, include_self, start, stop):
    if device == "cpu":
        return gpu.quantized_loss(descriptors, labels, weights, bins, include_self, start, stop)
    module = QuantizedAPLoss(bins, include_self=include_self)
    return module(descriptors, labels, weights, queries=(start, stop))


def apart(given, expected, unit):
    # At a score of exactly one the slope depends on the last bit, but points along the
    # descriptor itself, where the normalization before it takes no gradient.
    unit = torch.nn.functional.normalize(unit, dim=1)
    error = given - expected
    error -= (error * unit).sum(1, keepdim=True) * unit
    return (error.norm() / expected.norm()).item()


def batch(size, dim, classes, dtype):
    generator = torch.Generator().manual_seed(size)
    labels = torch.randint(0, classes, (2 * size,), generator=generator)
    raw = torch.randn(classes, dim, generator=generator, dtype=torch.float64)[labels[::2]]
    raw += torch.randn(size, dim, generator=generator, dtype=torch.float64)
    raw[3] = raw[5]
    descriptors = torch.nn.functional.normalize(raw, dim=1).to(getattr(torch, dtype))
    # Large numbers, every second of a longer tensor: labels need not lie side by side.
    return generator, descriptors, (labels * 10**10)[::2]


def compare(size, dim, bins, include_self, start, stop, dtype, classes, weighted):
    generator, descriptors, labels = batch(size, dim, classes, dtype)
    weights = torch.rand(size, generator=generator) if weighted else None
    exact = descriptors.double().requires_grad_()
    if (start, stop) == (0, size):
        expected = reference.loss(exact, labels, bins, weights, include_self)
    else:
        module = QuantizedAPLoss(bins, include_self=include_self)
        expected = module(exact, labels, weights, queries=(start, stop))
    expected.backward()
    results = []
    # The second time from an odd address on; a small batch in the interpreter, which is slow.
    for offset in range(2 if device == "cuda" or size <= 40 else 1):
        there = descriptors.new_empty(offset + descriptors.numel(), device=device)[offset:]
        there = there.view(size, dim).copy_(descriptors).requires_grad_()
        far = labels.to(device).repeat_interleave(2)[::2]
        heavy = None if weights is None else weights.to(device)
        value = loss(there, far, heavy, bins, include_self, start, stop)
        (1024 * value).backward()
        results.append((value, there.grad))
    (value, gradient), (again, gradient_again) = results[0], results[-1]
    unit = exact.detach()
    return {
        "repeats": torch.equal(value, again) and torch.equal(gradient, gradient_again),
        "loss": abs(value.item() - expected.item()),
        "gradient": apart(gradient.cpu().double() / 1024, exact.grad, unit),
    }


def one_class(bins):
    rows = torch.cat([torch.eye(4), -torch.eye(4), torch.eye(4)[:1]]).to(device).requires_grad_()
    value = loss(rows, torch.zeros(9, dtype=torch.int64, device=device), None, bins, False, 0, 9)
    value.backward()
    return [abs(value.item()), rows.grad.abs().max().item()]


def centers(bins):
    # Scores of -1, -0.5, 0, 0.5 and 1, which are centers of the bins, and many bins are empty.
    generator = torch.Generator().manual_seed(bins)
    signs = torch.randint(0, 2, (30, 4), generator=generator) - 0.5
    labels = torch.randint(0, 9, (30,), generator=generator)
    exact = signs.double().requires_grad_()
    expected = reference.loss(exact, labels, bins)
    expected.backward()
    there = signs.to(device).requires_grad_()
    value = loss(there, labels.to(device), None, bins, False, 0, 30)
    value.backward()
    error = (there.grad.cpu().double() - exact.grad).norm() / exact.grad.norm()
    return [abs(value.item() - expected.item()), error.item()]


def refuse(change):
    _, descriptors, labels = batch(40, 8, 4, "float32")
    weights = torch.ones(40)
    if change == "length":
        descriptors = descriptors * 1.5
    if change == "lonely":
        labels = torch.arange(40)
    if change in ("negative", "nan", "zero"):
        weights[:] = {"negative": -1.0, "nan": float("nan"), "zero": 0.0}[change]
    try:
        loss(descriptors.to(device), labels.to(device), weights.to(device), 20, False, 0, 40)
    except InputError as error:
        return str(error)


functions = {
    "loss": compare,
    "refuse": refuse,
    "one class": one_class,
    "centers": centers,
}
print(json.dumps([functions[name](*case) for name, *case in cases]))
"""
CASES = [
    ("loss", 66, 70, 20, False, 0, 66, "float32", 9, True),
    ("loss", 65, 64, 5, True, 0, 65, "float32", 7, False),
    ("loss", 70, 24, 20, False, 17, 60, "float32", 7, True),
    ("loss", 65, 10, 20, False, 64, 65, "float32", 3, False),
    ("loss", 40, 130, 2, False, 0, 40, "float16", 5, False),
    ("loss", 40, 33, 128, True, 3, 40, "float16", 12, True),
]
# The interpreter is slow: these reach every branch of the kernels.
INTERPRETED = CASES if SOAK else [CASES[0], CASES[5]]
# Triton's interpreter does not multiply these.
GPU_CASES = [
    ("loss", 500, 70, 20, False, 0, 500, "bfloat16", 9, True),
    ("loss", 1000, 256, 20, False, 300, 1000, "bfloat16", 50, False),
    ("loss", 1000, 256, 20, False, 0, 1000, "float32", 50, False),
]
CENTERS = [("one class", 3), ("centers", 17)]
if SOAK:
    CENTERS += [("one class", 17), ("centers", 3)]
REFUSALS = {
    "length": "unit length",
    "lonely": "no query has a positive",
    "negative": "not negative",
    "nan": "finite",
    "zero": "no query has a positive",
}


def need_a_gpu():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return torch


@pytest.fixture(scope="module", params=[pytest.param("cpu", marks=pytest.mark.slow), "cuda"])
def device(request):
    if request.param == "cuda":
        need_a_gpu()
    else:
        skip_if_interpreter_is_broken()
    return request.param


@pytest.fixture(scope="module")
def found(device):
    """Each case and what the script finds, in one process: its imports take long."""
    cases = [*(CASES + GPU_CASES if device == "cuda" else INTERPRETED), *CENTERS]
    cases += [("refuse", name) for name in REFUSALS]
    results = json.loads(run_script(SCRIPT, device, json.dumps(cases)))
    return list(zip(cases, results, strict=True))


def test_kernels(found, device):
    """In the interpreter, and on a GPU."""
    compared = [(case, result) for case, result in found if case[0] == "loss"]
    assert len(compared) >= len(INTERPRETED)
    for case, result in compared:
        assert result["repeats"], case
        assert result["loss"] < 3e-5, (case, result)
        # Half precision comes back rounded, and tensor cores round its scores at bin centers.
        fast = device == "cuda" and "float32" not in case
        assert result["gradient"] < (1e-2 if fast else 1e-3), (case, result)


def test_refusals(found):
    messages = {case[1]: message for case, message in found if case[0] == "refuse"}
    assert messages.keys() == REFUSALS.keys()
    for name, expected in REFUSALS.items():
        assert expected in messages[name]


def test_scores_on_bin_centers(found):
    errors = {case: errors for case, errors in found if case in CENTERS}
    assert len(errors) == len(CENTERS)
    for (name, bins), each in errors.items():
        assert max(each) < (1e-5 if name == "one class" else 1e-3), (name, bins)


def test_memory_on_a_gpu_grows_with_the_batch_alone():
    torch = need_a_gpu()
    from listwise.losses import QuantizedAPLoss

    def extra(size):
        raw = torch.randn(size, 64, device="cuda", dtype=torch.bfloat16)
        descriptors = torch.nn.functional.normalize(raw, dim=1).requires_grad_()
        labels = torch.arange(size, device="cuda") // 4
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        QuantizedAPLoss()(descriptors, labels).backward()
        return torch.cuda.max_memory_allocated() - before

    extra(64)
    assert extra(65_536) < 1.2 * 2 * extra(32_768)


def test_float32_products_stay_exact_where_tf32_is_allowed():
    torch = need_a_gpu()
    from listwise.losses.histogram import products

    rows = torch.randn(256, 128, generator=torch.Generator().manual_seed(0)).cuda()
    plain = products(rows, rows)
    try:
        torch.set_float32_matmul_precision("high")
        assert torch.equal(products(rows, rows), plain)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
