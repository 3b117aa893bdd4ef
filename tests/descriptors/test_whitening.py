import hashlib
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from sklearn.covariance import LedoitWolf

from listwise.descriptors import Whitening, matching_pairs
from listwise.descriptors import whitening as module
from listwise.descriptors.whitening import WHITENING_FILE, PrincipalDirections, WhiteningInfo
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


def test_shrinkage_is_checked():
    rows = correlated(9, 4)
    for wrong in (-0.1, 1.5, "full"):
        with pytest.raises(InputError, match="`shrinkage` must be"):
            Whitening.learn([rows], shrinkage=wrong)


def test_a_file_without_shrinkage_is_that_of_earlier_versions(tmp_path):
    """Its text has no such field, so that checksums of earlier files stay valid."""
    learned = Whitening.learn([correlated(30, 4)])
    learned.save(tmp_path, "network")
    with safe_open(tmp_path / WHITENING_FILE, framework="numpy") as file:
        metadata = file.metadata()
    earlier = '{"format_version":1,"method":"pca","power":0.25,"learned_from":30}'
    assert metadata["whitening"] == earlier
    text = f"{earlier} network {learned.fingerprint()}"
    assert metadata["checksum"] == hashlib.sha256(text.encode()).hexdigest()
    assert Whitening.load(tmp_path, "network").info == learned.info
    shrunk = Whitening.learn([correlated(30, 4)], shrinkage=0.5)
    shrunk.save(tmp_path, "network")
    assert Whitening.load(tmp_path, "network").info.shrinkage == 0.5


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


def test_memory_does_not_grow_with_the_number_of_descriptors(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 256)
    rows = correlated(256, 64).astype(np.float32)

    def peak(batches):
        tracemalloc.start()
        Whitening.learn(batches)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    few = peak(rows for _ in range(4))
    assert peak(rows for _ in range(400)) < 1.1 * few
    everything = np.tile(rows, (400, 1))
    assert peak([everything]) < 1.1 * few


def test_directions_that_do_not_vary_are_dropped():
    rows = correlated(300, 10)
    flat = np.concatenate([rows, np.zeros((300, 3)), rows[:, :2] * 2], axis=1)
    learned = Whitening.learn([flat])
    assert learned.dim == 10
    expected = plain_pca(flat, flat, 0.25, 10)
    same_up_to_signs(learned.apply(flat), expected, 1e-5)


def test_fewer_descriptors_than_dimensions():
    rows = correlated(6, 20).astype(np.float32)
    assert Whitening.learn([rows]).dim == 5
    assert Whitening.learn([rows], dim=5).dim == 5
    with pytest.raises(InputError, match="`dim` is 8, but the 6 descriptors vary in 5"):
        Whitening.learn([rows], dim=8)


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
    ],
)
def test_what_cannot_be_learned_from_is_one_line(batches, options, message):
    with pytest.raises(InputError, match=message) as error:
        Whitening.learn(batches, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dim", [None, 5])
def test_supervised_is_the_published_algorithm(dim, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 100)
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


def test_supervised_pushes_down_what_differs_between_photos_of_one_thing():
    generator = np.random.default_rng(0)
    labels = np.repeat(np.arange(40), 6)
    kind = generator.standard_normal((40, 16))[labels]
    noise = 20 * generator.standard_normal((240, 1)) * np.eye(16)[0]
    rows = unit(kind + noise + 0.1 * generator.standard_normal((240, 16)))
    learned = Whitening.learn_supervised(rows, matching_pairs(labels, 10, seed=1))

    def right(descriptors):
        scores = descriptors @ descriptors.T - 2 * np.eye(len(rows))
        return (labels[scores.argmax(axis=1)] == labels).mean()

    assert right(learned.apply(rows)) > right(rows) + 0.1


def test_too_few_pairs_are_made_up_for():
    rows = correlated(50, 20)
    pairs = np.array([[0, 1], [2, 3], [4, 5]])
    learned = Whitening.learn_supervised(rows, pairs)
    assert learned.dim == 20
    whitened = learned.apply(rows)
    np.testing.assert_allclose(np.linalg.norm(whitened, axis=1), 1, atol=1e-5)


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


def test_saved_and_loaded_to_the_bit(tmp_path):
    assert Whitening.load(tmp_path, "net") is None
    learned = Whitening.learn([correlated(200, 16)], dim=9, power=0.5)
    learned.save(tmp_path, "net")
    again = Whitening.load(tmp_path, "net")
    np.testing.assert_array_equal(again.mean, learned.mean)
    np.testing.assert_array_equal(again.projection, learned.projection)
    assert again.info == learned.info
    assert again.fingerprint() == learned.fingerprint()
    assert [path.name for path in tmp_path.iterdir()] == [WHITENING_FILE]
    other = Whitening.learn([correlated(200, 16)], dim=9)
    assert other.fingerprint() != learned.fingerprint()


def test_a_whitening_of_other_weights_is_refused(tmp_path):
    Whitening.learn([correlated(50, 4)]).save(tmp_path, "old weights")
    with pytest.raises(InputError, match=r"learned for other weights.*whiten .* again"):
        Whitening.load(tmp_path, "new weights")


def test_a_damaged_file_is_one_line(tmp_path):
    Whitening.learn([correlated(50, 4)]).save(tmp_path, "net")
    path = tmp_path / WHITENING_FILE
    content = path.read_bytes()
    for damage in (content[: len(content) // 2], b"", b"{" * 300):
        path.write_bytes(damage)
        with pytest.raises(InputError, match=r"damaged.*listwise whiten again"):
            Whitening.load(tmp_path, "net")


def test_a_mean_and_projection_that_do_not_fit_are_refused():
    info = WhiteningInfo(method="imported")
    with pytest.raises(InputError, match=r"\[3\] and \[2, 4\]"):
        Whitening(np.zeros(3, np.float32), np.zeros((2, 4), np.float32), info)
    with pytest.raises(InputError, match="not finite"):
        Whitening(np.zeros(4, np.float32), np.full((2, 4), np.inf, np.float32), info)
