import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.covariance import LedoitWolf

from listwise.descriptors import Whitening, matching_pairs
from listwise.descriptors.whitening import PrincipalDirections, WhiteningInfo
from listwise.errors import InputError


def correlated(count, dim, seed=0, offset=0.0):
    """Unit-free rows whose variances span two orders of magnitude, around `offset`."""
    generator = np.random.default_rng(seed)
    turn, _ = np.linalg.qr(generator.standard_normal((dim, dim)))
    return offset + generator.standard_normal((count, dim)) * np.geomspace(1, 0.1, dim) @ turn


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def same_up_to_signs(found, expected, tolerance):
    """Equal but for the sign of each column, which an eigenvector does not have."""
    assert found.shape == expected.shape
    signs = np.sign((found * expected).sum(axis=0))
    np.testing.assert_allclose(found * signs, expected, rtol=0, atol=tolerance)


def plain_pca(rows, x, power, dim=None):
    """Subtract the mean, project, divide by λ^power, L2: by singular values, in float64."""
    mean = rows.mean(axis=0)
    _, singular, directions = np.linalg.svd(rows - mean, full_matrices=False)
    variances = singular**2 / len(rows)
    return unit(((x - mean) @ directions.T / variances**power)[:, :dim])


def plain_supervised(rows, pairs, x, dim=None):
    """The learned whitening of Radenović et al. (2018), one step a line."""
    first, second = rows[pairs[:, 0]], rows[pairs[:, 1]]
    m = first.mean(axis=0)
    s = (first - second).T @ (first - second) / len(pairs)
    p = np.linalg.inv(np.linalg.cholesky(s))
    z = p @ (rows - m).T
    values, vectors = np.linalg.eig(z @ z.T)
    projection = vectors[:, np.argsort(values.real)[::-1]].real.T @ p
    return unit((projection @ (x - m).T).T[:, :dim])


@pytest.mark.parametrize("power", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("dim", [None, 7])
def test_pca_is_that_of_a_plain_svd(power, dim):
    rows, new = correlated(900, 24, offset=0.3), correlated(50, 24, seed=1)
    learned = Whitening.learn(np.array_split(rows, 7), dim, power)
    expected = plain_pca(rows, new, power, dim)
    same_up_to_signs(learned.apply(new), expected, 1e-6)
    assert learned.dim == expected.shape[1]
    assert learned.info == WhiteningInfo(method="pca", power=power, learned_from=900)


@pytest.mark.parametrize(("count", "dim", "offset"), [(900, 24, 0.3), (12, 40, 5.0), (5, 3, 0.0)])
def test_the_shrinkage_is_that_of_ledoit_and_wolf(count, dim, offset):
    rows = correlated(count, dim, offset=offset)
    directions = PrincipalDirections.of(np.array_split(rows, 3))
    expected = LedoitWolf().fit(rows)
    assert directions.ledoit_wolf == pytest.approx(expected.shrinkage_, rel=1e-9)
    shrunk = np.sort(np.linalg.eigvalsh(expected.covariance_))[::-1]
    factors = directions.factors(dim, 1.0, "ledoit-wolf")
    np.testing.assert_allclose(1 / factors, shrunk, rtol=1e-7)


@pytest.mark.parametrize("power", [0.25, 0.5])
@pytest.mark.parametrize("dim", [None, 5])
def test_shrinkage_moves_variances_towards_their_mean(power, dim):
    """Against the covariance itself: (1 - s) S + s m I, all in float64."""
    rows, new = correlated(9, 12, offset=0.2), correlated(20, 12, seed=1)
    learned = Whitening.learn([rows], dim, power, 0.3)
    mean = rows.mean(axis=0)
    covariance = (rows - mean).T @ (rows - mean) / len(rows)
    shrunk = 0.7 * covariance + 0.3 * np.trace(covariance) / 12 * np.eye(12)
    variances, directions = np.linalg.eigh(shrunk)
    expected = ((new - mean) @ directions / variances**power)[:, ::-1][:, :dim]
    # Directions without variance are equal after shrinkage, and any basis of them may be used.
    known = min(dim or 8, 8)
    found = learned.apply(new)
    assert found.shape == (20, dim or 12)
    scores = unit(expected) @ unit(expected).T
    np.testing.assert_allclose(found @ found.T, scores, rtol=0, atol=1e-5)
    same_up_to_signs(found[:, :known], unit(expected)[:, :known], 1e-5)
    assert learned.info.shrinkage == 0.3


def test_a_mean_far_from_zero_costs_no_digits():
    rows = correlated(2000, 12, offset=1e5)
    learned = Whitening.learn(np.array_split(rows, 9))
    # The projection alone: float32 itself cannot hold a small difference to 1e5.
    mean = rows.mean(axis=0)
    moved = Whitening(np.zeros(12, np.float32), learned.projection, learned.info)
    same_up_to_signs(moved.apply(rows - mean), plain_pca(rows, rows, 0.25), 2e-6)


@settings(deadline=None)
@given(st.lists(st.integers(0, 199), max_size=6), st.integers(0, 5))
def test_how_the_rows_are_cut_into_batches_does_not_matter(cuts, seed):
    rows = correlated(200, 8, seed).astype(np.float32)
    batches = np.split(rows, sorted(cuts))
    whole, cut = Whitening.learn([rows]), Whitening.learn(batches)
    np.testing.assert_allclose(cut.apply(rows), whole.apply(rows), rtol=0, atol=1e-5)


def test_memory_does_not_grow_with_the_number_of_descriptors():
    rows = correlated(2048, 64).astype(np.float32)
    most = []
    for count in (4, 60):
        tracemalloc.start()
        Whitening.learn(rows for _ in range(count))
        most.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert most[1] < 1.1 * most[0]


def test_directions_that_do_not_vary_are_dropped():
    rows = correlated(300, 10)
    flat = np.concatenate([rows, np.zeros((300, 3)), rows[:, :2] * 2], axis=1)
    learned = Whitening.learn([flat])
    assert learned.dim == 10
    expected = plain_pca(flat, flat, 0.25, 10)
    same_up_to_signs(learned.apply(flat), expected, 1e-5)


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        ([], {}, "no descriptors"),
        ([np.ones((1, 4))], {}, "at least two descriptors"),
        ([np.ones((5, 4))], {}, "all equal"),
        ([np.ones((2, 4)), np.ones((2, 5))], {}, r"batch 1 must be \[n, 4\], not \[2, 5\]"),
        ([np.ones(4)], {}, r"must be \[n, C\]"),
        ([np.full((3, 4), np.nan)], {}, "not finite"),
        ([np.eye(4)], {"power": 2}, "between 0 and 1"),
        ([np.eye(4)], {"dim": 0}, "`dim` must be 1 or more"),
        ([np.eye(4)], {"shrinkage": 1.5}, "`shrinkage` must be"),
        ([np.eye(4)], {"shrinkage": "full"}, "`shrinkage` must be"),
        ([np.eye(9)[:6]], {"dim": 8}, "`dim` is 8, but the 6 descriptors vary in 5"),
    ],
)
def test_what_cannot_be_learned_from_is_one_line(batches, options, message):
    with pytest.raises(InputError, match=message) as error:
        Whitening.learn(batches, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dim", [None, 5])
def test_supervised_is_the_published_algorithm(dim):
    generator = np.random.default_rng(2)
    labels = np.repeat(np.arange(60), 5)
    rows = correlated(60, 12)[labels] + 0.3 * correlated(300, 12, seed=3) + 0.5
    pairs = matching_pairs(labels, 8, seed=0)
    new = correlated(40, 12, seed=4)
    learned = Whitening.learn_supervised(rows, pairs, dim)
    same_up_to_signs(learned.apply(new), plain_supervised(rows, pairs, new, dim), 1e-5)
    swapped = pairs[generator.permutation(len(pairs))]
    same_up_to_signs(
        Whitening.learn_supervised(rows, swapped, dim).apply(new), learned.apply(new), 1e-5
    )


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (np.empty((0, 2), int), "P >= 1"),
        (np.array([[0, 1, 2]]), r"not \[1, 3\]"),
        (np.array([[0, 9]]), "outside the 4"),
        (np.array([[1, 1]]), "same descriptor"),
    ],
)
def test_unusable_pairs_are_one_line(pairs, message):
    with pytest.raises(InputError, match=message):
        Whitening.learn_supervised(correlated(4, 3), pairs)


