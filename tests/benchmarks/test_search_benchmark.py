"""The benchmark of search, on a database of seconds."""

import importlib.util
from functools import partial

import numpy as np
import pytest

from listwise.benchmarks import search as benchmark
from listwise.benchmarks import server
from listwise.errors import InputError
from listwise.models import RetrievalNet


@pytest.mark.slow
def test_every_way_is_measured_against_the_truth(tmp_path):
    begun = []
    rows = {row.method: row for row in benchmark.run([1500], 64, tmp_path, on_start=begun.append)}
    missing = importlib.util.find_spec("hnswlib") is None
    assert list(rows) == [name for name in benchmark.METHODS if name != "hnswlib" or not missing]
    assert rows["FAISS flat"].recall == rows["listwise, exact"].recall == 1
    assert rows["listwise, compressed"].recall > 0.9
    assert missing or rows["hnswlib"].recall > 0.9
    assert rows["LanceDB"].recall > 0.5
    for row in rows.values():
        assert row.entries == 1500
        assert 0 < row.p50 <= row.p99
        assert row.per_second > 0
    assert len(begun) == 2 + len(rows) + 2 * missing
    assert list(tmp_path.iterdir()) == []


def test_descriptors_lie_in_clusters(tmp_path):
    benchmark.write_descriptors(tmp_path, 1500, 64)
    database, truth = np.load(tmp_path / "database.npy"), np.load(tmp_path / "truth.npy")
    queries = np.load(tmp_path / "queries.npy")
    assert np.allclose(np.linalg.norm(database, axis=1), 1, atol=1e-5)
    scores = queries @ database.T
    order = np.argsort(-scores, axis=1)[:, :10]
    assert (order == truth).mean() > 0.99
    nearest, middle = np.sort(scores, axis=1)[:, -1], np.median(scores, axis=1)
    assert nearest.mean() - middle.mean() > 0.4


def test_sizes_are_checked():
    with pytest.raises(InputError, match="1000 descriptors"):
        list(benchmark.run([10], 8))


def test_methods_are_checked():
    with pytest.raises(InputError, match="unknown 'no' in `methods`: choose from FAISS flat; list"):
        list(benchmark.run([1000], 8, methods=["listwise, exact", "no"]))


@pytest.mark.slow
def test_the_server_answers_clients(monkeypatch):
    small = partial(RetrievalNet, "test_resnet")
    monkeypatch.setattr(server, "RetrievalNet", lambda name, weights: small(weights=weights))
    rows = list(server.run((1, 3), photos=4, side=64, seconds=0.2))
    assert [row.clients for row in rows] == [1, 3]
    assert all(row.per_second > 0 and row.refused == row.late == 0 for row in rows)
