import json
import multiprocessing
import os
import resource
import signal
import sys
import threading

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from listwise.errors import InputError
from listwise.local.asmk import index as module
from listwise.local.asmk import segments
from listwise.local.asmk.codebook import Codebook, CodebookInfo
from listwise.local.asmk.index import AsmkIndex

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


def plain_kernel(query, photo, codebook, assignments=5, alpha=3.0, tau=0.0):
    """K(X, Y) of the paper, one word after the other."""
    one = plain_words(query, codebook.centroids, assignments)
    two = plain_words(photo, codebook.centroids, 1)
    total = 0.0
    for c in one.keys() & two.keys():
        u = one[c] @ two[c] / len(one[c])
        if u > tau:
            total += (1 if u > 0 else -1) * abs(u) ** alpha
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
@given(
    seed=st.integers(0, 10_000),
    dim=st.sampled_from([8, 64, 72, 128]),
    words=st.integers(1, 40),
    assignments=st.integers(1, 6),
    alpha=st.sampled_from([1.0, 3.0, 4.5]),
    tau=st.sampled_from([0.0, 0.2, -0.3]),
)
def test_scores_are_the_papers(tmp_path_factory, seed, dim, words, assignments, alpha, tau):
    codebook = make_codebook(words, dim, seed)
    photos = [make_photo(seed + i, dim) for i in range(12)]
    index = AsmkIndex.create(tmp_path_factory.mktemp("index") / "new", codebook)
    index.add([f"photo {i}" for i in range(12)], photos)
    noise = 0.05 * np.random.default_rng(seed).standard_normal(photos[3].shape)
    query = (photos[3] + noise).astype(np.float32)
    assume(without_ties(query, codebook.centroids, assignments))
    assume(all(without_ties(photo, codebook.centroids, 1) for photo in photos))
    scores, ids = index.search(query, 12, assignments, alpha, tau)
    expected = np.array(
        [plain_kernel(query, photo, codebook, assignments, alpha, tau) for photo in photos]
    )
    numbers = [int(name.split()[1]) for name in ids]
    np.testing.assert_allclose(scores, expected[numbers], atol=1e-12)
    assert (np.diff(scores) <= 0).all()
    few, best = index.search(query, 4, assignments, alpha, tau)
    np.testing.assert_array_equal(few, scores[:4])
    assert best == ids[:4]


def test_scores_are_those_of_the_asmk_package(tmp_path):
    asmk = pytest.importorskip("asmk")
    codebook = make_codebook(200, 128)
    photos = [make_photo(i, 128, most=300) for i in range(30)]
    photos = [photo for photo in photos if len(photo)]
    index = AsmkIndex.create(tmp_path / "index", codebook)
    index.add([str(i) for i in range(len(photos))], photos)

    words = asmk.codebook.Codebook(asmk.index.initialize_index(None), size=len(codebook))
    words.index(codebook.centroids)
    step = {
        "kernel": {"binary": True},
        "ivf": {"use_idf": False},
        "quantize": {"multiple_assignment": 1},
        "aggregate": {},
    }
    method = asmk.ASMKMethod({}, {}, codebook=words)
    rows, numbers = (
        np.concatenate(photos),
        np.repeat(np.arange(len(photos)), list(map(len, photos))),
    )
    method = method.build_ivf(rows, numbers, step_params=step)
    asked = {
        "quantize": {"multiple_assignment": 5},
        "aggregate": {},
        "search": {"topk": None},
        "similarity": {"similarity_threshold": 0.0, "alpha": 3.0},
    }
    for number in (2, 5, 11):
        query = photos[number][::2]
        _, _, ranks, expected = method.query_ivf(
            query, np.zeros(len(query), int), step_params=asked
        )
        scores, ids = index.search(query, len(photos))
        theirs = dict(zip(ranks[0].tolist(), expected[0].tolist(), strict=True))
        np.testing.assert_allclose(scores, [theirs[int(name)] for name in ids], atol=1e-6)
        assert int(ids[0]) == ranks[0, 0] == number


def test_a_photo_is_one_like_itself(tmp_path):
    index = AsmkIndex.create(tmp_path / "index", make_codebook())
    photos = {str(i): make_photo(i) for i in range(20)}
    index.add(list(photos), photos.values())
    for name, photo in photos.items():
        if len(photo):
            scores, ids = index.search(photo, 1, assignments=1)
            assert ids == [name]
            assert scores[0] == pytest.approx(1, abs=1e-12)


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
        assert all((name in index) == (name in photos) for name in [*names, "unknown"])
    check(index, photos, query)
    check(AsmkIndex.open(folder), photos, query)
    named = {segment["name"] for segment in manifest(folder)["segments"]}
    assert {path.name for path in folder.glob("segment-*")} == named


