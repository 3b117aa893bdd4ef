import json
import subprocess
import sys

import pytest
import torch

from listwise.benchmarks import loss as benchmark
from listwise.benchmarks.measure import DoesNotFit, measure
from listwise.errors import InputError
from listwise.losses import QuantizedAPLoss


def test_the_dense_transcription_is_the_same_loss():
    labels = torch.arange(48) // 16
    descriptors = torch.nn.functional.normalize(torch.randn(48, 8), dim=1)
    dense = benchmark.dense_loss(descriptors, labels)
    assert dense.item() == pytest.approx(QuantizedAPLoss()(descriptors, labels).item(), abs=1e-5)


def fill(size):
    def call():
        return torch.ones(size, dtype=torch.uint8)

    return call


def test_memory_is_measured_and_limited():
    found = measure(fill, 200_000_000, memory_limit=8_000_000_000)
    assert 190_000_000 < found.extra_bytes < 300_000_000
    assert found.seconds > 0
    if sys.platform == "linux":
        with pytest.raises(DoesNotFit):
            measure(fill, 2_000_000_000, memory_limit=1_500_000_000)


def test_the_command_prints_a_row_for_each_method_and_size():
    command = [sys.executable, "-m", "listwise", "benchmark", "loss"]
    options = ["--sizes", "32,64", "--dim", "16", "--json"]
    printed = subprocess.run(command + options, capture_output=True, text=True, check=True).stdout
    rows = [json.loads(line) for line in printed.splitlines()]
    assert [(row["method"], row["batch"]) for row in rows] == [
        (method, batch) for method in benchmark.METHODS for batch in (32, 64)
    ]
    for row in rows:
        assert row["skipped"] or row["seconds"] > 0


def test_bad_sizes():
    with pytest.raises(InputError, match="multiples of 16"):
        list(benchmark.run([20]))
