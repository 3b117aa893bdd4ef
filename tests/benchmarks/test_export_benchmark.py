import pytest
from torch import nn

from listwise.benchmarks import export as benchmark
from listwise.errors import InputError
from listwise.models import RetrievalNet


@pytest.mark.slow
def test_each_form_is_timed_and_agrees(monkeypatch):
    layers = nn.Conv2d(3, 32, 3, 2), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 256, 3, 2)
    small = RetrievalNet(nn.Sequential(*layers))  # two of its kind are exported quickly
    monkeypatch.setattr(benchmark, "RetrievalNet", lambda name, weights: small)
    rows = list(benchmark.run("small", photos=3, side=64, rounds=2))
    assert [row.method for row in rows] == ["PyTorch", "PyTorch, folded", "ONNX", "ONNX, int8"]
    assert rows[0].speedup == 1
    assert all(row.least <= row.speedup <= row.most for row in rows)
    assert min(row.cosine for row in rows[:3]) > 0.9999
    assert rows[3].cosine > 0.95
    assert rows[2].megabytes > 3 * rows[3].megabytes


def test_no_photos():
    with pytest.raises(InputError, match="1 or more"):
        list(benchmark.run(photos=0))
