import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from listwise.training.sampling import draw_batch

label_lists = st.lists(st.integers(1, 9), min_size=1, max_size=12).map(
    lambda sizes: np.random.default_rng(len(sizes)).permutation(
        np.repeat(np.arange(len(sizes)) * 3, sizes)
    )
)


@settings(deadline=None)
@given(label_lists, st.integers(2, 80), st.integers(0, 9), st.integers(0, 9))
def test_a_batch_of_all_classes(labels, batch_size, seed, update):
    batch = draw_batch(labels, batch_size, seed, update)
    classes, sizes = np.unique(labels, return_counts=True)
    assert len(np.unique(batch)) == len(batch)
    assert batch.min() >= 0
    assert batch.max() < len(labels)
    drawn = {k: int((labels[batch] == k).sum()) for k in classes}
    if batch_size >= 2 * len(classes):
        assert len(batch) == min(batch_size, len(labels))
        assert all(drawn[k] >= min(2, size) for k, size in zip(classes, sizes, strict=True))
    else:
        chosen = [k for k in classes if drawn[k]]
        assert len(chosen) == batch_size // 2
        size = dict(zip(classes, sizes, strict=True))
        assert all(drawn[k] >= min(2, size[k]) for k in chosen)
        assert len(batch) == min(batch_size, sum(size[k] for k in chosen))
        # a class in which nothing can be found comes only when there is no other
        assert min(len(chosen), (sizes > 1).sum()) == sum(size[k] > 1 for k in chosen)


@settings(deadline=None)
@given(label_lists, st.integers(2, 80), st.integers(2, 12))
def test_a_batch_of_some_classes(labels, batch_size, count):
    batch = draw_batch(labels, batch_size, 0, 0, count)
    chosen = np.unique(labels[batch])
    assert len(chosen) == min(count, batch_size // 2, len(np.unique(labels)))
    assert len(np.unique(batch)) == len(batch)
    assert len(batch) == min(batch_size, np.isin(labels, chosen).sum())


def test_batches_repeat_by_seed_and_update_and_differ_otherwise():
    labels = np.repeat(np.arange(20), 30)
    first = draw_batch(labels, 64, seed=1, update=5)
    np.testing.assert_array_equal(first, draw_batch(labels, 64, seed=1, update=5))
    for seed, update in ((1, 6), (2, 5), (5, 1)):
        assert not np.array_equal(np.sort(first), np.sort(draw_batch(labels, 64, seed, update)))


def test_every_image_and_every_class_has_its_turn():
    labels = np.repeat(np.arange(10), 6)
    seen = np.concatenate([draw_batch(labels, 20, 0, update) for update in range(60)])
    assert len(np.unique(seen)) == len(labels)
    some = [draw_batch(labels, 20, 0, update, classes_per_batch=3) for update in range(60)]
    turns = np.bincount([k for batch in some for k in np.unique(labels[batch])], minlength=10)
    assert turns.sum() == 180
    assert turns.min() > 8


def test_large_classes_are_over_represented():
    sizes = np.array([400, 100, 10, 4])
    labels = np.repeat(np.arange(4), sizes)
    counts = np.zeros(4)
    for update in range(200):
        counts += np.bincount(labels[draw_batch(labels, 64, 0, update)], minlength=4)
    mean = counts / 200
    # two of each class, and of the other 56 each class has its share of the images left
    expected = 2 + 56 * (sizes - 2) / (sizes - 2).sum()
    np.testing.assert_allclose(mean, expected, rtol=0.06)


LEVELS = np.array([[k // 8, k // 4, k] for k in range(48)])  # six groups of two groups of four


@pytest.mark.parametrize("count", [4, 8, 12])
def test_classes_come_with_relatives_at_every_level(count):
    labels = np.repeat(np.arange(48), 3)
    for update in range(20):
        batch = draw_batch(labels, 2 * count, 0, update, levels=LEVELS)
        groups = LEVELS[np.unique(labels[batch])]
        assert len(groups) == count
        # two or four classes of each inner group, and both inner groups of each outer one
        assert set(np.unique(groups[:, 1], return_counts=True)[1]) <= {2, 4}
        assert all(len(np.unique(groups[groups[:, 0] == k, 1])) == 2 for k in groups[:, 0])
        outer = len(np.unique(groups[:, 0]))
        assert count / 8 <= outer <= count / 4
