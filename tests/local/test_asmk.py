import resource
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from programs import Program

from listwise.errors import InputError
from listwise.local import asmk
from listwise.local.asmk import PHOTOS, AsmkIndex
from listwise.local.codebook import Codebook, CodebookInfo

DIM = 64


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def make_codebook(words=30, dim=DIM, seed=0):
    rows = unit(np.random.default_rng(seed).standard_normal((words, dim)))
    return Codebook(rows, CodebookInfo(extractor="test", learned_from=words, seed=seed))


def make_photo(number, dim=DIM, most=40):
    generator = np.random.default_rng([7, number])
    return unit(generator.standard_normal((int(generator.integers(0, most)), dim)))


def plain_words(photo, centroids, assignments):
    """{word: signs of V(X_c)}, in float64."""
    sums = {}
    for x in photo.astype(np.float64):
        distances = ((x - centroids.astype(np.float64)) ** 2).sum(axis=1)
        for c in np.argsort(distances)[:assignments].tolist():
            sums[c] = sums.get(c, 0.0) + x - centroids[c].astype(np.float64)
    return {c: np.where(v > 0, 1.0, -1.0) for c, v in sums.items()}


def without_ties(photo, centroids, assignments):
    """Whether rounding to float32 cannot change the nearest words."""
    differences = photo.astype(np.float64)[:, None] - centroids.astype(np.float64)
    distances = np.sort((differences**2).sum(axis=2), axis=1)
    gaps = distances[:, assignments : assignments + 1] - distances[:, assignments - 1 : assignments]
    return (gaps > 1e-5).all()


def plain_kernel(query, photo, codebook):
    """K(X, Y) of the paper, one word after the other, with α = 3, τ = 0 and five words."""
    one = plain_words(query, codebook.centroids, 5)
    two = plain_words(photo, codebook.centroids, 1)
    total = 0.0
    for c in one.keys() & two.keys():
        u = one[c] @ two[c] / len(one[c])
        if u > 0:
            total += u**3
    return total / np.sqrt(len(one) * len(two)) if total else 0.0


def check(index, photos, query):
    """An index holds these photos, and gives the scores of the paper."""
    assert len(index) == len(photos)
    assert set(index.ids) == set(photos)
    scores, ids = index.search(query, 1000)
    assert sorted(ids) == sorted(photos)
    assert (np.diff(scores) <= 0).all()
    expected = [plain_kernel(query, photos[name], index.codebook) for name in ids]
    np.testing.assert_allclose(scores, expected, atol=1e-12)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), dim=st.sampled_from([8, 64, 72, 128]), words=st.integers(1, 40))
def test_scores_are_the_papers(tmp_path_factory, seed, dim, words):
    codebook = make_codebook(words, dim, seed)
    photos = {f"photo {i}": make_photo(seed + i, dim) for i in range(12)}
    index = AsmkIndex.create(tmp_path_factory.mktemp("index") / "new", codebook)
    index.add([*photos], photos.values())
    noise = 0.05 * np.random.default_rng(seed).standard_normal(photos["photo 3"].shape)
    query = (photos["photo 3"] + noise).astype(np.float32)
    assume(without_ties(query, codebook.centroids, 5))
    assume(all(without_ties(photo, codebook.centroids, 1) for photo in photos.values()))
    check(index, photos, query)
    scores, ids = index.search(query, 12)
    few, best = index.search(query, 4)
    np.testing.assert_array_equal(few, scores[:4])
    assert best == ids[:4]


@settings(deadline=None, max_examples=15)
@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 25), max_size=9)), max_size=10))
def test_whatever_is_added_and_removed_it_is_as_if_built_anew(tmp_path_factory, changes):
    folder = tmp_path_factory.mktemp("index") / "new"
    index = AsmkIndex.create(folder, make_codebook())
    photos = {}
    query = make_photo(1000)
    for turn, (adds, numbers) in enumerate(changes):
        names = [f"фото {number}" for number in sorted(numbers)]
        if adds:
            new = {name: make_photo(100 * turn + i) for i, name in enumerate(names)}
            index.add(names, new.values())
            photos.update(new)
        else:
            assert index.remove([*names, "unknown"]) == len(photos.keys() & set(names))
            for name in names:
                photos.pop(name, None)
    check(index, photos, query)
    check(AsmkIndex.open(folder), photos, query)


