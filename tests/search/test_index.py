import shutil
import sys
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from index_examples import texture

from listwise.data import Images, load_image, read_images
from listwise.errors import InputError
from listwise.local.rerank import MINIMUM, Reranker
from listwise.optional import MissingDependencyError
from listwise.search.entries import NoEntryError
from listwise.search.filling import add_local_features, add_photos
from listwise.search.hits import Query
from listwise.search.index import Index
from listwise.search.opening import create_store, header_of, open_store
from listwise.search.options import SearchOptions
from listwise.search.refinement import REFINEMENTS, diffuse
from listwise.search.searching import Searcher


def unit(vector):
    return vector / np.sqrt((vector**2).sum())


def everything(index):
    """Keys and descriptors of all entries, in float64."""
    keys = [entry.key for entry in index.store]
    return keys, index.store.vectors(np.array(keys)).astype(np.float64)


def vectors_of(index, keys):
    """Descriptors of entries."""
    return index.store.vectors(np.array(keys))


def reranked(index, photos, hits, until=None):
    """Hits after verification with query photos."""
    with closing(Searcher()) as searcher:
        query = Query(photos, [None] * len(photos), options=SearchOptions(rerank=True))
        (result,) = searcher.search(index.generation, [query])
        return searcher.rerank(replace(result, hits=hits), until).hits


def check(hits, expected, keys, rows, k, exclude=()):
    """The hits are the k best by the dot product with the expected query, by plain arithmetic."""
    scores = {key: float(row @ expected) for key, row in zip(keys, rows, strict=True)}
    allowed = sorted((s for key, s in scores.items() if key not in exclude), reverse=True)[:k]
    assert [hit.score for hit in hits] == pytest.approx(allowed, abs=1e-5)
    assert len({hit.entry.key for hit in hits}) == len(hits) == k
    for hit in hits:
        assert hit.score == pytest.approx(scores[hit.entry.key], abs=1e-5)
        assert hit.entry.key not in exclude


def test_the_index_says_at_which_size_photos_and_boxes_are_seen(model, photos, tmp_path):
    header = header_of(model, max_side=40, scales=(1.0, 0.5))
    paths = [str(photos / "class1" / f"{number}.jpg") for number in (2, 3)]
    boxes = [(3.4, 10.0, 50.0, 40.0), None]
    images = Images(tuple(paths), ("a", "b"), tuple(boxes))
    with create_store(tmp_path / "small", header) as store:
        index = Index(store, model)
        expected = model.describe(images, max_side=40, scales=(1.0, 0.5), workers=0).descriptors
        loaded = [load_image(path) for path in paths]
        found = index.describe(loaded, boxes)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
        plain = model.describe(images, workers=0).descriptors
        assert abs(found - plain).max() > 1e-3
        with pytest.raises(InputError, match=r"box .* outside the image of 64 × 64"):
            index.describe(loaded, [(100.0, 0.0, 120.0, 10.0), None])


def test_expansion_moves_the_query_towards_what_it_finds(index):
    keys, rows = everything(index)
    query = vectors_of(index, [keys[0]])
    scores = rows @ query[0].astype(np.float64)
    nearest = np.argsort(-scores)[:10]
    weights = np.clip(scores[nearest], 0, None) ** 2
    expected = unit(query[0] + (weights[:, None] * rows[nearest]).sum(axis=0))
    hits = index.search(query[0], 12, expand=True, exclude=[keys[0]])
    check(hits, expected, keys, rows, 12, {keys[0]})
    plain = index.search(query[0], 12, exclude=[keys[0]])
    assert abs(plain[0].score - hits[0].score) > 1e-4


