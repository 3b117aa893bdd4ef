import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from listwise.errors import InputError
from listwise.local.asmk import codebook, kmeans
from listwise.local.asmk.codebook import Codebook, CodebookInfo, nearest_words
from listwise.local.asmk.kmeans import learn_codebook

INFO = CodebookInfo(extractor="test extractor 2000", learned_from=10, seed=0)


def clustered(count, words, dim=16, seed=0, spread=0.01):
    """Rows around well separated centers, and the centers."""
    generator = np.random.default_rng(seed)
    centers = generator.standard_normal((words, dim))
    noise = spread * generator.standard_normal((count, dim))
    rows = centers[np.arange(count) % words] + noise
    return rows.astype(np.float32), centers


def similar(count, dim, latent=12, seed=0):
    """Unit rows that vary in fewer directions than they have, as local descriptors do."""
    generator = np.random.default_rng(seed)
    turn = np.random.default_rng(99).standard_normal((latent, dim))
    rows = generator.standard_normal((count, latent)) @ turn
    rows += 0.3 * generator.standard_normal((count, dim))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def plain_nearest(rows, centroids, count):
    squared = ((rows[:, None].astype(np.float64) - centroids[None]) ** 2).sum(axis=2)
    return np.argsort(squared, axis=1, kind="stable")[:, :count]


def test_words_are_the_centers_of_what_is_seen():
    rows, centers = clustered(3000, 6)
    done = []
    book = learn_codebook(
        np.array_split(rows, 7), "test", words=6, iterations=20, seed=4, on_iteration=done.append
    )
    assert done == list(range(1, 21))
    found = book.assign(centers.astype(np.float32))[:, 0]
    assert sorted(found) == list(range(6))
    np.testing.assert_allclose(book.centroids[found], centers, atol=0.01)
    assert book.info == CodebookInfo(extractor="test", learned_from=360, seed=4)


def test_a_seed_gives_the_same_words_and_another_gives_others():
    rows, _ = clustered(500, 40, spread=0.5)
    one, two, other = (
        learn_codebook([rows], "test", words=20, iterations=3, seed=seed) for seed in (1, 1, 2)
    )
    assert one.fingerprint == two.fingerprint != other.fingerprint


def test_every_iteration_brings_words_nearer():
    rows = similar(4000, 16)

    def error(iterations):
        book = learn_codebook([rows], "test", words=50, per_word=80, iterations=iterations)
        return ((rows - book.centroids[book.assign(rows)[:, 0]]) ** 2).sum()

    errors = [error(iterations) for iterations in (1, 3, 9)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.95 * errors[0]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 80), min_size=1, max_size=8), st.integers(1, 60))
def test_a_sample_holds_rows_that_were_seen(lengths, size):
    total = sum(lengths)
    rows = np.arange(total, dtype=np.float32)[:, None] * np.ones(8, np.float32)
    batches = np.split(rows, np.cumsum(lengths)[:-1])
    kept = kmeans._sample(batches, size, np.random.default_rng(0))
    assert len(kept) == min(size, total)
    assert len(set(kept[:, 0])) == len(kept)
    assert set(kept[:, 0]) <= set(range(total))


def test_every_row_has_the_same_chance_to_be_seen():
    rows = np.arange(40, dtype=np.float32)[:, None] * np.ones(8, np.float32)
    counts = np.zeros(40)
    for seed in range(600):
        batches = np.split(rows, [3, 20])
        kept = kmeans._sample(batches, 10, np.random.default_rng(seed))
        counts[kept[:, 0].astype(int)] += 1
    assert abs(counts - 150).max() < 5 * np.sqrt(600 * 0.25 * 0.75)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.integers(1, 6))
def test_words_of_a_small_codebook_are_the_nearest(seed, count):
    centroids, rows = similar(50, 16, seed=seed), similar(30, 16, seed=seed + 1)
    found = Codebook(centroids, INFO).assign(rows, count)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, plain_nearest(rows, centroids, count))


def test_words_of_a_large_codebook_are_almost_always_the_nearest(monkeypatch):
    centroids, rows = similar(4100, 128), similar(600, 128, seed=1)
    book = Codebook(centroids, INFO)
    with monkeypatch.context() as context:
        context.setattr(codebook, "EXACT_LIMIT", len(centroids))
        exact = Codebook(centroids, INFO).assign(rows, 5)
    np.testing.assert_array_equal(exact[:20], plain_nearest(rows[:20], centroids, 5))
    assert (book.assign(rows)[:, 0] == exact[:, 0]).mean() > 0.998
    assert (book.assign(rows, 5) == exact).mean() > 0.995


@pytest.fixture(scope="module")
def large():
    """Descriptors and a large codebook of them, and how far its words are from them on average."""
    with pytest.MonkeyPatch.context() as context:
        context.setattr(kmeans, "EXACT_LIMIT", 1000)
        rows = similar(5000, 32)
        near = learn_codebook([rows], "test", words=1200, iterations=3, device="cpu")
    return rows, near, distance(rows, near)


def distance(rows, book):
    """The sum of squared distances of descriptors to their nearest words."""
    assert len(book) < codebook.EXACT_LIMIT  # all words are compared
    return ((rows - book.centroids[book.assign(rows)[:, 0]]) ** 2).sum()


def test_large_codebooks_are_learned_too(large):
    rows, near, error = large
    exact = learn_codebook([rows], "test", words=1200, iterations=3, device="cpu")
    assert near.fingerprint != exact.fingerprint
    assert error < 1.02 * distance(rows, exact)


