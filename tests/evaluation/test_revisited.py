import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from listwise.errors import InputError
from listwise.evaluation import JudgedQueries, Results, evaluate_revisited, evaluate_scores


def make_truth(
    names: int, judgments: list[tuple[list[int], list[int], list[int]]]
) -> JudgedQueries:
    easy, hard, junk = ([np.array(j[part], dtype=np.int64) for j in judgments] for part in range(3))
    queries = [f"query{i}" for i in range(len(judgments))]
    boxes = [(0.0, 0.0, 1.0, 1.0)] * len(judgments)
    database = [f"image{i}" for i in range(names)]
    return JudgedQueries.revisited(database, queries, boxes, easy=easy, hard=hard, junk=junk)


def plain_protocol(
    scores: np.ndarray, positives: list[list[int]], junk: list[list[int]], ks: tuple[int, ...]
) -> tuple[float, list[float]]:
    """Sort, walk down the list skipping junk, and sum trapezoids."""
    aps, precisions = [], []
    for row, wanted, ignored in zip(scores, positives, junk, strict=True):
        if not wanted:
            continue
        ranked = sorted(range(len(row)), key=lambda i: (-row[i], i))
        hits = [i in wanted for i in ranked if i not in ignored]
        area, found, last_precision = 0.0, 0, 1.0
        for position, hit in enumerate(hits):
            if hit:
                found += 1
                area += (last_precision + found / (position + 1)) / 2 / len(wanted)
            last_precision = found / (position + 1)
        aps.append(area)
        last = max(position for position, hit in enumerate(hits, start=1) if hit)
        precisions.append([sum(hits[: min(k, last)]) / min(k, last) for k in ks])
    if not aps:
        return math.nan, [math.nan] * len(ks)
    return float(np.mean(aps)), list(np.mean(precisions, axis=0))


def check(result: Results, scores: np.ndarray, truth: JudgedQueries) -> None:
    easy, hard, junk = ([list(part) for part in parts] for parts in truth.grades.values())
    protocols = {
        "Easy": (easy, [a + b for a, b in zip(junk, hard, strict=True)]),
        "Medium": ([a + b for a, b in zip(easy, hard, strict=True)], junk),
        "Hard": (hard, [a + b for a, b in zip(junk, easy, strict=True)]),
    }
    for name, (positives, ignored) in protocols.items():
        got = result[name]
        mean_ap, precisions = plain_protocol(scores, positives, ignored, (1, 5, 10))
        assert got.mAP == pytest.approx(mean_ap, abs=1e-12, nan_ok=True)
        assert list(got.figures) == ["mAP", "mP@1", "mP@5", "mP@10"]
        assert list(got.figures.values())[1:] == pytest.approx(precisions, abs=1e-12, nan_ok=True)
        assert np.isnan(got.per_query_ap).tolist() == [not wanted for wanted in positives]


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, JudgedQueries]:
    names = draw(st.integers(4, 40))
    queries = draw(st.integers(1, 4))
    levels = draw(st.sampled_from([3, 1000]))  # few levels: many ties
    judgments = []
    for _ in range(queries):
        kinds = draw(st.lists(st.integers(0, 4), min_size=names, max_size=names))
        easy, hard, junk = ([i for i, kind in enumerate(kinds) if kind == k] for k in range(3))
        judgments.append((easy, hard, junk))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scores = rng.integers(0, levels, (queries, names)).astype(np.float32)
    return scores, make_truth(names, judgments)


@given(cases())
def test_equals_the_protocol_written_out(case: tuple[np.ndarray, JudgedQueries]) -> None:
    scores, truth = case
    check(evaluate_scores(scores, truth), scores, truth)


def test_hard_images_are_junk_for_easy_and_easy_ones_for_hard() -> None:
    truth = make_truth(3, [([1], [0], [])])
    result = evaluate_scores([[3, 2, 1]], truth)
    assert (result["Easy"].mAP, result["Hard"].mAP) == (1.0, 1.0)
    # A negative on top costs half of the first trapezoid's left side as well.
    result = evaluate_scores([[2, 1, 3]], truth)
    assert (result["Easy"].mAP, result["Hard"].mAP) == (0.25, 0.25)


@given(st.integers(0, 2**32 - 1), st.integers(4, 60), st.sampled_from([3, 1000]))
def test_the_original_protocol_has_good_and_ok_images_as_positives(
    seed: int, size: int, levels: int
) -> None:
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 5, (3, size))
    kinds[0, 0] = 0
    good, ok, junk = ([np.flatnonzero(row == k) for row in kinds] for k in range(3))
    truth = JudgedQueries.oxford([""] * size, [""] * 3, [None] * 3, good=good, ok=ok, junk=junk)
    scores = rng.integers(0, levels, (3, size)).astype(np.float32)
    positives = [[*first, *second] for first, second in zip(good, ok, strict=True)]
    expected, _ = plain_protocol(scores, positives, [list(part) for part in junk], (1,))
    assert evaluate_scores(scores, truth)["Original"].mAP == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("scores", "reason"),
    [(np.zeros((1, 4)), "Q, N"), (np.zeros(3), "Q, N"), (np.full((1, 3), np.nan), "NaN")],
)
def test_bad_scores_are_refused(scores: np.ndarray, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        evaluate_scores(scores, make_truth(3, [([0], [], [])]))


def test_plain_lists_of_positions_give_the_same_figures() -> None:
    truth = make_truth(6, [([3], [4], [0, 1]), ([0], [], [5])])
    scores = np.random.default_rng(0).normal(size=(2, 6))
    plain = evaluate_revisited(scores, *([p.tolist() for p in g] for g in truth.grades.values()))
    for name, found in evaluate_scores(scores, truth).items():
        assert plain[name].figures == found.figures
    short = evaluate_revisited(scores, [[3], [0]], [[4], []], [[0], []], ks=(2,))
    assert list(short["Easy"].figures) == ["mAP", "mP@2"]