@pytest.mark.parametrize("method", sorted(REFINEMENTS))
def test_refinement_sorts_the_hits_and_keeps_their_scores(index, method):
    keys, rows = everything(index)
    query = rows[4] + rows[9]
    query /= np.sqrt((query**2).sum())
    kept = [i for i in range(len(keys)) if i != 9]
    scores = dict(
        zip([keys[i] for i in kept], REFINEMENTS[method].score(query, rows[kept]), strict=True)
    )
    hits = index.search(query.astype(np.float32), 12, refine=method, exclude=keys[9])
    best = sorted(scores.values(), reverse=True)[:12]
    assert [hit.refined for hit in hits] == pytest.approx(best, rel=1e-4, abs=1e-6)
    plain = {hit.id: hit.score for hit in index.search(query.astype(np.float32), 48)}
    for hit in hits:
        assert hit.refined == pytest.approx(scores[hit.entry.key], rel=1e-4, abs=1e-6)
        assert hit.score == pytest.approx(plain[hit.id], abs=1e-6)
    assert all(hit.refined is None for hit in index.search(query.astype(np.float32), 12))


@pytest.mark.parametrize("method", sorted(REFINEMENTS))
def test_entries_after_the_short_list_keep_their_place(index, method, monkeypatch):
    _, rows = everything(index)
    monkeypatch.setitem(REFINEMENTS, method, replace(REFINEMENTS[method], size=10))
    query = rows[0].astype(np.float32)
    plain = index.search(query, 48)
    hits = index.search(query, 48, refine=method)
    assert {hit.id for hit in hits[:10]} == {hit.id for hit in plain[:10]}
    assert [hit.id for hit in hits[10:]] == [hit.id for hit in plain[10:]]
    assert [hit.refined is None for hit in hits] == [False] * 10 + [True] * 38
    limit = plain[5].score
    some = index.search(query, 48, refine=method, min_score=limit)
    assert [hit.id for hit in some] == [hit.id for hit in hits if hit.score >= limit]


def test_what_cannot_be_searched_for(index):
    with pytest.raises(NoEntryError, match="the index has no entry 7"):
        index.search(like=7)
    assert index.search(np.empty((0, index.model.dim), np.float32), 5) == []
    with pytest.raises(InputError, match="nothing to search for"):
        index.search(k=5)
    with pytest.raises(InputError, match="`rerank` needs photos"):
        index.search(np.ones(index.model.dim, np.float32), rerank=True)


@pytest.mark.parametrize("how", [{"expand": True}, {"refine": "diffusion"}])
def test_what_is_removed_during_a_search_is_left_out(index, monkeypatch, how):
    store = index.store
    keys, rows = everything(index)
    gone = keys[7]
    read = type(store).vectors

    def vectors(self, wanted):
        monkeypatch.undo()
        assert gone in np.asarray(wanted)
        store.remove([gone])
        return read(self, wanted)

    monkeypatch.setattr(type(store), "vectors", vectors)
    hits = index.search(rows[7].astype(np.float32), 48, **how)
    assert len(hits) == 47
    assert gone not in {hit.entry.key for hit in hits}


def test_an_empty_index_finds_nothing(model, model_folder, tmp_path):
    with create_store(tmp_path / "empty", header_of(model)) as store:
        index = Index(store, model)
        vectors = index.describe([texture(0)])
        for how in {}, {"expand": True}, {"refine": "diffusion"}, {"refine": "superglobal"}:
            assert index.search(vectors[0], 5, **how) == []


@pytest.fixture(scope="module")
def scenes(model, model_folder, tmp_path_factory):
    """A index of five textures, the view of the fourth moved by 30, 20 pixels in the fifth."""
    folder = tmp_path_factory.mktemp("scenes")
    scene = texture(3, (300, 230))
    pictures = [texture(seed) for seed in range(3)]
    pictures += [scene.crop((0, 0, 240, 180)), scene.crop((30, 20, 270, 200))]
    for number, picture in enumerate(pictures):
        picture.save(folder / f"{number}.png")
    store = create_store(folder / "index", header_of(model))
    add_photos(store, model, read_images(folder), workers=0)
    yield Index(store, model), folder
    store.close()


def worst_first(index, folder, name):
    """All entries but one, by their numbers."""
    hits = index.search(like=name, k=9)
    return sorted(hits, key=lambda hit: hit.entry.id)


