import pytest

from listwise.benchmarks import extraction as benchmark
from listwise.errors import InputError


def test_both_ways_are_timed_and_agree():
    rows = list(
        benchmark.run(
            "cpu",
            photos=5,
            backbone="test_resnet.r160_in1k",
            width=96,
            height=64,
            workers=0,
        )
    )
    loop, product = rows
    assert (loop.method, product.method) == ("one at a time", "listwise extract")
    assert loop.photos == product.photos == 5
    assert loop.precision == product.precision == "float32"
    assert product.times_the_loop == pytest.approx(product.per_second / loop.per_second)
    assert product.cosine > 0.9999


def test_no_photos():
    with pytest.raises(InputError, match="1 or more"):
        list(benchmark.run("cpu", photos=0))
