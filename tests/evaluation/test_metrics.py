import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score

from listwise.errors import InputError
from listwise.evaluation import average_precision, mean_average_precision, metrics


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


@given(relevances)
def test_all_equal_scores_give_the_list_as_it_is(relevance: list[bool]) -> None:
    assert average_precision(np.zeros(len(relevance)), relevance) == pytest.approx(
        plain_average_precision(relevance), abs=1e-12
    )


@pytest.mark.parametrize(
    ("scores", "relevance", "reason"),
    [
        ([1.0, 2.0], [True], "one length"),
        ([[1.0]], [[True]], "one length"),
        ([1.0, 2.0], [False, False], "no image is relevant"),
        ([1.0, float("nan")], [True, False], "NaN"),
    ],
)
def test_bad_lists_are_refused(scores: object, relevance: object, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        average_precision(scores, relevance)  # type: ignore[arg-type]


def plain_mean(descriptors: np.ndarray, labels: list[int]) -> float:
    found = []
    for i in range(len(labels)):
        others = [j for j in range(len(labels)) if j != i]
        others.sort(key=lambda j: (-float(descriptors[i] @ descriptors[j]), j))
        relevance = [labels[j] == labels[i] for j in others]
        if any(relevance):
            found.append(plain_average_precision(relevance))
    return sum(found) / len(found)


@given(st.integers(0, 2**32 - 1), st.integers(4, 40), st.integers(2, 12), st.integers(1, 500))
def test_all_against_all(seed: int, size: int, classes: int, block: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, size)
    labels[:2] = 0
    descriptors = rng.normal(size=(size, 5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "_BLOCK", block)
        found = mean_average_precision(descriptors, [f"class {k}" for k in labels])
    assert found == pytest.approx(plain_mean(descriptors, labels.tolist()), abs=1e-9)


def test_an_image_cannot_find_itself() -> None:
    # Each image is nearest to the other label's twin, so the only positive is always second.
    descriptors = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [0.1, 1.0]], dtype=np.float32)
    assert mean_average_precision(descriptors, [0, 0, 1, 1]) < 0.51


def test_singletons_are_no_queries_but_stay_in_the_list() -> None:
    # The singleton lies between the two images of the pair: both find it first.
    descriptors = np.array([[1.0, 0.0], [0.0, 1.0], [0.8, 0.8]])
    assert mean_average_precision(descriptors, [7, 7, 9]) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("descriptors", "labels", "reason"),
    [
        (np.zeros(3), [0, 0, 0], r"\[N, C\]"),
        (np.zeros((3, 2)), [0, 0], r"\[N, C\]"),
        (np.zeros((3, 2)), [0, 1, 2], "nothing to find"),
        (np.full((3, 2), np.nan), [0, 0, 2], "NaN"),
    ],
)
def test_bad_descriptors_are_refused(
    descriptors: np.ndarray, labels: list[int], reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        mean_average_precision(descriptors, labels)