@pytest.mark.parametrize("box", [None, (60.0, 40.0, 240.0, 180.0), "by entry"])
def test_what_shows_the_same_comes_first(scenes, box):
    index, folder = scenes
    query = {"query": [texture(77), folder / "3.png"], "box": [None, box], "exclude": "3.png"}
    query["average"] = True
    if box == "by entry":
        query, box = {"query": texture(77), "like": "3.png"}, None
    plain = {hit.id: hit.score for hit in index.search(**query)}
    found = index.search(**query, rerank=True)
    assert found[0].id == "4.png"
    assert {hit.id for hit in found} == {"0.png", "1.png", "2.png", "4.png"}
    best = found[0]
    assert best.inliers >= 10
    assert best.photo == 1
    assert best.score == plain["4.png"]
    moved = best.matches[:, :2] - best.matches[:, 2:]
    np.testing.assert_allclose(np.median(moved, axis=0), [30, 20], atol=0.2)
    assert abs(moved - [30, 20]).max() < 8
    if box is not None:
        assert best.matches[:, 0].min() >= box[0] - 1
        assert best.matches[:, 1].min() >= box[1] - 1


def test_the_best_quality_diffuses_from_what_matches(scenes):
    index, folder = scenes
    near = {hit.id: hit for hit in index.search(folder / "3.png", k=9)}
    found = index.search(folder / "3.png", k=9, quality="best")
    assert {hit.id for hit in found} == set(near)
    assert {hit.id for hit in found[:2]} == {"3.png", "4.png"}
    assert min(hit.inliers for hit in found[:2]) >= MINIMUM > max(hit.inliers for hit in found[2:])
    rows = index.store.vectors(np.array([hit.entry.key for hit in found]))
    verified = [True, True, False, False, False]
    expected = diffuse([near[hit.id].score for hit in found], rows, verified)
    np.testing.assert_allclose([hit.refined for hit in found], expected, rtol=1e-5)
    assert (np.diff(expected) <= 0).all()
    same = index.search(folder / "3.png", k=2, refine="diffusion", rerank=True)
    assert [(hit.id, hit.refined) for hit in same] == [(hit.id, hit.refined) for hit in found[:2]]
    with pytest.raises(InputError, match="`quality` must be"):
        index.search(folder / "3.png", quality="good")


def test_marked_entries_keep_their_places_after_verification(scenes):
    index, folder = scenes
    marks = {"same": "0.png", "different": "4.png"}
    found = index.search(folder / "3.png", k=9, rerank=True, **marks)
    names = [hit.id for hit in found]
    assert names[:2] == ["0.png", "3.png"]
    assert sorted(names) == ["0.png", "1.png", "2.png", "3.png", "4.png"]
    assert names[-1] == "4.png"
    assert found[-1].inliers >= MINIMUM > found[0].inliers
    for how in {"rerank": True}, {"quality": "best"}:
        few = index.search(folder / "3.png", k=2, **how, **marks)
        assert [hit.id for hit in few] == names[:2]


def test_without_time_or_a_photo_entries_keep_their_places(scenes):
    index, folder = scenes
    hits = worst_first(index, folder, "3.png")
    query = load_image(folder / "3.png")
    late = reranked(index, [query], hits, until=time.monotonic() - 1)
    assert late == hits
    in_time = reranked(index, [query], hits, until=time.monotonic() + 60)
    assert in_time[0].entry.id == "4.png"
    # An entry without its photo keeps its place.
    kept = (folder / "0.png").read_bytes()
    (folder / "0.png").unlink()
    try:
        found = reranked(index, [load_image(folder / "3.png")], hits, until=time.monotonic() + 60)
    finally:
        (folder / "0.png").write_bytes(kept)
    assert [hit.entry.id for hit in found] == ["0.png", "4.png", "1.png", "2.png"]
    assert [hit.inliers is None for hit in found] == [True, False, False, False]