def test_it_comes_back_from_a_file(tmp_path):
    book = Codebook(similar(30, 16), INFO)
    path = tmp_path / "words.safetensors"
    book.save(path)
    again = Codebook.load(path)
    np.testing.assert_array_equal(again.centroids, book.centroids)
    assert again.info == INFO
    assert again.fingerprint == book.fingerprint
    assert list(tmp_path.iterdir()) == [path]


def test_the_fingerprint_tells_codebooks_apart():
    rows = similar(30, 16)
    other = INFO.model_copy(update={"extractor": "another"})
    books = Codebook(rows, INFO), Codebook(rows[::-1], INFO), Codebook(rows, other)
    assert len({book.fingerprint for book in books}) == 3


def test_an_extractor_is_required():
    book = Codebook(similar(30, 16), INFO)
    book.require("test extractor 2000")
    with pytest.raises(InputError, match=r"test extractor 2000, not of another: extract .* again"):
        book.require("another")


@pytest.mark.parametrize(
    ("learned_from", "given", "advice"),
    [
        ("hessian-affine-rootsift-2000", "hessian-affine-rootsift-500", "with `count=2000`"),
        ("delf-0123abcd-1000-side1024-scales1", "delf-0123abcd-50-side1024-scales1", "=1000`"),
        ("delf-0123abcd-1000-side1024-scales1", "delf-ffff-1000-side1024-scales1", "as `delf`"),
        ("delf-0123abcd-1000-side1024-scales1", "hessian-affine-rootsift-2000", "as `delf`"),
        ("hessian-affine-rootsift-2000", "delf-ffff-2000-side1024-scales1", "without `delf`"),
    ],
)
def test_the_error_names_the_argument_that_differs(learned_from, given, advice):
    book = Codebook(similar(30, 16), INFO.model_copy(update={"extractor": learned_from}))
    with pytest.raises(InputError, match=rf"extract the features [^,]*{advice}, or learn another"):
        book.require(given)


def test_damaged_files_are_said_to_be(tmp_path):
    path = tmp_path / "words.safetensors"
    with pytest.raises(InputError, match="no codebook"):
        Codebook.load(path)
    Codebook(similar(30, 16), INFO).save(path)
    whole = path.read_bytes()
    for content in (b"", whole[:100], whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(content)
        with pytest.raises(InputError, match="damaged"):
            Codebook.load(path)
    path.write_bytes(whole)
    save_file(load_file(path), path, {"fingerprint": "", "codebook": json.dumps({"seed": 1})})
    with pytest.raises(InputError, match="its header cannot be read"):
        Codebook.load(path)


@pytest.mark.parametrize(
    ("batches", "words", "reason"),
    [
        ([], 2, "no local descriptors"),
        ([np.zeros((3, 8))], 4, "4 words cannot be learned from 3 descriptors"),
        ([np.zeros((3, 8))], 0, "should be 1 or more"),
        ([np.zeros((3, 8)), np.zeros((3, 16))], 2, r"\[n, 8\], found shape \[3, 16\]"),
        ([np.full((3, 8), np.nan)], 2, "not finite"),
        ([np.zeros((3, 12))], 2, "a multiple of 8"),
    ],
)
def test_mistakes_are_named(batches, words, reason):
    with pytest.raises(InputError, match=reason):
        learn_codebook(batches, "test", words=words)


def test_more_words_than_there_are_cannot_be_assigned():
    with pytest.raises(InputError, match="`count` must be from 1 to 3, the number of words, not 4"):
        Codebook(similar(3, 8), INFO).assign(similar(2, 8), 4)


# By products, as on a GPU


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.integers(1, 6), st.integers(1, 5))
def test_words_by_products_are_those_of_the_index(seed, count, block):
    centroids, rows = similar(50, 16, seed=seed), similar(30, 16, seed=seed + 1)
    centroids *= np.random.default_rng(seed).uniform(0.5, 1, (50, 1)).astype(np.float32)
    with pytest.MonkeyPatch.context() as context:
        context.setattr(codebook, "_PRODUCTS", 50 * block)
        found = nearest_words(torch.from_numpy(rows), torch.from_numpy(centroids), count)
    expected = Codebook(centroids, INFO, "cpu").assign(rows, count)
    np.testing.assert_array_equal(found, expected)


def test_totals_by_products_are_those_of_the_index(monkeypatch):
    centroids, rows = similar(50, 16), similar(3000, 16, seed=1)
    centroids[7] = 9  # nothing is near
    monkeypatch.setattr(kmeans, "_ROWS_GPU", 700)
    sums, counts = kmeans._totals_by_products(rows, centroids, "cpu")
    expected_sums, expected_counts = kmeans._totals_by_index(rows, centroids)
    np.testing.assert_array_equal(counts, expected_counts)
    assert counts[7] == 0
    np.testing.assert_allclose(sums, expected_sums, atol=1e-4)


def test_words_learned_by_products_are_as_near(large, monkeypatch):
    rows, near, error = large
    monkeypatch.setattr(
        kmeans,
        "_totals_by_index",
        lambda sample, words: kmeans._totals_by_products(sample, words, "cpu"),
    )
    exact = learn_codebook([rows], "test", words=1200, iterations=3, device="cpu")
    assert near.fingerprint != exact.fingerprint
    assert distance(rows, exact) < 1.01 * error


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_finds_and_learns_the_same_words():
    centroids, rows = similar(9000, 128), similar(600, 128, seed=1)
    one, two = (Codebook(centroids, INFO, device).assign(rows, 5) for device in ("cpu", "cuda"))
    assert (one == two).mean() > 0.995
    few = similar(3000, 16)
    books = [
        learn_codebook([few], "test", words=40, iterations=3, device=device)
        for device in ("cpu", "cuda", "cuda")
    ]
    assert np.abs(books[0].centroids - books[1].centroids).mean() < 1e-3
    assert books[1].fingerprint == books[2].fingerprint
