"""The nearest photos of the same class, which are compared first."""

import numpy as np
import pytest

from listwise.labeling import candidates
from listwise.labeling.candidates import nearest_of_class


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(candidates, "_QUERIES", 4)
    monkeypatch.setattr(candidates, "_ROWS", 3)


def test_they_are_those_with_the_highest_scores():
    generator = np.random.default_rng(0)
    vectors = generator.normal(size=(40, 5)).astype(np.float32)
    labels = generator.integers(0, 3, 40)
    labels[7] = 3  # a class with one photo
    usable = np.setdiff1d(np.arange(40), [2, 30])
    found = nearest_of_class(vectors, labels, usable, 6)
    for photo, row in zip(usable, found, strict=True):
        others = usable[(labels[usable] == labels[photo]) & (usable != photo)]
        expected = others[np.argsort(-vectors[others] @ vectors[photo], kind="stable")][:6]
        assert row.tolist() == expected.tolist() + [-1] * (6 - len(expected))


def test_a_photo_is_not_its_own_neighbor_among_equal_ones():
    vectors = np.ones((9, 2), np.float32)
    found = nearest_of_class(vectors, np.zeros(9, int), np.arange(9), 2)
    assert found.tolist() == [[1, 2], [0, 2]] + [[0, 1]] * 7
