import pytest

from listwise.benchmarks import export as benchmark
from listwise.errors import InputError


@pytest.mark.slow
def test_each_form_is_timed_and_agrees():
    rows = list(benchmark.run("test_resnet", photos=3, side=64, rounds=2))
    assert [row.method for row in rows] == ["PyTorch", "PyTorch, folded", "ONNX", "ONNX, int8"]
    assert rows[0].speedup == 1
    assert all(row.least <= row.speedup <= row.most for row in rows)
    assert min(row.cosine for row in rows[:3]) > 0.9999
    assert rows[3].cosine > 0.95
    assert rows[2].megabytes > 3 * rows[3].megabytes


def test_no_photos():
    with pytest.raises(InputError, match="1 or more"):
        list(benchmark.run(photos=0))