def manifest(folder):
    return json.loads((folder / "manifest.json").read_text())


def test_many_small_additions_make_few_segments(tmp_path):
    index = AsmkIndex.create(tmp_path / "index", make_codebook())
    photos = {}
    for i in range(60):
        photos[str(i)] = make_photo(i)
        index.add([str(i)], [photos[str(i)]])
        assert index.info()["segments"] <= 6
    check(index, photos, make_photo(1000))


def test_large_additions_are_written_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PART", 60)
    monkeypatch.setattr(segments, "_LARGEST", 200)
    index = AsmkIndex.create(tmp_path / "index", make_codebook())
    photos = {str(i): make_photo(i) for i in range(40)}
    counted = []
    index.add(list(photos), photos.values(), counted.append)
    assert counted == [1] * 40
    assert index.info()["segments"] > 2
    assert all(len(part.postings.photos) <= 200 for part in index._parts)
    check(index, photos, make_photo(1000))


def test_removed_photos_give_their_space_back(tmp_path):
    index = AsmkIndex.create(tmp_path / "index", make_codebook())
    photos = {str(i): make_photo(i, most=80) for i in range(40)}
    index.add(list(photos), photos.values())
    before = index.info()
    (path,) = tmp_path.glob("index/segment-*")
    assert 0 < path.stat().st_size - before["bytes"] < 1000
    for i in range(30):
        del photos[str(i)]
        assert index.remove([str(i)]) == 1
        assert index.remove([str(i)]) == 0
    check(index, photos, make_photo(1000))
    assert index.info()["bytes"] < 0.4 * before["bytes"]
    index.remove(list(photos))
    assert index.info()["bytes"] == len(index) == 0
    assert index.search(make_photo(1000), 3)[1] == []


def test_a_posting_is_twenty_bytes(tmp_path):
    index = AsmkIndex.create(tmp_path / "index", make_codebook(500, 128))
    index.add([str(i) for i in range(50)], [make_photo(i, 128, 2000) for i in range(50)])
    info = index.info()
    per_word = (info["bytes"] - 12 * 500) / (info["photos"] * info["words_per_photo"])
    assert per_word == pytest.approx(20, rel=0.01)
    assert info["extractor"] == "test"


def test_a_change_is_seen_after_a_refresh(tmp_path):
    folder = tmp_path / "index"
    writer = AsmkIndex.create(folder, make_codebook())
    photos = {str(i): make_photo(i) for i in range(20)}
    writer.add(list(photos), photos.values())
    reader = AsmkIndex.open(folder)
    writer.remove([str(i) for i in range(15)])
    check(reader, photos, make_photo(1000))  # files deleted meanwhile
    reader.refresh()
    check(reader, {name: photos[name] for name in photos if int(name) >= 15}, make_photo(1000))
    # A change begins with the newest state, seen or not.
    writer.add(["new"], [make_photo(50)])
    assert reader.remove(["new"]) == 1