def test_stored_local_features_need_no_photos(model, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    scene = texture(3, (300, 230))
    views = [scene.crop((0, 0, 240, 180)), scene.crop((30, 20, 270, 200))]
    for number, picture in enumerate([texture(0), texture(1), *views]):
        picture.save(folder / f"{number}.png")
    with Index(create_store(tmp_path / "index", header_of(model)), model) as index:
        later = [folder / f"{number}.png" for number in (1, 2, 3)]
        kept = [path.rename(tmp_path / path.name) for path in later]
        index.add(folder, workers=0)
        assert index.info()["local"] is None
        kept[0].rename(later[0])
        index.add(folder, workers=0, local=True)
        for old, new in zip(kept[1:], later[1:], strict=True):
            old.rename(new)
        index.add(folder, workers=0)  # keeps storing them
        assert index.info()["local"]["entries"] == 3
        (folder / "0.png").rename(folder / "gone.png")
        (skipped,) = index.add_local_features(workers=0).errors
        assert "0.png" in skipped
        (folder / "gone.png").rename(folder / "0.png")
        assert index.add_local_features(workers=0).updated == ["0.png"]
        assert index.add_local_features(workers=0).updated == []
        assert index.info()["local"]["entries"] == 4
        query = load_image(folder / "2.png")
        hits = worst_first(index, folder, "2.png")
        fresh = Reranker().rerank([query], [hit.entry for hit in hits])
        index.add(folder.rename(tmp_path / "moved"), workers=0)  # features move with the entries
        assert index.info()["local"]["entries"] == 4
        shutil.rmtree(tmp_path / "moved")
        hits = worst_first(index, folder, "2.png")
        found = reranked(index, [query], hits)
        assert [hit.entry.id for hit in found] == [hits[one.position].entry.id for one in fresh]
        assert found[0].inliers > 0.7 * fresh[0].inliers
        moved = found[0].matches[:, :2] - found[0].matches[:, 2:]
        np.testing.assert_allclose(np.median(moved, axis=0), [30, 20], atol=0.5)


def test_local_features_are_stored_after_another_process_has_added_some(model, tmp_path):
    paths = [tmp_path / f"{seed}.png" for seed in range(3)]
    for seed, path in enumerate(paths):
        texture(seed).save(path)
    with Index(create_store(tmp_path / "index", header_of(model)), model) as one:
        one.add(paths[0], workers=0)
        one.search(paths[0])
        with Index(open_store(tmp_path / "index"), model) as other:
            other.add_local_features(workers=0)
        one.add(paths[1:], workers=0)
        assert one.info()["local"]["entries"] == len(one) == 3


def test_without_opencv_an_index_stays_as_it_is(index, photos, monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    for name in ("compact", "features", "hessian", "sift"):
        monkeypatch.delitem(sys.modules, f"listwise.local.{name}", raising=False)
    for act in (
        lambda: index.add(photos, local=True, workers=0),
        lambda: index.add_local_features(workers=0),
        lambda: add_local_features(index.store, workers=0),
    ):
        with pytest.raises(MissingDependencyError, match=r"listwise\[local\]"):
            act()
        assert not index.store.header.local
        assert index.info()["local"] is None


def test_damaged_local_features_are_computed_again(model, tmp_path, monkeypatch):
    path, kept = tmp_path / "a.png", tmp_path / "kept.png"
    texture(0).save(path)
    with Index(create_store(tmp_path / "index", header_of(model)), model) as index:
        index.add(path, local=True, workers=0)
        (entry,) = index
        before = index.store.contents("local", [entry.key])
        with monkeypatch.context() as patch:
            patch.setattr("listwise.search.folder.store.content_sum", lambda key, code: 7)
            index.store.put_local([entry], [b"damaged"])
        path.rename(kept)
        texture(1).save(path)  # another photo does not repair it
        result = index.check(repair=True)
        assert (result.damaged, result.repaired, result.lost) == ([entry.id], [], [entry.id])
        assert not result.ok
        kept.rename(path)
        result = index.check(repair=True)
        assert (result.repaired, result.ok) == ([entry.id], True)
        assert index.check().damaged == []
        assert index.store.contents("local", [entry.key]) == before
