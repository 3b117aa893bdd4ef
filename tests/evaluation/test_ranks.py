import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_revisited import check, make_truth

from listwise import blocks
from listwise.errors import InputError
from listwise.evaluation import evaluate_ranks, judged_images, rank_judged, rank_scores


def plain_ranks(scores: np.ndarray, judged: list[np.ndarray]) -> list[list[int]]:
    answer = []
    for row, places in zip(scores, judged, strict=True):
        order = sorted(range(len(row)), key=lambda i: (-row[i], i))
        answer.append([order.index(place) for place in places])
    return answer


class Parts:
    """Blocks that are created at every reading, as from a file."""

    def __init__(self, whole: np.ndarray, cuts: list[int]) -> None:
        self.whole, self.cuts = whole, cuts

    def __iter__(self) -> Iterator[np.ndarray]:
        return (part.copy() for part in np.split(self.whole, self.cuts))


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, list[np.ndarray], list[int]]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count, size = draw(st.integers(1, 4)), draw(st.integers(1, 900))
    # Whole numbers make exact products, and few of them make ties.
    level = draw(st.sampled_from([2, 1000]))
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    queries = rng.integers(-level, level, (count, 4)).astype(dtype)
    database = rng.integers(-level, level, (size, 4)).astype(dtype)
    judged = [rng.permutation(size)[: rng.integers(0, size + 1)][:20] for _ in range(count)]
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=5)))
    return queries, database, judged, cuts


@pytest.mark.slow
@given(cases())
def test_ranks_equal_those_of_the_sorted_list(
    case: tuple[np.ndarray, np.ndarray, list[np.ndarray], list[int]],
) -> None:
    queries, database, judged, cuts = case
    expected = plain_ranks(queries @ database.T, judged)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_ROWS", 256)
        for given_as in (database, np.split(database, cuts), Parts(database, cuts)):
            assert [r.tolist() for r in rank_judged(queries, given_as, judged)] == expected
    assert [r.tolist() for r in rank_scores(queries @ database.T, judged)] == expected


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 1000]))
def test_the_revisited_protocols_with_distractors(seed: int, level: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, 5, (3, 40))
    truth = make_truth(40, [tuple(np.flatnonzero(row == k) for k in range(3)) for row in kinds])
    queries = rng.integers(-level, level + 1, (3, 4)).astype(np.float32)
    own, distractors = (
        rng.integers(-level, level + 1, (size, 4)).astype(np.float32) for size in (40, 700)
    )
    ranks = rank_judged(queries, [own, distractors], judged_images(truth))
    check(evaluate_ranks(ranks, truth), queries @ np.concatenate([own, distractors]).T, truth)


def test_real_descriptors_rank_as_their_scores_do() -> None:
    rng = np.random.default_rng(0)
    database = rng.normal(size=(20_000, 64)).astype(np.float32)
    queries = rng.normal(size=(7, 64)).astype(np.float32)
    judged = [rng.permutation(20_000)[:50] for _ in queries]
    exact = queries.astype(np.float64) @ database.T.astype(np.float64)
    for found, places, row in zip(
        rank_judged(queries, database, judged), judged, exact, strict=True
    ):
        position = np.empty(20_000, int)
        position[np.argsort(-row)] = np.arange(20_000)
        # Scores nearer than float32 tells apart may change places.
        assert np.abs(found - position[places]).max() <= 2
        assert len(set(found.tolist())) == len(places)


def test_half_precision_descriptors() -> None:
    rng = np.random.default_rng(0)
    queries = rng.integers(-5, 5, (2, 4)).astype(np.float16)
    database = rng.integers(-5, 5, (300, 4)).astype(np.float16)
    judged = [np.arange(9), np.arange(290, 300)]
    expected = plain_ranks(queries.astype(int) @ database.T.astype(int), judged)
    assert [r.tolist() for r in rank_judged(queries, database, judged)] == expected


def test_memory_does_not_grow_with_the_database() -> None:
    block = np.random.default_rng(0).normal(size=(4096, 256)).astype(np.float32)

    class Many:
        def __iter__(self) -> Iterator[np.ndarray]:
            return (block for _ in range(200))

    tracemalloc.start()
    try:
        rank_judged(block[:20], Many(), [np.arange(40)] * 20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200 * (20 * 4096 * 4) / 4  # some blocks of scores, one or two a thread


@pytest.mark.parametrize(
    ("queries", "database", "judged", "reason"),
    [
        (np.ones(3), np.ones((4, 3)), [[0]], "`queries` must be"),
        (np.ones((1, 3)), np.ones(4), [[0]], "the database must be"),
        (np.ones((1, 3)), np.ones((4, 2)), [[0]], "3 dimensions but .* have 2"),
        (np.ones((1, 3)), np.ones((4, 3)), [[0], [1]], "2 lists of judged images for 1 queries"),
        (np.ones((1, 3)), np.ones((4, 3)), [[4]], "position 4, but the database has only 4"),
        (np.ones((1, 3)), np.ones((4, 3)), [[-1]], "start at 0"),
        (np.ones((1, 3)), np.ones((4, 3)), [[0.5]], "positions in the database"),
        (np.ones((1, 3)), np.full((4, 3), np.nan), [[0]], "position 0 contain NaN"),
        (np.ones((1, 3)), iter([np.ones((4, 3))]), [[0]], "not a generator"),
    ],
)
def test_bad_input_is_refused(
    queries: np.ndarray, database: np.ndarray, judged: list[list[int]], reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        rank_judged(queries, database, judged)


def test_ranks_of_other_images_are_refused() -> None:
    truth = make_truth(4, [([0], [1], [2])])
    with pytest.raises(InputError, match="one rank for each"):
        evaluate_ranks([np.array([0, 1])], truth)