@settings(deadline=None)
@given(
    st.lists(st.integers(-3, 6), min_size=2, max_size=60),
    st.integers(1, 12),
    st.integers(0, 3),
)
def test_matching_pairs(labels, per_class, seed):
    labels = np.array(labels)
    sizes = np.unique(labels, return_counts=True)[1]
    expected = sum(min(per_class, n * (n - 1) // 2) for n in sizes.tolist())
    if not expected:
        with pytest.raises(InputError, match="no two photos"):
            matching_pairs(labels, per_class, seed)
        return
    pairs = matching_pairs(labels, per_class, seed)
    assert pairs.shape == (expected, 2)
    assert len({frozenset(pair) for pair in pairs.tolist()}) == expected
    assert (labels[pairs[:, 0]] == labels[pairs[:, 1]]).all()
    assert (pairs[:, 0] != pairs[:, 1]).all()
    np.testing.assert_array_equal(pairs, matching_pairs(labels, per_class, seed))


def test_tensors_and_arrays_give_the_same():
    rows = correlated(200, 16).astype(np.float32)
    learned = Whitening.learn([rows], dim=9)
    found = learned.apply(torch.from_numpy(rows))
    assert isinstance(found, torch.Tensor)
    np.testing.assert_allclose(found.numpy(), learned.apply(rows), atol=1e-6)
    assert learned.apply(rows).dtype == np.float32
    at_the_mean = learned.apply(learned.mean[None])
    np.testing.assert_array_equal(at_the_mean, np.zeros((1, 9)))
    with pytest.raises(InputError, match=r"\[n, 16\], not \[200, 15\]"):
        learned.apply(rows[:, 1:])
    with pytest.raises(InputError, match=r"\[16\] and \[2, 4\]"):
        Whitening(learned.mean, np.zeros((2, 4), np.float32), learned.info)
    with pytest.raises(InputError, match="not finite"):
        Whitening(learned.mean, learned.projection * np.float32(np.nan), learned.info)
