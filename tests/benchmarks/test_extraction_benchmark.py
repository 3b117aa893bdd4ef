import pytest
from tiny_net import TINY_NET

from listwise.benchmarks import extraction as benchmark
from listwise.errors import InputError
from listwise.models.embed import MIXED


def test_both_ways_are_timed_and_agree():
    rows = list(
        benchmark.run(
            "cpu",
            photos=5,
            backbone=TINY_NET,
            width=96,
            height=64,
            workers=0,
        )
    )
    loop, product = rows
    assert (loop.method, product.method) == ("one at a time", "listwise extract")
    assert loop.photos == product.photos == 5
    assert loop.precision == product.precision == "float32"
    assert loop.setting == product.setting == "96 × 64, tiny_net"
    assert product.speedup == pytest.approx(product.per_second / loop.per_second)
    assert product.cosine > 0.9999


def test_no_photos():
    with pytest.raises(InputError, match="1 or more"):
        list(benchmark.run("cpu", photos=0))


def test_batches_of_one_shape_and_of_mixed_shapes_agree(monkeypatch):
    monkeypatch.setattr(benchmark, "PER_SHAPE", 2)
    monkeypatch.setattr(benchmark, "SIDES", (64, 100))
    monkeypatch.setattr(benchmark, "SHAPES_ALONE", 3)
    rows = list(benchmark.run_shapes("cpu", 5, "test_resnet.r160_in1k", workers=0))
    assert [row.method for row in rows] == [
        "batches of one shape",
        "mixed batches",
        "mixed batches, second pass",
        "whole command",
    ]
    assert [row.photos for row in rows] == [6, 10, 10, 10]
    assert rows[0].speedup == 1
    assert min(row.cosine for row in rows) > 0.9999
    assert MIXED == {"cpu": False, "cuda": True}
    with pytest.raises(InputError, match="1 or more"):
        list(benchmark.run_shapes("cpu", shapes=0))
