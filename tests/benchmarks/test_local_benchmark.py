import sys
from pathlib import Path

import numpy as np
import pytest

from listwise.benchmarks import local as benchmark
from listwise.errors import InputError
from listwise.local.asmk.index import AsmkIndex


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "SAMPLE", 3)
    monkeypatch.setattr(benchmark, "QUERIES", 3)


def test_both_ways_find_the_same_scores(tmp_path: Path) -> None:
    pytest.importorskip("asmk")
    begun: list[str] = []
    rows = list(benchmark.run(12, 80, 300, tmp_path, begun.append))
    assert [row.step for row in rows] == ["extraction", "words", "index", "query", "memory"]
    assert len(begun) == 5
    extraction, words, index, query, memory = rows
    assert extraction.figures["features"] > 100
    assert extraction.asmk is None
    for row in (words, index, query, memory):
        assert row.listwise > 0
        assert row.asmk is not None
        assert row.asmk > 0
        assert row.skipped is None
    assert words.figures["same words"] > 0.99
    assert query.figures["largest score difference, same words"] < 1e-6
    assert query.unit == "ms"
    assert query.ratio == pytest.approx(query.asmk / query.listwise)
    assert list(tmp_path.iterdir()) == []  # the index is gone again


def test_queries_find_what_they_show(tmp_path: Path) -> None:
    made = benchmark.MadePhotos(300, 80)
    assert benchmark.build(tmp_path / "index", 12, made) > 0
    index = AsmkIndex.open(tmp_path / "index")
    for number in (0, 5, 11):
        scores, ids = index.search(made.query(number), 2)
        assert ids[0] == str(number)
        assert scores[0] > 3 * scores[1]
    rows, words = made.known(3)
    assert (made.codebook.assign(rows) == words).mean() > 0.99
    np.testing.assert_array_equal(made.known(3)[0], rows)


def test_without_the_package_it_measures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asmk", None)
    _, *rows = benchmark.run(4, 40, 100)
    assert [row.asmk for row in rows] == [None] * 4
    assert {row.skipped for row in rows} == {benchmark.NOT_INSTALLED}


def test_too_few_photos_are_refused() -> None:
    with pytest.raises(InputError, match="`photos` must be 3 or more, and `features` 1 or more"):
        next(benchmark.run(2))
