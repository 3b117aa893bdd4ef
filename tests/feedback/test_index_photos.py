"""Labels and marks of an index as training and validation photos."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from listwise.errors import InputError
from listwise.feedback import MarkedPhotos, read_index_photos
from listwise.feedback.comparison import Ranking
from listwise.feedback.photos import hold_out_photos
from listwise.feedback.trainers import keep_together, marked_together

classes = st.dictionaries(st.integers(0, 25), st.integers(0, 6), min_size=12).filter(
    lambda found: sum(list(found.values()).count(kind) > 1 for kind in range(7)) >= 4
)


@given(classes, st.data(), st.integers(0, 3))
def test_a_class_is_on_one_side_and_lone_negatives_follow_their_queries(classes, data, seed):
    named = {str(photo): str(kind) for photo, kind in classes.items()}
    photos = st.sampled_from(sorted(named))
    queries = [
        MarkedPhotos(query=query, same=(), different=(other,))
        for query, other in data.draw(st.lists(st.tuples(photos, photos), max_size=6))
        if named[query] != named[other]
    ]
    held_out = hold_out_photos(named, queries, 0.3, seed)
    assert held_out == hold_out_photos(named, queries, 0.3, seed)
    members = {kind: {p for p in named if named[p] == kind} for kind in named.values()}
    sides = [0, 0]
    for photos in members.values():
        assert photos <= held_out or not photos & held_out
        sides[photos <= held_out] += len(photos) > 1
    assert min(sides) >= 2
    for photo in held_out:
        if len(members[named[photo]]) == 1:
            assert {q.query for q in queries if photo in q.different} <= held_out


def test_classes_that_marks_connect_stay_on_one_side_if_possible():
    classes = {f"{kind}{number}": kind for kind in "abcdefgh" for number in "01"}
    queries = [
        MarkedPhotos(query=f"{one}0", same=(f"{one}1",), different=(f"{other}0",))
        for one, other in ("ab", "cd", "ef", "gh")
    ]
    for seed in range(5):
        held_out = hold_out_photos(classes, queries, 0.25, seed)
        assert {photo[0] for photo in held_out} in ({*"ab"}, {*"cd"}, {*"ef"}, {*"gh"})


def test_a_query_brings_its_marked_photos_into_the_batch():
    labels = np.array([1, 2, 0, 3, 4, 0, 5, 6, 7, 1])
    batch = keep_together(np.array([5, 2, 9, 1, 0]), labels, {2: [7, 5, 8], 1: [3]}, 6)
    assert batch.tolist() == [5, 2, 7, 8, 9, 0]
    # A query with many marks leaves a positive in the batch.
    labels = np.array([0, 1, 2, 2, *range(3, 12)])
    many = {0: list(range(4, 12)), 2: list(range(4, 13))}
    batch = keep_together(np.array([0, 2, 1, 3]), labels, many, 4)
    assert batch.tolist()[:2] == [2, 3]
    assert len(batch) == 4


def test_labels_marks_and_query_photos_become_classes(index, tmp_path):
    ids = sorted(entry.id for entry in index)
    for kind in range(4):
        index.label([f"class{kind}/0.jpg", f"class{kind}/1.jpg"], f"kind {kind}")
    query = tmp_path / "query.png"
    Image.new("RGB", (50, 40), (200, 30, 30)).save(query)
    index.marks.add(query, same=["class0/2.jpg", "class0/0.jpg"], different=["class5/0.jpg"])
    index.marks.add("class6/0.jpg", same=["class6/1.jpg"], by="ann")
    index.marks.add("class6/0.jpg", different=["class6/1.jpg"], by="bob")
    found = read_index_photos(index, 0.25, 0)
    images = found.images
    named = {
        photo: images.class_names[label]
        for photo, label in zip(images.ids, images.labels, strict=True)
    }
    (own,) = (photo for photo in named if photo not in ids)
    assert own.startswith("query:")
    assert named.pop(own) == named["class0/0.jpg"] == named["class0/2.jpg"] == "kind 0"
    assert named["class5/0.jpg"] == "class5/0.jpg"
    assert len(named) == 8 + 2
    assert found.conflicting == 2
    assert found.queries[0].query == own
    assert set(found.queries[0].same) == {"class0/0.jpg", "class0/2.jpg"}
    train = images.of_split("train")
    together = marked_together(train, found.queries)
    for place, others in together.items():
        assert train.ids[place] == own
        assert {train.ids[i] for i in others} <= {"class0/0.jpg", "class0/2.jpg", "class5/0.jpg"}
    assert set(images.splits) == {"train", "val"}


def test_an_index_without_enough_classes_is_refused(index):
    with pytest.raises(InputError, match="has neither labels nor marks to train on"):
        read_index_photos(index, 0.25, 0)
    index.marks.add("class0/0.jpg", same=["class0/1.jpg"], different=["class1/0.jpg"])
    with pytest.raises(InputError, match="for 1 classes of two or more photos, but training needs"):
        read_index_photos(index, 0.25, 0)


def test_photos_that_do_not_exist_are_counted(index, tmp_path):
    for kind in range(4):
        index.label([f"class{kind}/0.jpg", f"class{kind}/1.jpg"], f"kind {kind}")
    read_index_photos(index, 0.25, 0)
    for name in ("a.png", "b.png"):
        Image.new("RGB", (40, 30), (9, 9, ord(name[0]))).save(tmp_path / name)
        index.add(tmp_path / name)
    lost = sorted(entry.id for entry in index if entry.id.endswith("png"))
    index.label(lost, "kind 5")
    (tmp_path / "a.png").unlink()
    with pytest.raises(InputError, match=r"1 of 10 labelled or marked photos .* first is .*a\.png"):
        read_index_photos(index, 0.25, 0)


def test_a_network_that_describes_all_photos_alike_has_the_lowest_precision():
    alike = Ranking(np.ones((6, 2), np.float32), np.array([0, 0, 1, 1]))
    assert alike.ap(0) == pytest.approx(1 / 5)
    assert np.isnan(Ranking(np.ones((2, 2), np.float32), np.array([0, 1])).ap(0))
