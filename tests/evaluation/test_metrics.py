import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score

from listwise.errors import InputError
from listwise.evaluation import average_precision


def plain_average_precision(relevance_in_order: list[bool]) -> float:
    precisions, found = [], 0
    for rank, relevant in enumerate(relevance_in_order, start=1):
        if relevant:
            found += 1
            precisions.append(found / rank)
    return sum(precisions) / len(precisions)


relevances = st.lists(st.booleans(), min_size=1, max_size=60).filter(any)


@given(relevances, st.randoms(use_true_random=False))
def test_equals_scikit_learn_without_ties(relevance: list[bool], random: object) -> None:
    scores = list(np.linspace(-1, 1, len(relevance)))
    random.shuffle(scores)  # type: ignore[attr-defined]
    assert average_precision(scores, relevance) == pytest.approx(
        average_precision_score(relevance, scores), abs=1e-12
    )


@given(relevances, st.data())
def test_ties_keep_the_given_order(relevance: list[bool], data: st.DataObject) -> None:
    size = len(relevance)
    scores = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    order = sorted(range(size), key=lambda i: (-scores[i], i))
    expected = plain_average_precision([relevance[i] for i in order])
    assert average_precision(scores, relevance) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("scores", "relevance", "reason"),
    [
        ([1.0, 2.0], [True], "the same length"),
        ([[1.0]], [[True]], "the same length"),
        ([1.0, 2.0], [False, False], "no image is relevant"),
        ([1.0, float("nan")], [True, False], "NaN"),
    ],
)
def test_bad_lists_are_refused(scores: object, relevance: object, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        average_precision(scores, relevance)  # type: ignore[arg-type]
