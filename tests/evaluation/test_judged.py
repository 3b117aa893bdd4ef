import numpy as np
import pytest

from listwise.errors import InputError
from listwise.evaluation import (
    JudgedQueries,
    Protocol,
    evaluate_descriptors,
    evaluate_scores,
    rank_judged,
)


def example() -> JudgedQueries:
    grades = ([[0, 3]], [[4]], [[5]])
    easy, hard, junk = ([np.array(part) for part in grade] for grade in grades)
    return JudgedQueries.revisited(list("abcdef"), ["q"], [None], easy=easy, hard=hard, junk=junk)


def test_protocols_define_positives_and_junk() -> None:
    judged = example()
    found = {
        name: (judged.positives(name, 0).tolist(), judged.junk(name, 0).tolist())
        for name in judged.protocols
    }
    assert found == {
        "Easy": ([0, 3], [5, 4]),
        "Medium": ([0, 3, 4], [5]),
        "Hard": ([4], [5, 0, 3]),
    }
    assert judged.images(0).tolist() == [0, 3, 4, 5]
    assert judged.own(0).tolist() == []


def test_a_custom_protocol() -> None:
    judged = example()
    own = JudgedQueries(
        judged.names,
        judged.queries,
        judged.boxes,
        judged.grades,
        {"Strict": Protocol(("easy",)), "Medium": judged.protocols["Medium"]},
    )
    found = evaluate_scores([[6, 5, 4, 3, 2, 1]], own)
    assert list(found) == ["Strict", "Medium"]
    # Images 0 and 3 at ranks 0 and 3: precisions 1 and 1, then 1/3 and 2/4.
    assert found["Strict"].mAP == pytest.approx((1 + (1 / 3 + 2 / 4) / 2) / 2)


def test_labels_are_positions_without_the_query_itself() -> None:
    judged = JudgedQueries.labelled(["x", "y", "x", "x", "z"])
    assert [judged.positives("Labels", i).tolist() for i in range(5)] == [
        [2, 3], [], [0, 3], [0, 2], [],
    ]  # fmt: skip
    assert [judged.own(i).tolist() for i in range(5)] == [[0], [1], [2], [3], [4]]
    gallery = JudgedQueries.labelled(["x", "w"], ["y", "x", "x"])
    assert [gallery.positives("Labels", i).tolist() for i in range(2)] == [[1, 2], []]
    assert len(gallery) == 2
    assert len(gallery.names) == 3
    assert gallery.own(0).tolist() == []


@pytest.mark.parametrize("seed", range(5))
def test_a_subset_has_the_figures_of_what_is_left(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, 30)
    rows = rng.normal(size=(30, 5))
    kept = np.sort(rng.permutation(30)[:17])
    part = JudgedQueries.labelled(labels).subset(kept, kept)
    direct = JudgedQueries.labelled(labels[kept])
    found, expected = (
        evaluate_descriptors(rows[kept], rows[kept], judged)["Labels"] for judged in (part, direct)
    )
    assert found.figures == expected.figures
    assert part.names == [str(i) for i in kept]
    twice = part.subset([3, 1], range(5))
    assert twice.queries == [str(kept[3]), str(kept[1])]
    assert twice.own(0).tolist() == [3]


def test_judged_images_are_moved_to_their_places_in_a_subset() -> None:
    part = example().subset([0], [5, 4, 3, 1])
    assert {name: grade[0].tolist() for name, grade in part.grades.items()} == {
        "easy": [2], "hard": [1], "junk": [0],
    }  # fmt: skip


def test_an_array_and_blocks_of_it_give_the_same_figures() -> None:
    rng = np.random.default_rng(0)
    judged = JudgedQueries.labelled(rng.integers(0, 3, 7), rng.integers(0, 3, 50))
    queries, database = (rng.normal(size=(n, 6)).astype(np.float32) for n in (7, 50))
    whole = evaluate_descriptors(queries, database, judged)["Labels"]
    blocks = evaluate_descriptors(queries, [database[:20], database[20:]], judged)["Labels"]
    assert whole.figures == blocks.figures
    ranks = rank_judged(queries, database, [judged.positives("Labels", i) for i in range(7)])
    aps = [np.mean(np.arange(1, len(r) + 1) / (np.sort(r) + 1)) for r in ranks]
    assert whole.per_query_ap.tolist() == pytest.approx(aps)


def test_parts_of_different_lengths_are_refused() -> None:
    with pytest.raises(InputError, match="every query needs"):
        JudgedQueries.labelled([0, 1], queries=["a"])
    judged = JudgedQueries.labelled([0, 0])
    with pytest.raises(InputError, match="3 query descriptors for 2 queries"):
        evaluate_descriptors(np.ones((3, 2)), np.ones((3, 2)), judged)
    with pytest.raises(InputError, match="one model"):
        evaluate_descriptors(np.ones((2, 2)), np.ones((2, 3)), judged)
