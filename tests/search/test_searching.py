"""The search path: batches of queries, decoded photos, and places in the whole photo."""

import io
from dataclasses import replace

import numpy as np
import pytest
from index_examples import texture
from PIL import Image

from listwise.data import ImageError, load_image
from listwise.data.photos import decode_photo
from listwise.search import searching
from listwise.search.hits import Query, StoppedError
from listwise.search.options import SearchOptions
from listwise.search.refinement import REFINEMENTS
from listwise.search.searching import Searcher, placed

DIFFUSION = SearchOptions(k=5, refine="diffusion")


def by_entry(number, options=DIFFUSION):
    return Query(entries=[f"class{number}/0.jpg"], options=options)


@pytest.fixture
def searcher():
    made = Searcher()
    yield made
    made.close()


@pytest.fixture
def refined(monkeypatch):
    """Calls functions before each refinement, which then takes place; counts them."""
    method = REFINEMENTS["diffusion"]
    calls, before = [], []

    def score(query, short_list):
        calls.append(len(short_list))
        for function in before:
            function()
        return method.score(query, short_list)

    monkeypatch.setitem(REFINEMENTS, "diffusion", replace(method, score=score))
    return calls, before


def test_a_batch_finds_what_each_query_finds_alone(searcher, index, photos):
    paths = [photos / f"class{number}" / "1.jpg" for number in range(3)]
    queries = [
        Query([paths[0]], [None], options=SearchOptions(k=4)),
        Query([texture(0)], [None], options=SearchOptions(k=4, where="price < 3")),
        Query(paths[1:], [(0, 0, 40, 40), None], ["class4/0.jpg"]),
        Query([photos / "class0"], [None]),
        by_entry(2),
        by_entry(3, SearchOptions(expand=True, start=2)),
    ]
    found = searcher.search(index.generation, queries)
    assert [isinstance(each, Exception) for each in found] == [
        False,
        True,
        False,
        True,
        *[False] * 2,
    ]
    alone = [
        index.search(paths[0], 4),
        index.search(paths[1:], box=[(0, 0, 40, 40), None], like="class4/0.jpg", average=True),
        index.search(like="class2/0.jpg", k=5, refine="diffusion"),
        index.search(like="class3/0.jpg", expand=True, start=2),
    ]
    for result, hits in zip([each for each in found if hasattr(each, "page")], alone, strict=True):
        assert [hit.id for hit in result.page] == [hit.id for hit in hits]
        scores = [hit.score for hit in hits]
        assert [hit.score for hit in result.page] == pytest.approx(scores, abs=1e-5)
        assert len(result.hits) > len(result.page)  # shows whether there are more


def test_a_photo_is_decoded_once_for_search_and_verification(searcher, index, photos, monkeypatch):
    decoded = []

    def decode(photo, *arguments):
        decoded.append(photo)
        return decode_photo(photo, *arguments)

    monkeypatch.setattr(searching, "decode_photo", decode)
    path = photos / "class3" / "2.jpg"
    (found,) = searcher.search(
        index.generation, [Query([path], [None], options=SearchOptions(rerank=True, k=3))]
    )
    best = searcher.rerank(found).page[0]
    assert best.id == "class3/2.jpg"
    assert best.inliers > 6
    assert decoded == [path]


def test_a_photo_of_the_index_has_its_descriptor_there_and_is_not_decoded(
    searcher, index, photos, monkeypatch
):
    path = photos / "class3" / "2.jpg"
    given = [path, io.BytesIO(path.read_bytes())]
    monkeypatch.setattr(searching, "decode_photo", None)
    for photo in given:
        (found,) = searcher.search(index.generation, [Query([photo], [None])])
        assert found.page[0].id == "class3/2.jpg"
        assert found.page[0].score == pytest.approx(1.0, abs=1e-6)


def test_a_query_that_nobody_waits_for_is_not_refined(searcher, index, refined):
    calls, before = refined
    first, second, third = queries = [by_entry(number) for number in range(3)]
    third.finished.set()
    before.append(second.finished.set)  # while the first one is refined
    found = searcher.search(index.generation, [*queries, by_entry(1, SearchOptions(k=5))])
    assert len(calls) == 1
    assert isinstance(found[1], StoppedError)
    assert isinstance(found[2], StoppedError)
    assert [hit.refined is None for hit in found[0].page] == [False] * 5
    assert [hit.refined is None for hit in found[3].page] == [True] * 5
    assert not first.finished.is_set()


def test_an_error_of_a_refinement_concerns_its_query_alone(searcher, index, refined):
    calls, before = refined

    def fail():
        if len(calls) == 1:
            raise ValueError("the first one")

    before.append(fail)
    failed, found = searcher.search(index.generation, [by_entry(0), by_entry(1)])
    assert str(failed) == "the first one"
    assert len(found.page) == 5


def saved(photo, kind, orientation=1):
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"JPEG": {"quality": 95}, "PNG": {"compress_level": 1}}
    photo.save(file, kind, exif=exif, **options[kind])
    return file


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("box", [None, (150, 90, 1150, 690), (30, 40, 130, 100)])
def test_the_part_of_a_photo_is_reduced_and_points_in_it_are_placed(kind, orientation, box):
    file = saved(texture(3, (1280, 960)), kind, orientation)
    found = decode_photo(file, box, 120).reduced(120)
    exact = load_image(file, box)
    size = exact.size
    exact.thumbnail((120, 120), Image.Resampling.BICUBIC)
    assert abs(found.image.width - exact.width) <= 1
    assert abs(found.image.height - exact.height) <= 1
    other = np.asarray(exact.resize(found.image.size), float)
    assert abs(np.asarray(found.image, float) - other).mean() < 6
    corners = np.array([[-0.5, -0.5], [found.image.width - 0.5, found.image.height - 0.5]])
    left, top = (0, 0) if box is None else box[:2]
    expected = np.array([[left, top], [left + size[0], top + size[1]]]) - 0.5
    assert placed(corners, found) == pytest.approx(expected, abs=12)


@pytest.mark.parametrize("given", ["file", "image", "array"])
def test_a_box_in_a_small_photo_is_cut_out(given):
    photo = texture(1, (90, 60))
    kinds = {"file": saved(photo, "PNG"), "image": photo, "array": np.asarray(photo)}
    found = decode_photo(kinds[given], (10, 20, 50, 60), 120)
    assert np.array_equal(np.asarray(found.image), np.asarray(photo.crop((10, 20, 50, 60))))
    points = np.array([[0.0, 0.0], [3.0, 4.0]], np.float32)
    assert placed(points, found).tolist() == [[10, 20], [13, 24]]
    with pytest.raises(ImageError, match="outside the image of 90 × 60"):
        decode_photo(kinds[given], (100, 0, 120, 20), 120)
