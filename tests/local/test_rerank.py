import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from test_features import textured
from threadpoolctl import threadpool_info, threadpool_limits

from listwise.blocks import one_thread_products
from listwise.data import ImageError
from listwise.local.features import Features
from listwise.local.rerank import MINIMUM, PhotoPart, RerankedEntry, Reranker, rerank_by_inliers
from listwise.search.entries import Entry


@given(counts=st.lists(st.integers(0, 40), max_size=30), rest=st.integers(0, 5))
def test_reranking_by_inliers(counts: list[int], rest: int) -> None:
    order = np.arange(100, 100 + len(counts) + rest)[::-1]
    inliers = dict(zip(order.tolist(), counts, strict=False))
    found = rerank_by_inliers(order, counts).tolist()
    verified = [name for name in order.tolist() if inliers.get(name, 0) >= MINIMUM]
    others = [name for name in order.tolist() if inliers.get(name, 0) < MINIMUM]
    expected = sorted(verified, key=lambda name: -inliers[name]) + others
    assert found == expected


@pytest.fixture(scope="module")
def scene() -> Image.Image:
    return textured(300, 220, seed=11)


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory, scene: Image.Image) -> list[Entry]:
    """Four strangers, an unreadable file, and at last two views of the scene; leave them so."""
    folder = tmp_path_factory.mktemp("entries")
    made = [_entry(folder / f"other{seed}.png", textured(160, 120, seed=seed)) for seed in range(4)]
    (folder / "broken.png").write_bytes(b"broken")
    made.insert(1, Entry("broken", str(folder / "broken.png"), 10, 10))
    made.append(_entry(folder / "part.png", scene.crop((60, 30, 230, 180))))
    made.append(_entry(folder / "view.png", scene.resize((240, 176))))
    return made


@pytest.fixture(scope="module")
def expected(entries: list[Entry], scene: Image.Image) -> list[RerankedEntry]:
    """The order of the entries, by one worker."""
    return Reranker(workers=1).rerank([scene], entries)


def _entry(path: Path, photo: Image.Image) -> Entry:
    photo.save(path)
    return Entry(path.name, str(path), *photo.size)


def test_photos_of_the_scene_come_first(expected: list[RerankedEntry]) -> None:
    found = expected
    assert [result.position for result in found] == [6, 1, 5, 0, 2, 3, 4]
    view = found[0]
    assert view.photo == 0
    assert view.inliers == len(view.matches) > 50
    np.testing.assert_allclose(
        np.median(view.matches[:, :2] * 0.8 - view.matches[:, 2:]), 0, atol=1
    )
    assert all(result.inliers is not None for result in found if result.position != 1)
    assert all(result.inliers < MINIMUM for result in found[3:])
    broken = found[1]  # it keeps its place
    assert (broken.inliers, broken.photo, broken.matches.shape) == (None, None, (0, 4))


def test_boxes_on_both_sides_give_places_in_whole_photos(
    tmp_path: Path, scene: Image.Image
) -> None:
    scene.save(tmp_path / "scene.png")
    entry = Entry("scene", str(tmp_path / "scene.png"), *scene.size, box=(40.0, 20.0, 260.0, 190.0))
    (found,) = Reranker().rerank([scene], [entry], [(60.0, 50.0, 290.0, 210.0)])
    assert found.inliers > 50
    np.testing.assert_allclose(found.matches[:, :2], found.matches[:, 2:], atol=6)
    assert np.median(np.abs(found.matches[:, :2] - found.matches[:, 2:])) < 0.5
    assert found.matches[:, :2].min(axis=0)[0] >= 60
    assert found.matches[:, 2:].max(axis=0)[0] <= 260


def test_the_query_photo_that_matches_is_named(entries: list[Entry], scene: Image.Image) -> None:
    found = Reranker().rerank([textured(160, 120, seed=77), scene], entries[-2:])
    assert [(result.position, result.photo) for result in found] == [(1, 1), (0, 1)]


def test_only_the_top_is_compared(tmp_path: Path, scene: Image.Image) -> None:
    small = scene.resize((150, 110))
    view = _entry(tmp_path / "view.png", small)
    stranger = Entry("gone", str(tmp_path / "gone.png"), 10, 10)
    found = Reranker().rerank([small], [stranger] * 100 + [view])
    assert [result.position for result in found] == list(range(101))
    assert found[100].inliers is None
    found = Reranker().rerank([small], [stranger] * 99 + [view])
    assert found[99].inliers > 20


