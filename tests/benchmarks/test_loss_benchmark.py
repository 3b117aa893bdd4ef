import json
import os
import sys

import pytest
import torch
from typer.testing import CliRunner

from listwise.benchmarks import loss as benchmark
from listwise.benchmarks.measure import DoesNotFit, available_memory, measure
from listwise.cli.benchmark import app
from listwise.errors import InputError
from listwise.losses import QuantizedAPLoss
from listwise.training import memory


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


def need(module):
    return lambda: __import__(module)


def end(code):
    return lambda: os._exit(code)


def test_only_what_lacks_memory_does_not_fit():
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        measure(need, "no_such_module", memory_limit=8_000_000_000)
    with pytest.raises(DoesNotFit):
        measure(end, 9, memory_limit=8_000_000_000)


def test_a_method_that_is_not_installed_is_said_to_be(monkeypatch, tmp_path):
    # In the process that measures, the package is found here first, and is not whole.
    (tmp_path / "pytorch_metric_learning").mkdir()
    (tmp_path / "pytorch_metric_learning" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (row,) = benchmark.run([32], dim=4, methods=["FastAP (pml)"])
    assert row.skipped == "not installed (pip install 'listwise[compare]')"


def test_the_limit_of_a_container_counts(monkeypatch):
    monkeypatch.setattr(memory, "_available_to_container", lambda: 1000)
    assert available_memory() == 1000


def test_the_command_prints_a_row_for_each_method():
    options = ["loss", "--sizes", "32", "--dim", "16", "--json"]
    printed = CliRunner().invoke(app, options).stdout
    rows = [json.loads(line) for line in printed.splitlines()]
    assert [(row["method"], row["batch"]) for row in rows] == [
        (method, 32) for method in benchmark.METHODS
    ]
    for row in rows:
        assert row["skipped"] or row["seconds"] > 0


def test_examples_are_classes_of_one_size_that_can_be_told_apart():
    descriptors, labels = benchmark.example(320, 64, "cpu")
    assert labels.bincount().tolist() == [benchmark.CLASS_SIZE] * 20
    assert (labels.diff() < 0).any()
    scores = descriptors @ descriptors.T
    same = labels[:, None] == labels
    same.fill_diagonal_(False)
    assert scores[same].mean() > scores[~same & ~torch.eye(320, dtype=torch.bool)].mean() + 0.1


def test_a_gpu_is_measured_in_its_own_precisions():
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="no CUDA GPU"):
            list(benchmark.run([32], device="cuda"))
        return
    rows = list(benchmark.run([64, 1024], dim=64, device="cuda"))
    assert {row.method for row in rows} == set(benchmark.methods_on("cuda"))
    assert all(row.seconds > 0 and row.extra_bytes > 0 for row in rows)


def test_the_gpu_that_was_given_is_measured():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a CUDA GPU, and a second one")
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.max_memory_allocated(0)
    (row,) = benchmark.run([1024], dim=64, methods=["listwise"], device="cuda:1")
    assert row.seconds > 0
    assert row.extra_bytes > 0
    assert torch.cuda.max_memory_allocated(0) == before


def test_bad_sizes():
    with pytest.raises(InputError, match="multiples of 16"):
        list(benchmark.run([20]))
