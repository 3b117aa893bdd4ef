import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from listwise.errors import InputError
from listwise.evaluation import (
    ProtocolResult,
    evaluate,
    evaluate_labelled,
    mean_average_precision,
)

KS = (1, 2, 4, 8)


def walk(hits: list[bool]) -> tuple[float, float, list[float]]:
    """AP, AP@R and Recall@k of one ranked list, by walking down it."""
    total, found, ap, at_r = sum(hits), 0, 0.0, 0.0
    for rank, hit in enumerate(hits, start=1):
        if hit:
            found += 1
            ap += found / rank / total
            if rank <= total:
                at_r += found / rank / total
    return ap, at_r, [float(any(hits[:k])) for k in KS]


def plain(
    queries: np.ndarray, labels: list[int], gallery: np.ndarray, others: list[int], *, alone: bool
) -> tuple[float, float, list[float]]:
    rows = []
    for i, query in enumerate(queries):
        places = [j for j in range(len(gallery)) if not (alone and i == j)]
        places.sort(key=lambda j: (-float(query @ gallery[j]), j))
        hits = [others[j] == labels[i] for j in places]
        if any(hits):
            rows.append(walk(hits))
    recalls = np.mean([row[2] for row in rows], axis=0)
    return float(np.mean([r[0] for r in rows])), float(np.mean([r[1] for r in rows])), list(recalls)


def agree(result: ProtocolResult, expected: tuple[float, float, list[float]]) -> None:
    assert result.mAP == pytest.approx(expected[0], abs=1e-9)
    assert list(result.figures) == ["mAP", "mAP@R", *(f"Recall@{k}" for k in KS)]
    found = list(result.figures.values())
    assert found == pytest.approx([*expected[:2], *expected[2]], abs=1e-9)
    assert np.nanmean(result.per_query_ap) == pytest.approx(result.mAP)


sizes = st.integers(4, 40)
# Whole numbers make exact products, and few of them make ties.
levels = st.sampled_from([2, 1000])


@given(st.integers(0, 2**32 - 1), sizes, st.integers(2, 12), st.integers(1, 500), levels)
def test_all_against_all(seed: int, size: int, classes: int, block: int, level: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, size)
    labels[:2] = 0
    descriptors = rng.integers(-level, level, (size, 5)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "_BLOCK", block)
        found = evaluate_labelled(descriptors, [f"class {k}" for k in labels])
    agree(found, plain(descriptors, labels.tolist(), descriptors, labels.tolist(), alone=True))
    assert mean_average_precision(descriptors, labels) == pytest.approx(found.mAP, abs=1e-12)


@given(st.integers(0, 2**32 - 1), sizes, sizes, st.integers(2, 12), st.integers(1, 500), levels)
def test_queries_in_a_gallery(
    seed: int, size: int, count: int, classes: int, block: int, level: int
) -> None:
    rng = np.random.default_rng(seed)
    labels, others = rng.integers(0, classes, size), rng.integers(0, classes, count)
    labels[0] = others[0] = 0
    queries = rng.integers(-level, level, (size, 5)).astype(np.float64)
    gallery = rng.integers(-level, level, (count, 5)).astype(np.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "_BLOCK", block)
        found = evaluate_labelled(queries, labels, gallery, others)
    agree(found, plain(queries, labels.tolist(), gallery, others.tolist(), alone=False))
    assert np.isnan(found.per_query_ap).tolist() == [label not in others for label in labels]


def test_singletons_are_no_queries_but_stay_in_the_list() -> None:
    # The singleton lies between the two images of the pair: both find it first.
    descriptors = np.array([[1.0, 0.0], [0.0, 1.0], [0.8, 0.8]])
    assert mean_average_precision(descriptors, [7, 7, 9]) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("descriptors", "labels", "reason"),
    [
        (np.zeros(3), [0, 0, 0], r"\[N, C\]"),
        (np.zeros((3, 2)), [0, 0], r"\[N, C\]"),
        (np.zeros((3, 2)), [0, 1, 2], "two images with the same label"),
        (np.full((3, 2), np.nan), [0, 0, 2], "NaN"),
    ],
)
def test_bad_descriptors_are_refused(
    descriptors: np.ndarray, labels: list[int], reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        mean_average_precision(descriptors, labels)


def test_bad_galleries_are_refused() -> None:
    queries, labels = np.ones((2, 3)), [0, 0]
    with pytest.raises(InputError, match="give both"):
        evaluate_labelled(queries, labels, np.ones((2, 3)))
    with pytest.raises(InputError, match="3 dimensions but the gallery has 4"):
        evaluate_labelled(queries, labels, np.ones((2, 4)), [0, 0])
    with pytest.raises(InputError, match="gallery descriptors should have"):
        evaluate_labelled(queries, labels, np.ones((2, 3)), [0])
