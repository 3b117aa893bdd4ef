"""Each measurement runs on little input, and what it compares agrees."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from tiny_net import TINY_NET
from torch import nn

from benchmarks import evaluation, extraction, local, loss, rerank, server, step, summary
from benchmarks.__main__ import main
from benchmarks.measure import DoesNotFit, measure
from listwise.data import read_images
from listwise.data.catalog import Benchmark
from listwise.evaluation import JudgedQueries
from listwise.losses import QuantizedAPLoss
from listwise.models import RetrievalNet

TINY_STEP = {"backbone": TINY_NET, "size": 48, "batch": 32, "micro_batch": 16}
TINY_EXTRACTION = {"photos": 3, "backbone": TINY_NET, "width": 64, "height": 48, "shapes": 0}


@pytest.fixture
def rows(capsys):
    """Run a part as it is typed, and return what it measures."""

    def run(part, **options):
        flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        main([part, *flags, "--json"])
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def test_loss(rows):
    descriptors, labels = loss.example(48, 8, "cpu")
    expected = QuantizedAPLoss()(descriptors, labels)
    torch.testing.assert_close(loss.dense_loss(descriptors, labels), expected)
    methods = "listwise; dense transcription"
    found = rows("loss", sizes="32,64", dim=4, methods=methods, device="cpu")
    assert [(row["method"], row["batch"]) for row in found] == [
        (method, batch) for method in methods.split("; ") for batch in (32, 64)
    ]
    assert all(row["seconds"] > 0 for row in found)


def fill(size):
    return lambda: torch.ones(size, dtype=torch.uint8)


def test_memory_is_measured_and_limited():
    found = measure(fill, 200_000_000, memory_limit=8_000_000_000)
    assert 190_000_000 < found.extra_bytes < 300_000_000
    with pytest.raises(DoesNotFit):
        measure(fill, 2_000_000_000, memory_limit=1_500_000_000)


def test_step():
    found = list(step.run("cpu", **TINY_STEP))
    assert [row.method for row in found] == list(step.CPU_METHODS)
    assert all(min(row.forward, row.both, row.step) > 0 for row in found)
    plain, precise, autocast, folded = (row.gradient_error for row in found)
    assert max(plain, precise) < 1e-3
    assert folded < 1.5 * autocast < 1


def test_input(rows):
    # Processes first: a thread that used OpenCV may hold one of its locks while it ends.
    found = rows("input", photos=3, size=32, workers="2,0", device="cpu")
    assert [(row["step"], row["workers"]) for row in found] == [
        *(("decode", 1), ("crop and color", 1)),
        *(("decode and augment", workers) for workers in (2, 0)),
    ]


def test_extraction(rows, monkeypatch):
    one, product = rows("extraction", device="cpu", **TINY_EXTRACTION)
    assert product["speedup"] == pytest.approx(product["per_second"] / one["per_second"])
    assert product["cosine"] > 0.9999
    monkeypatch.setattr(extraction, "PER_SHAPE", 2)
    monkeypatch.setattr(extraction, "SIDES", (64, 100))
    monkeypatch.setattr(extraction, "SHAPES_ALONE", 3)
    found = list(extraction.run_shapes("cpu", 5, "test_resnet.r160_in1k", workers=0))
    assert [row.photos for row in found] == [6, 10, 10, 10]
    assert min(row.cosine for row in found) > 0.9999


def test_evaluation(rows, monkeypatch, tmp_path):
    methods = ("plain", "listwise", "plain + αQE", "listwise + αQE")
    monkeypatch.setattr(evaluation, "METHODS", {each: evaluation.METHODS[each] for each in methods})
    plain, counted, *_, expanded = rows("evaluation", sizes=6000, dim=32, folder=tmp_path)
    assert counted["faster"] == pytest.approx(plain["seconds"] / counted["seconds"])
    assert max(counted["apart"], expanded["apart"]) < 1e-6
    assert 0.05 < counted["figures"]["hard"] < counted["figures"]["easy"] < 0.999
    assert list(tmp_path.iterdir()) == []


def test_search(rows, tmp_path):
    methods = "FAISS flat; listwise, exact; listwise, compressed"
    flat, exact, compressed = rows("search", sizes=1500, dim=64, methods=methods, folder=tmp_path)
    assert flat["recall"] == exact["recall"] == 1
    assert compressed["recall"] > 0.9
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_server(monkeypatch):
    small = partial(RetrievalNet, "test_resnet")
    monkeypatch.setattr(server, "RetrievalNet", lambda name, weights: small(weights=weights))
    found = list(server.run((1, 3), photos=4, side=64, seconds=0.2))
    assert [row.clients for row in found] == [1, 3]
    assert all(row.per_second > 0 and row.refused == row.late == 0 for row in found)


def test_local(rows, monkeypatch, tmp_path):
    monkeypatch.setattr(local, "SAMPLE", 3)
    monkeypatch.setattr(local, "QUERIES", 3)
    found = rows("local", photos=12, features=80, words=300, folder=tmp_path)
    assert [row["step"] for row in found] == ["extraction", "words", "index", "query", "memory"]
    assert all(row["listwise"] > 0 for row in found)
    if not found[1]["skipped"]:
        assert found[1]["figures"]["same words"] > 0.99
        assert found[3]["figures"]["largest score difference, same words"] < 1e-6
    assert list(tmp_path.iterdir()) == []


def test_rerank(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(rerank, "core_count", lambda: 1)
    images = read_images(photos)
    database, queries = images.subset([0, 6]), images.subset([1, 7])
    none = [np.zeros(0, np.int64)] * 2
    truth = JudgedQueries.revisited(
        database.ids, queries.ids, (None, None), easy=[[0], [1]], hard=none, junk=none
    )
    RetrievalNet(TINY_NET, weights="random").save(tmp_path / "model")
    opened = Benchmark("sides", database, queries, truth)
    _, stored, fresh = rerank.run(tmp_path / "model", opened)
    assert min(stored.easy, fresh.easy) > 0
    assert 0 < stored.p50 <= stored.p99


@pytest.mark.slow
def test_export(monkeypatch):
    from benchmarks import export

    layers = nn.Conv2d(3, 32, 3, 2), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 256, 3, 2)
    small = RetrievalNet(nn.Sequential(*layers))
    monkeypatch.setattr(export, "RetrievalNet", lambda name, weights: small)
    found = list(export.run("small", photos=3, side=64, rounds=2))
    assert [row.method for row in found] == ["PyTorch", "PyTorch, folded", "ONNX", "ONNX, int8"]
    assert min(row.cosine for row in found[:3]) > 0.9999
    assert found[3].cosine > 0.95


def test_a_table_of_all(capsys, monkeypatch):
    tiny = {
        "loss": {"sizes": (32,), "dim": 4, "methods": ("listwise",)},
        "step": TINY_STEP,
        "input": {"photos": 2, "size": 32, "workers": (1,)},
        "extraction": TINY_EXTRACTION | {"workers": 0},
    }
    monkeypatch.setattr(summary, "CPU_SETTINGS", tiny)
    monkeypatch.setattr(step, "CPU_METHODS", (step.PLAIN,))
    main(["summary", "--device", "cpu"])
    out = capsys.readouterr().out
    for text in (*tiny, "images/s", "photos/s", "ms of a core", "torch"):
        assert text in out
