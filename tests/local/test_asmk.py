import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from listwise.local.asmk import kernel as module
from listwise.local.asmk.kernel import aggregate, hamming, pack, selectivity


def lattice(generator, shape):
    """Values whose sums are exact in float32 too, zero among them."""
    return generator.integers(-4, 5, shape) / 8


def plain_aggregate(descriptors, words, centroids):
    """V(X_c) = Σ over the photo's descriptors of the word, and its signs: {word: ±1 [D]}."""
    sums = {}
    for x, own in zip(descriptors, words, strict=True):
        for c in own:
            sums[c] = sums.get(c, 0.0) + (x - centroids[c])
    return {c: np.where(v > 0, 1.0, -1.0) for c, v in sums.items()}


def signs(bits, dim):
    """The ±1 that packed bits mean: [w, D]."""
    return np.unpackbits(bits.view(np.uint8), axis=1)[:, :dim] * 2.0 - 1


photos = st.tuples(st.integers(0, 25), st.integers(1, 4), st.integers(0, 10_000))


@settings(deadline=None)
@given(photos, st.sampled_from([8, 24, 64, 128, 136]))
def test_aggregation_is_the_papers(photo, dim):
    count, assignments, seed = photo
    generator = np.random.default_rng(seed)
    descriptors, centroids = lattice(generator, (count, dim)), lattice(generator, (6, dim))
    words = np.array([generator.permutation(6)[:assignments] for _ in range(count)], np.int32)
    words = words.reshape(count, assignments)
    found = aggregate(descriptors.astype(np.float32), words, centroids.astype(np.float32))
    expected = plain_aggregate(descriptors, words, centroids)
    assert found.words.tolist() == sorted(expected)
    assert found.bits.shape == (len(expected), -(-dim // 64))
    for word, row in zip(found.words, signs(found.bits, dim), strict=True):
        np.testing.assert_array_equal(row, expected[word])


@pytest.mark.parametrize("dim", [8, 64, 100, 128, 200])
def test_distances_are_the_numbers_of_bits_that_differ(dim):
    generator = np.random.default_rng(dim)
    one, two = generator.standard_normal((2, 50, dim))
    expected = ((one > 0) != (two > 0)).sum(axis=1)
    np.testing.assert_array_equal(hamming(pack(one), pack(two)), expected)


def test_bits_are_counted_without_numpys_help():
    values = np.random.default_rng(0).integers(0, 2**64, (40, 3), np.uint64)
    expected = [[bin(value).count("1") for value in row] for row in values.tolist()]
    assert module._bit_count_by_table(values).tolist() == expected
    assert module._bit_count(values).tolist() == expected


@pytest.mark.parametrize(("alpha", "tau"), [(3.0, 0.0), (1.0, -1.1), (4.0, 0.25), (3.0, -0.5)])
def test_selectivity_is_the_papers(alpha, tau):
    dim = 16
    weights = selectivity(dim, alpha, tau)
    assert weights.shape == (dim + 1,)
    for distance in range(dim + 1):
        ones = np.ones(dim)
        other = np.where(np.arange(dim) < distance, -1.0, 1.0)
        u = ones @ other / dim
        expected = (1 if u > 0 else -1) * abs(u) ** alpha if u > tau else 0.0
        assert weights[distance] == pytest.approx(expected, abs=1e-15)