def test_writers_wait_for_each_other(tmp_path):
    AsmkIndex.create(tmp_path / "index", make_codebook())

    def write(first):
        index = AsmkIndex.open(tmp_path / "index")
        for i in range(first, first + 10):
            index.add([str(i)], [make_photo(i)])

    threads = [threading.Thread(target=write, args=(first,)) for first in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = [*range(10), *range(100, 110), *range(200, 210)]
    photos = {str(i): make_photo(i) for i in numbers}
    check(AsmkIndex.open(tmp_path / "index"), photos, make_photo(1000))


def test_other_codebooks_are_refused(tmp_path):
    index = AsmkIndex.create(tmp_path / "index", make_codebook())
    index.require(make_codebook())
    with pytest.raises(InputError, match="was created with the codebook"):
        index.require(make_codebook(seed=1))
    make_codebook(seed=1).save(tmp_path / "index" / "codebook.safetensors")
    with pytest.raises(InputError, match="was created with the codebook"):
        AsmkIndex.open(tmp_path / "index")


def test_mistakes_are_named(tmp_path):
    with pytest.raises(InputError, match="no index at"):
        AsmkIndex.open(tmp_path / "index")
    index = AsmkIndex.create(tmp_path / "index", make_codebook())
    with pytest.raises(InputError, match="already holds an index"):
        AsmkIndex.create(tmp_path / "index", make_codebook())
    photo = make_photo(1)
    with pytest.raises(InputError, match="contains an id twice"):
        index.add(["a", "a"], [photo, photo])
    with pytest.raises(InputError, match="has 1 photos for 2 `ids`"):
        index.add(["a", "b"], [photo])
    with pytest.raises(InputError, match="more photos than the 1 `ids`"):
        index.add(["a"], [photo, photo])
    with pytest.raises(InputError, match=r"\[n, 64\], found shape \[4, 8\]"):
        index.add(["a"], [np.zeros((4, 8), np.float32)])
    with pytest.raises(InputError, match="not finite"):
        index.search(np.full((4, DIM), np.inf), 3)
    with pytest.raises(InputError, match="`k` is 0"):
        index.search(photo, 0)
    assert len(index) == 0


def test_damage_is_noticed(tmp_path):
    folder = tmp_path / "index"
    index = AsmkIndex.create(folder, make_codebook())
    index.add(["a", "b"], [make_photo(1), make_photo(2)])
    (path,) = folder.glob("segment-*")
    whole = path.read_bytes()
    for content in (b"", whole[:100], whole[:-1]):
        path.write_bytes(content)
        with pytest.raises(InputError, match="is damaged"):
            AsmkIndex.open(folder)
    save_file({"centroids": make_codebook().centroids}, path)
    with pytest.raises(InputError, match="is not an inverted file"):
        AsmkIndex.open(folder)
    path.unlink()
    with pytest.raises(InputError, match="a segment is missing"):
        AsmkIndex.open(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(InputError, match="is damaged"):
        AsmkIndex.open(folder)


def test_a_full_disk_is_one_line_and_changes_nothing(tmp_path):
    index = AsmkIndex.create(tmp_path / "index", make_codebook())
    index.add(["first"], [make_photo(1)])
    many = {str(number): make_photo(number) for number in range(2, 40)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(InputError, match="cannot write"):
            index.add(list(many), many.values())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    check(AsmkIndex.open(tmp_path / "index"), {"first": make_photo(1)}, make_photo(1000))


def test_what_a_kill_within_safetensors_leaves_is_removed(tmp_path):
    index = AsmkIndex.create(tmp_path / "index", make_codebook())
    (tmp_path / "index" / ".tmpPcGaIv").write_bytes(b"half a segment")
    index.add(["first"], [make_photo(1)])
    assert not list((tmp_path / "index").glob(".tmp*"))


CHANGES = [
    ("add", range(12), 0),
    ("remove", range(2), 0),
    ("add", range(1, 4), 100),  # one is back, two are replaced; the newest segments are merged
    ("remove", range(6, 12), 0),  # a segment is written anew
]
FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def state_after(done):
    """The photos after the first changes."""
    photos = {}
    for kind, numbers, offset in CHANGES[:done]:
        for number in numbers:
            photos.pop(str(number), None)
            if kind == "add":
                photos[str(number)] = make_photo(number + offset)
    return photos


def change_and_die(folder, moment, journal):
    """Make the changes; at the file operation of this number, be killed."""
    index = AsmkIndex.open(folder)
    events = 0

    def hook(event, arguments):
        nonlocal events
        if event in FILE_EVENTS and str(folder) in str(arguments[0]):
            events += 1
            if events == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    with open(journal, "wb", buffering=0) as log:
        for kind, numbers, offset in CHANGES:
            names = [str(number) for number in numbers]
            if kind == "add":
                index.add(names, [make_photo(number + offset) for number in numbers])
            else:
                index.remove(names)
            log.write(b".")
        log.write(b" %d" % events)


def test_a_kill_leaves_the_index_whole(tmp_path):
    journal = tmp_path / "journal"
    processes = multiprocessing.get_context("forkserver")
    query = make_photo(1000)

    def run(folder, moment):
        AsmkIndex.create(folder, make_codebook())
        process = processes.Process(target=change_and_die, args=(folder, moment, journal))
        process.start()
        process.join()
        return process.exitcode

    assert run(tmp_path / "whole", None) == 0
    total = int(journal.read_text().split()[1])
    outcomes = set()
    for moment in np.linspace(1, total, 20).astype(int).tolist():
        folder = tmp_path / f"killed at {moment}"
        assert run(folder, moment) == -signal.SIGKILL
        index = AsmkIndex.open(folder)
        done = len(journal.read_text())
        done += set(index.ids) != set(state_after(done)) or not same(index, done, query)
        check(index, state_after(done), query)
        outcomes.add(done)
        # The next change finds nothing in its way, and leaves nothing behind.
        index.add(["after"], [query])
        check(AsmkIndex.open(folder), {**state_after(done), "after": query}, query)
        named = {segment["name"] for segment in manifest(folder)["segments"]}
        assert {path.name for path in folder.glob("segment-*")} == named
        assert not list(folder.rglob("*.tmp"))
    assert outcomes == set(range(len(CHANGES) + 1))


def same(index, done, query):
    """Whether the scores are those of a state."""
    photos = state_after(done)
    scores, ids = index.search(query, 100)
    return scores == pytest.approx([plain_kernel(query, photos[i], index.codebook) for i in ids])
