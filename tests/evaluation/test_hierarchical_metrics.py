"""Metrics of labels with levels against their formulas written down as loops."""

import math

import numpy as np
import pytest

from listwise.data.labelled import label_levels
from listwise.errors import InputError
from listwise.evaluation import evaluate_hierarchical, mean_average_precision

NAMES = ["a/x/1", "a/x/2", "a/y/3", "b/z/4", "b/z/5", "c/w/6"]


def example():
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 5, 30)
    labels[0] = 5  # shares no level with another image, so it does not count as a query
    vectors = generator.normal(size=(30, 4))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True), label_levels(NAMES)[labels]


def shared(a, b):
    return next((n for n in range(3) if a[n] != b[n]), 3)


def test_h_ap_and_ndcg_equal_their_formulas():
    vectors, levels = example()
    haps, ndcgs = [], []
    for q in range(30):
        others = sorted((i for i in range(30) if i != q), key=lambda i: -(vectors[q] @ vectors[i]))
        level = {i: shared(levels[q], levels[i]) for i in others}
        alike = {n: sum(level[i] == n for i in others) for n in range(4)}
        rel = {i: (level[i] / 3) ** 2 / alike[level[i]] for i in others}
        if not any(level.values()):
            continue
        total = 0.0
        for place, k in enumerate(others):
            ahead = others[: place + 1]
            total += sum(min(rel[k], rel[j]) for j in ahead) / (place + 1)
        haps.append(total / sum(rel.values()))
        gains = [2 ** level[i] - 1 for i in others]
        best = sorted(gains, reverse=True)
        discounted = [
            sum(g / math.log2(n + 2) for n, g in enumerate(each)) for each in (gains, best)
        ]
        ndcgs.append(discounted[0] / discounted[1])
    assert len(haps) == 29
    found = evaluate_hierarchical(vectors, levels, alpha=2.0)
    assert found.hierarchical_ap == pytest.approx(np.mean(haps))
    assert found.ndcg == pytest.approx(np.mean(ndcgs))
    assert found.maps == tuple(mean_average_precision(vectors, level) for level in levels.T)
    assert list(found.figures) == ["H-AP", "NDCG", "mAP level 1", "mAP level 2", "mAP level 3"]


def test_with_one_level_h_ap_is_map():
    vectors, levels = example()
    found = evaluate_hierarchical(vectors, levels[:, 2:])
    assert found.hierarchical_ap == pytest.approx(mean_average_precision(vectors, levels[:, 2]))


def test_a_perfect_order_is_one():
    levels = np.array([[0, 0], [0, 0], [0, 1], [1, 2], [1, 2]])
    vectors = np.array([[1.0, 0.0], [1.0, 0.1], [0.9, 0.4], [0.0, 1.0], [0.1, 1.0]])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found = evaluate_hierarchical(vectors, levels)
    assert found.hierarchical_ap == pytest.approx(1)
    assert found.ndcg == pytest.approx(1)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(InputError, match=r"levels \[N, L\], found \(2, 2\) and \(2,\)"):
        evaluate_hierarchical(np.eye(2), [0, 0])
    with pytest.raises(InputError, match="no two images share a level"):
        evaluate_hierarchical(np.eye(2), [[0], [1]])
    with pytest.raises(InputError, match="levels: 'b' has 1, 'a/x' has 2"):
        label_levels(["a/x", "b"])
