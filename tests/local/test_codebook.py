import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from listwise.errors import InputError
from listwise.local import codebook
from listwise.local.codebook import Codebook, CodebookInfo, learn_codebook, nearest_words

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


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000), st.integers(1, 6))
def test_words_of_a_small_codebook_are_the_nearest(seed, count):
    """By FAISS, and by products as on a GPU."""
    centroids, rows = similar(50, 16, seed=seed), similar(30, 16, seed=seed + 1)
    centroids *= np.random.default_rng(seed).uniform(0.5, 1, (50, 1)).astype(np.float32)
    expected = plain_nearest(rows, centroids, count)
    found = Codebook(centroids, INFO, "cpu").assign(rows, count)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, expected)
    found = nearest_words(torch.from_numpy(rows), torch.from_numpy(centroids), count)
    np.testing.assert_array_equal(found, expected)


def test_words_of_a_large_codebook_are_almost_always_the_nearest():
    centroids, rows = similar(4100, 128), similar(600, 128, seed=1)
    book = Codebook(centroids, INFO, "cpu")
    exact = nearest_words(torch.from_numpy(rows), torch.from_numpy(centroids), 5).numpy()
    assert (book.assign(rows)[:, 0] == exact[:, 0]).mean() > 0.998
    assert (book.assign(rows, 5) == exact).mean() > 0.995


def distance(rows, book):
    """The sum of squared distances of descriptors to their nearest words."""
    return ((rows - book.centroids[plain_nearest(rows, book.centroids, 1)[:, 0]]) ** 2).sum()


def test_large_codebooks_are_learned_too(monkeypatch):
    rows = similar(5000, 32)
    exact = learn_codebook([rows], "test", words=1200, iterations=3, device="cpu")
    monkeypatch.setattr(codebook, "EXACT_LIMIT", 1000)
    near = learn_codebook([rows], "test", words=1200, iterations=3, device="cpu")
    assert near.fingerprint != exact.fingerprint
    assert distance(rows, near) < 1.02 * distance(rows, exact)


def test_it_comes_back_from_a_file(tmp_path):
    book = Codebook(similar(30, 16), INFO)
    path = tmp_path / "words.safetensors"
    book.save(path)
    again = Codebook.load(path)
    np.testing.assert_array_equal(again.centroids, book.centroids)
    assert (again.info, again.fingerprint) == (INFO, book.fingerprint)
    other = Codebook(book.centroids, INFO.model_copy(update={"extractor": "another"}))
    assert book.fingerprint != other.fingerprint
    with pytest.raises(InputError, match=r"test extractor 2000, not of another"):
        book.require("another")
    with pytest.raises(InputError, match="from 1 to 30, the number of words, not 31"):
        book.assign(similar(2, 16), 31)


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
    save_file(load_file(path), path)
    with pytest.raises(InputError, match="is not a codebook"):
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
