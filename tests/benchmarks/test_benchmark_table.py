"""How measurements are written."""

from dataclasses import dataclass

import pytest

from listwise.benchmarks.table import Column, cells, readable_seconds


@dataclass
class Bird:
    name: str
    grams: float | None = None
    skipped: str | None = None


COLUMNS = (
    Column("bird", "name"),
    Column("kg", "grams", "{:,.2f}", 1e-3),
    Column("size", "grams", lambda grams: "large" if grams > 500 else "small"),
)


def test_cells_are_scaled_and_formatted():
    assert cells(Bird("swan", 9_500.0), COLUMNS) == ["swan", "9.50", "large"]
    assert [column.is_number for column in COLUMNS] == [False, True, True]


def test_the_reason_for_a_missing_number_is_in_its_place():
    assert cells(Bird("roc", skipped="not found"), COLUMNS) == ["roc", "not found", ""]
    assert cells(Bird("roc"), COLUMNS) == ["roc", "", ""]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00152, "1.52 ms"), (0.0142, "14.2 ms"), (0.999, "999 ms"), (3, "3.00 s")],
)
def test_times_for_people(seconds, text):
    assert readable_seconds(seconds) == text
