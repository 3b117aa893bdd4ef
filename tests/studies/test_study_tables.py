"""Tables of figures."""

import csv

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from listwise.studies.outputs import markdown, write_files
from listwise.studies.plots import Panel, Spread


@given(st.lists(st.floats(0, 1), min_size=2, max_size=9))
def test_mean_and_sample_deviation(values):
    spread = Spread(tuple(values))
    array = np.array(values, dtype=np.float64)
    mean = array.sum() / len(array)
    assert spread.mean == pytest.approx(mean, abs=1e-12)
    variance = ((array - mean) ** 2).sum() / (len(array) - 1)
    assert spread.deviation == pytest.approx(variance**0.5, abs=1e-9)


def test_percent():
    assert Spread((0.452,)).percent() == "45.2"
    assert Spread((0.45, 0.46, 0.47)).percent() == "46.0 ± 1.0"
    assert Spread((0.01, 0.03)).percent("+") == "+2.0 ± 1.4"


def test_csv_and_markdown(tmp_path):
    rows = [{"variant": "a, b", "mAP": 0.5}, {"variant": 'c "d"', "mAP": 0.25, "hard_map": 0.1}]
    write_files(tmp_path, "title", [], rows, [Panel("mAP", [])])
    with (tmp_path / "results.csv").open(newline="", encoding="utf-8") as file:
        read = list(csv.DictReader(file))
    assert read == [
        {"variant": "a, b", "mAP": "0.5", "hard_map": ""},
        {"variant": 'c "d"', "mAP": "0.25", "hard_map": "0.1"},
    ]
    assert markdown([{"": "ap"}, {"": "tl", "mAP": "2"}]).splitlines() == [
        "|  | mAP |", "| --- | ---: |", "| ap |  |", "| tl | 2 |",
    ]  # fmt: skip