def test_removed_photos_give_their_space_back(tmp_path):
    index = AsmkIndex.create(tmp_path / "index", make_codebook())
    photos = {str(i): make_photo(i, most=80) for i in range(40)}
    index.add(list(photos), photos.values())
    before = index.info()
    index.remove([str(i) for i in range(30)])
    assert index.info()["bytes"] < 0.4 * before["bytes"]
    index.remove(list(photos))
    assert index.info()["bytes"] == len(index) == 0
    assert index.search(make_photo(1000), 3)[1] == []


def test_writers_wait_for_each_other_and_readers_see_their_changes(tmp_path):
    reader = AsmkIndex.create(tmp_path / "index", make_codebook())

    def write(first):
        index = AsmkIndex.open(tmp_path / "index")
        for i in range(first, first + 10):
            index.add([str(i)], [make_photo(i)])

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, (0, 100, 200)))
    numbers = [*range(10), *range(100, 110), *range(200, 210)]
    check(reader, {str(i): make_photo(i) for i in numbers}, make_photo(1000))


def test_mistakes_are_named(tmp_path):
    folder = tmp_path / "index"
    with pytest.raises(InputError, match="no index at"):
        AsmkIndex.open(folder)
    index = AsmkIndex.create(folder, make_codebook())
    with pytest.raises(InputError, match="was created with another codebook"):
        AsmkIndex.create(folder, make_codebook(seed=1))
    with pytest.raises(InputError, match="contains an id twice"):
        index.add(["a", "a"], [make_photo(1), make_photo(1)])
    with pytest.raises(InputError, match=r"\[n, 64\], found shape \[4, 8\]"):
        index.add(["a"], [np.zeros((4, 8), np.float32)])
    with pytest.raises(InputError, match="not finite"):
        index.search(np.full((4, DIM), np.inf), 3)
    with pytest.raises(InputError, match="`k` is 0"):
        index.search(make_photo(1), 0)
    assert len(index) == 0


def test_damage_is_noticed(tmp_path):
    folder = tmp_path / "index"
    AsmkIndex.create(folder, make_codebook()).add(["a", "b"], [make_photo(1), make_photo(2)])
    whole = (folder / PHOTOS).read_bytes()
    for content in (b"no database", whole[:100], whole[: len(whole) // 2]):
        (folder / PHOTOS).write_bytes(content)
        with pytest.raises(InputError, match="is damaged"):
            AsmkIndex.open(folder).search(make_photo(1), 2)


def test_a_full_disk_is_one_line_and_changes_nothing(tmp_path):
    index = AsmkIndex.create(tmp_path / "index", make_codebook())
    index.add(["first"], [make_photo(1)])
    many = {str(number): make_photo(number) for number in range(2, 400)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(InputError, match="cannot write"):
            index.add(list(many), many.values())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    check(AsmkIndex.open(tmp_path / "index"), {"first": make_photo(1)}, make_photo(1000))


def add_slowly(folder):
    """Replace the photos of an index, in many changes."""
    asmk._PART = 60
    photos = [make_photo(number + 1000) for number in range(200)]
    report = lambda count: print(count, flush=True)  # noqa: E731
    AsmkIndex.open(folder).add([str(number) for number in range(200)], photos, report)


@pytest.mark.parametrize("moment", [3, 50, 140])
def test_a_kill_leaves_the_first_part_of_the_photos(tmp_path, moment):
    folder = tmp_path / "index"
    photos = {str(number): make_photo(number) for number in range(200)}
    AsmkIndex.create(folder, make_codebook()).add(list(photos), photos.values())
    process = Program(add_slowly, folder)
    for _ in range(moment):
        assert process.stdout.readline() == "1\n"
    process.kill()
    assert process.wait() == -signal.SIGKILL
    index = AsmkIndex.open(folder)
    new = index.ids[index.ids.index("199") + 1 :]
    assert new == [str(number) for number in range(len(new))]
    assert moment - 30 < len(new) < 200
    photos |= {name: make_photo(int(name) + 1000) for name in new}
    check(index, photos, make_photo(500))
    index.add(["after"], [make_photo(500)])
    check(AsmkIndex.open(folder), photos | {"after": make_photo(500)}, make_photo(500))
