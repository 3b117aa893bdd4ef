"""Losses whose kernels a CUDA graph starts, against the same kernels started one by one."""

import gc
import threading

import pytest
import torch

from listwise.errors import InputError
from listwise.losses import QuantizedAPLoss

if not torch.cuda.is_available():
    pytest.skip("graphs need a GPU", allow_module_level=True)

from listwise.losses import gpu, recording


@pytest.fixture(autouse=True)
def no_graphs():
    """Start without graphs, and end without them."""
    recording._THREAD.__dict__.clear()
    gpu._cached_kernels.cache_clear()
    yield
    recording._THREAD.__dict__.clear()
    gpu._cached_kernels.cache_clear()


def graphs():
    return vars(recording._THREAD).get("graphs", {})


def batch(seed, size=160, dim=128, dtype=torch.float32):
    generator = torch.Generator("cuda").manual_seed(seed)
    labels = torch.randint(0, 12, (size,), generator=generator, device="cuda")
    raw = torch.randn(12, dim, generator=generator, device="cuda")[labels]
    raw += 2 * torch.randn(size, dim, generator=generator, device="cuda")
    weights = torch.rand(size, generator=generator, device="cuda")
    unit = torch.nn.functional.normalize(raw, dim=1).to(dtype)
    return unit.requires_grad_(), labels, weights


def result(seed, loss, weighted=False, queries=None, scale=0.37, **shape):
    descriptors, labels, weights = batch(seed, **shape)
    value = loss(descriptors, labels, weights if weighted else None, queries=queries)
    (scale * value).backward()
    return value.detach(), descriptors.grad


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


CASES = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16, padded": {"dtype": torch.float16, "dim": 100},
    "padded": {"dim": 100, "size": 333},
    "weighted": {"weighted": True},
    "weighted, bfloat16": {"weighted": True, "dtype": torch.bfloat16},
    "some queries": {"queries": (32, 96)},
    "large": {"size": 2048, "dim": 256},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("autocast", [False, True])
def test_graphs_compute_the_same_bits(case, autocast, monkeypatch):
    loss = QuantizedAPLoss()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        found = [result(seed, loss, **case) for seed in range(6)]
        assert len(graphs()) == 1
        monkeypatch.setattr(recording, "LARGEST_BATCH", 0)
        expected = [result(seed, loss, **case) for seed in range(6)]
    assert all(map(same, found, expected))


def test_several_losses_before_a_backward_pass():
    loss = QuantizedAPLoss()
    expected = [result(seed, loss) for seed in range(2)]
    batches = [batch(seed) for seed in (0, 1, 0)]
    values = [loss(descriptors, labels) for descriptors, labels, _ in batches]
    assert len(graphs()) == 1
    (0.37 * values[1]).backward(retain_graph=True)
    (0.37 * values[0]).backward()
    assert same((values[0], batches[0][0].grad), expected[0])
    assert same((values[1], batches[1][0].grad), expected[1])
    (0.37 * values[1]).backward()
    assert torch.equal(batches[1][0].grad, 2 * expected[1][1])


def test_streams_and_threads_have_their_own_graphs():
    loss = QuantizedAPLoss()
    expected = [result(seed, loss) for seed in range(8)]
    assert len(graphs()) == 1
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert all(same(result(seed, loss), expected[seed]) for seed in range(8))
    torch.cuda.current_stream().wait_stream(stream)
    assert len(graphs()) == 2
    agree = []

    def compute():
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [same(result(seed, loss), expected[seed]) for seed in range(8)]
        agree.append(all(found) and len(graphs()) == 1)

    threads = [threading.Thread(target=compute) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert agree == [True, True]


def test_no_graph_without_a_gradient_or_while_the_caller_records_one():
    loss = QuantizedAPLoss()
    (value, _), *_ = (result(0, loss) for _ in range(2))
    descriptors, labels, _ = batch(0)
    with torch.no_grad():
        assert torch.equal(loss(descriptors, labels), value)
    assert torch.equal(loss(descriptors.detach(), labels), value)
    assert not graphs()


def test_errors_are_found_and_later_batches_are_right():
    loss = QuantizedAPLoss()
    expected, *_ = [result(0, loss) for _ in range(4)]
    descriptors, labels, _ = batch(0)
    with pytest.raises(InputError, match="unit"):
        loss((2 * descriptors).detach().requires_grad_(), labels)
    with pytest.raises(InputError, match="positive"):
        loss(descriptors, torch.arange(len(labels), device="cuda"))
    assert same(result(0, loss), expected)


def test_graphs_and_their_memory_are_bounded():
    loss = QuantizedAPLoss()
    for size in range(64, 64 + 16 * 8, 16):
        for seed in range(4):
            result(seed, loss, size=size)
    assert len(graphs()) == recording.GRAPHS
    assert len(vars(recording._THREAD)["streams"]) == 1
    held = torch.cuda.memory_allocated()
    recording._THREAD.__dict__.clear()
    gpu._cached_kernels.cache_clear()
    gc.collect()
    assert torch.cuda.memory_allocated() < held


def test_kernels_are_started_one_by_one_if_recording_fails(monkeypatch):
    class Broken(torch.cuda.CUDAGraph):
        def capture_begin(self, *args, **options):
            raise RuntimeError("not supported")

    loss = QuantizedAPLoss()
    expected = result(0, loss)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Broken)
    assert all(same(result(0, loss), expected) for _ in range(4))
    assert not graphs()
