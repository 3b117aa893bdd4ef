from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from listwise.errors import InputError
from listwise.evaluation import (
    JudgedQueries,
    ProtocolResult,
    evaluate_descriptors,
    evaluate_ranks,
    evaluate_scores,
)


def make_truth(names: int, kinds: np.ndarray) -> JudgedQueries:
    good, ok, junk = ([np.flatnonzero(row == k) for row in kinds] for k in range(3))
    boxes = [(0.0, 0.0, 1.0, 1.0)] * len(kinds)
    queries = [f"query{i}" for i in range(len(kinds))]
    database = [str(i) for i in range(names)]
    return JudgedQueries.oxford(database, queries, boxes, good=good, ok=ok, junk=junk)


def evaluate_oxford(scores: np.ndarray, truth: JudgedQueries) -> ProtocolResult:
    return evaluate_scores(scores, truth)["Original"]


def plain_ap(ranked: list[int], positive: set[int], junk: set[int]) -> float:
    """Area under the curve of precision over recall, one trapezoid for each image of the list."""
    recalls, precisions = [0.0], [1.0]
    seen = found = 0
    for image in ranked:
        if image in junk:
            continue
        seen += 1
        found += image in positive
        recalls.append(found / len(positive))
        precisions.append(found / seen)
    heights = np.add(precisions[1:], precisions[:-1]) / 2
    return float(heights @ np.diff(recalls))


@given(st.integers(0, 2**32 - 1), st.integers(4, 60), st.sampled_from([3, 1000]))
def test_equals_the_area_under_the_curve(seed: int, size: int, levels: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 5, (3, size))
    kinds[0, 0] = 0
    truth = make_truth(size, kinds)
    scores = rng.integers(0, levels, (3, size)).astype(np.float32)
    result = evaluate_oxford(scores, truth)
    expected = []
    for row, good, ok, junk in zip(scores, *truth.grades.values(), strict=True):
        positive = {*good.tolist(), *ok.tolist()}
        ranked = sorted(range(size), key=lambda i: (-row[i], i))
        expected.append(plain_ap(ranked, positive, set(junk.tolist())) if positive else np.nan)
    assert result.per_query_ap.tolist() == pytest.approx(expected, abs=1e-12, nan_ok=True)
    assert result.mAP == pytest.approx(np.nanmean(expected), abs=1e-12)


def test_distractors_count_as_negatives() -> None:
    rng = np.random.default_rng(0)
    truth = make_truth(30, rng.integers(0, 4, (2, 30)))
    queries = rng.normal(size=(2, 6))
    own, distractors = rng.normal(size=(30, 6)), rng.normal(size=(400, 6))
    everything = np.concatenate([own, distractors])
    whole = make_truth(430, np.full((2, 430), 9))
    whole = replace(whole, grades=truth.grades)
    found = evaluate_descriptors(queries, [own, distractors], truth)["Original"]
    expected = evaluate_oxford(queries @ everything.T, whole)
    assert found.per_query_ap.tolist() == pytest.approx(expected.per_query_ap.tolist())
    assert found.mAP < evaluate_oxford(queries @ own.T, truth).mAP


def test_bad_input_is_refused() -> None:
    truth = make_truth(3, np.array([[0, 1, 2]]))
    with pytest.raises(InputError, match=r"\(1, 3\), found \(1, 4\)"):
        evaluate_oxford(np.zeros((1, 4)), truth)
    with pytest.raises(InputError, match="one rank for each"):
        evaluate_ranks([np.array([0])], truth)