def test_features_are_kept_within_the_memory_allowed(entries: list[Entry]) -> None:
    roomy = Reranker()
    first = roomy.features(entries[0])
    assert roomy.features(entries[0]) is first
    assert roomy.cached_bytes == first.nbytes
    tight = Reranker(cache_bytes=first.nbytes + 1)
    kept = tight.features(entries[0])
    tight.features(entries[2])
    assert tight.cached_bytes <= first.nbytes + 1
    assert tight.features(entries[0]) is not kept
    assert Reranker(cache_bytes=0).rerank([textured(160, 120)], entries[:1])[0].inliers > 50


def test_a_photo_that_changed_is_read_again(tmp_path: Path) -> None:
    reranker = Reranker()
    entry = _entry(tmp_path / "photo.png", textured(100, 80, seed=1))
    before = reranker.features(entry)
    textured(100, 80, seed=2).save(entry.path)
    assert reranker.features(entry).points[0].tolist() != before.points[0].tolist()
    Path(entry.path).unlink()
    with pytest.raises(ImageError):
        reranker.features(entry)
    with pytest.raises(ImageError):
        reranker.features(Entry("nowhere", "", 1, 1))


class GatedReranker(Reranker):
    """Waits at every photo that it has not seen before, until the gate opens."""

    def __init__(self) -> None:
        super().__init__(workers=1)
        self.seen: set[str] = set()
        self.waits, self.gate = threading.Event(), threading.Event()

    def features(self, entry: PhotoPart) -> Features:
        if entry.path not in self.seen:
            self.waits.set()
            assert self.gate.wait(60)
        return super().features(entry)


def test_what_was_verified_in_time_is_returned(entries: list[Entry], scene: Image.Image) -> None:
    reranker = GatedReranker()
    some = [entries[0], entries[6], entries[5], entries[2]]
    reranker.seen = {entry.path for entry in some[:2]}
    for entry in some[:2]:
        reranker.features(entry)
    started = time.monotonic()
    found = reranker.rerank([scene], some, until=started + 5)
    assert 5 <= time.monotonic() - started < 50
    assert [result.position for result in found] == [1, 0, 2, 3]
    assert [result.inliers is None for result in found] == [False, False, True, True]
    reranker.gate.set()
    again = reranker.rerank([scene], some)
    assert [result.position for result in again] == [1, 2, 0, 3]
    assert all(result.inliers is not None for result in again)
    reranker.close()


def test_nothing_is_verified_without_time(entries: list[Entry], scene: Image.Image) -> None:
    finished = threading.Event()
    finished.set()
    for limits in ({"until": time.monotonic() - 1}, {"finished": finished}):
        found = Reranker().rerank([scene], entries, **limits)
        assert [result.position for result in found] == list(range(len(entries)))
        assert all(result.inliers is None for result in found)


def test_several_threads_get_what_one_gets(
    entries: list[Entry], scene: Image.Image, expected: list[RerankedEntry]
) -> None:
    shared = Reranker(workers=2)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: shared.rerank([scene], entries), range(2)))
    for answer in answers:
        assert [r.position for r in answer] == [r.position for r in expected]
        for one, two in zip(answer, expected, strict=True):
            np.testing.assert_array_equal(one.matches, two.matches)


def test_a_call_ends_after_the_reranker_is_closed(entries: list[Entry], scene: Image.Image) -> None:
    reranker = GatedReranker()
    call = threading.Thread(target=reranker.rerank, args=([scene], entries), daemon=True)
    call.start()
    assert reranker.waits.wait(60)  # at the first photo; the tasks of the others are in the queue
    reranker.close()
    reranker.gate.set()
    call.join(60)
    assert not call.is_alive()


def test_products_use_several_threads_again_after_the_last_block() -> None:
    def threads() -> set[int]:
        return {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}

    with threadpool_limits(2, "blas"):
        with one_thread_products:
            with one_thread_products:
                assert threads() == {1}
            assert threads() == {1}
        assert threads() == {2}
