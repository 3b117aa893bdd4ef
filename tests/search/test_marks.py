"""Marks of an index: written, read, undone, exported; its classes, and pairs to mark next."""

import itertools
import os
from pathlib import Path

import pytest
from PIL import Image

from listwise.calibration import Calibration
from listwise.data import read_labelled
from listwise.errors import InputError
from listwise.search import open_index
from listwise.search.entries import NoEntryError
from listwise.search.stored_marks import find_suggestions


@pytest.fixture
def ids(index):
    return sorted(entry.id for entry in index)


@pytest.fixture
def other_photo(tmp_path):
    """A photo that is not in the index."""
    path = tmp_path / "query.JPG"
    Image.new("RGB", (40, 30), (200, 30, 30)).save(path)
    return path


def facts(marks):
    return [(mark.query.id, mark.entry, mark.same, mark.by) for mark in marks]


def test_marks_are_read_as_they_were_written(index, ids, folder, model):
    a, b, c, d, *_ = ids
    made = index.marks.add(
        a, same=[b, c], different=d, by="ann", ranks={b: 1, index.entry(d).key: 7}
    )
    with open_index(folder, model) as again:
        marks = again.marks.read()
    assert list(marks) == made == list(marks.history)
    assert facts(marks) == [(a, b, True, "ann"), (a, c, True, "ann"), (a, d, False, "ann")]
    assert [mark.rank for mark in marks] == [1, None, 7]
    assert len({mark.id for mark in marks}) == 3
    assert made[0].query.path == index.entry(a).path
    assert marks.of(a) == ([b, c], [d])
    assert marks.of(d) == ([], [a])


def test_an_undone_mark_does_not_count_and_stays_in_the_history(index, ids):
    a, b, *_ = ids
    first, second = index.marks.add(a, same=b) + index.marks.add(a, different=b)
    assert facts(index.marks.read()) == [(a, b, False, "")]
    assert index.marks.undo(second.id, by="bob") == 1
    assert facts(index.marks.read()) == [(a, b, True, "")]
    assert index.marks.undo([first.id, second.id]) == 1
    marks = index.marks.read()
    assert (len(marks), marks.undone, len(marks.history)) == (0, 2, 2)
    assert not marks.conflicts
    with pytest.raises(InputError, match="no mark 123: give the id of a mark"):
        index.marks.undo("123")


def test_a_photo_that_is_no_entry_is_kept(index, ids, other_photo, folder):
    (mark,) = index.marks.add(other_photo, same=ids[0])
    content = other_photo.read_bytes()
    other_photo.unlink()
    (found,) = index.marks.read()
    assert found == mark
    assert found.query.id == f"query:{found.query.digest}"
    kept = folder / "queries" / os.path.basename(found.query.path)
    assert kept.suffix == ".jpg"
    assert kept.read_bytes() == content
    part = index.marks.add(kept, same=ids[0], box=(0, 0, 20, 20))[0].query
    assert (part.path, part.box) == (found.query.path, (0, 0, 20, 20))
    assert part.id != found.query.id
    pixels = index.marks.add(Image.new("RGB", (9, 9)), different=ids[1])[0].query
    assert Image.open(pixels.path).size == (9, 9)


def test_kept_photos_are_found_in_an_index_that_was_moved(index, ids, other_photo, folder, model):
    index.marks.add(other_photo, same=ids[:2])
    index.close()
    moved = folder.rename(folder.with_name("moved"))
    with open_index(moved, model) as again:
        marks = again.marks.read()
        assert len(marks) == 2
        assert marks.active[0].query.path == str(next((moved / "queries").iterdir()))
        assert again.search(other_photo, marks=True)[0].id in ids[:2]


def test_a_photo_that_is_an_entry_is_found_by_its_content(index, ids, other_photo):
    entry = index.entry(ids[0])
    other_photo.write_bytes(Path(entry.path).read_bytes())
    (mark,) = index.marks.add(other_photo, same=[ids[0], ids[1]])  # the photo itself gets no mark
    assert (mark.query.id, mark.entry) == (ids[0], ids[1])
    (by_key,) = index.marks.add(entry.key, different=[ids[2]])
    assert by_key.query == mark.query


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "nothing to mark: give `same` or `different`"),
        ({"same": ["x"], "different": ["x"]}, "is in `same` and in `different`"),
        ({"different": ["q"]}, "is the query itself: it cannot be `different`"),
        ({"same": "nothing"}, "has no entry nothing: give an id or a key"),
        ({"same": "x", "by": "a\nb"}, "`by` must be one line"),
        ({"same": "x", "ranks": {"x": 0}}, "`ranks` must be 1 or more"),
    ],
)
def test_what_cannot_be_marked(index, ids, arguments, message):
    names = {"x": ids[1], "q": ids[0]}
    given = {
        name: [names.get(each, each) for each in value] if isinstance(value, list) else value
        for name, value in arguments.items()
    }
    if given.get("same") == "x":
        given["same"] = ids[1]
    with pytest.raises(InputError, match=message):
        index.marks.add(ids[0], **given)
    assert not index.marks.read().history
    with pytest.raises(InputError, match="no-such-file"):
        index.marks.add("no-such-file.jpg", same=ids[0])
    with pytest.raises(InputError, match=r"test_marks\.py"):
        index.marks.add(Path(__file__), same=ids[0])
    with pytest.raises(NoEntryError):
        index.marks.add(12345, same=ids[0])
    with pytest.raises(InputError, match="`box` is for a photo: leave it out for an entry"):
        index.marks.add(index.entry(ids[0]).key, same=ids[1], box=(0, 0, 9, 9))


def test_marks_of_removed_photos_come_back_with_them(index, ids, tmp_path):
    a, b, c, *_ = ids
    paths = {name: index.entry(name).path for name in ids}
    index.marks.add(a, same=[b, c])
    index.remove(b)
    marks = index.marks.read()
    assert facts(marks) == [(a, c, True, "")]
    assert [mark.entry for mark in marks.missing] == [b]
    assert marks.write(tmp_path / "labels.csv").missing == 1
    moved = tmp_path / "moved.jpg"
    moved.write_bytes(Path(paths[b]).read_bytes())
    (new,) = index.add(moved, workers=0).added
    assert facts(index.marks.read()) == [(a, new, True, ""), (a, c, True, "")]
    # The file under this id shows something else now.
    index.remove(new)
    Image.new("RGB", (40, 30)).save(moved)
    index.add(moved, workers=0)
    assert [mark.entry for mark in index.marks.read().missing] == [b]


def test_labels_are_written_without_describing(index, ids, monkeypatch):
    rows = index.store.vectors([index.entry(name).key for name in ids])
    small = index.store.thumbnail(index.entry(ids[0]).key)
    monkeypatch.setattr(type(index.model), "describe_parts", None)
    assert index.label(ids[:3], " eiffel tower ") == 3
    assert index.label(ids[2], "") == 1
    assert [entry.id for entry in index.entries(where="label = 'eiffel tower'")] == ids[:2]
    assert "label" not in index.entry(ids[2]).attributes
    assert (index.store.vectors([index.entry(name).key for name in ids]) == rows).all()
    assert index.store.thumbnail(index.entry(ids[0]).key) == small
    assert index.check().ok
    assert index.search(rows[0], k=1)[0].id == ids[0]
    with pytest.raises(NoEntryError):
        index.label("nothing", "x")


def test_a_photo_that_is_added_again_keeps_its_label(index, other_photo, tmp_path):
    table = tmp_path / "table.csv"

    def added(column, value):
        table.write_text(f"path,{column}\n{other_photo.name},{value}\n")
        index.add(table, workers=0)
        return index.entry(other_photo.name).attributes

    assert added("price", 5) == {"price": "5"}
    index.label(other_photo.name, "tower")
    assert added("price", 6) == {"label": "tower", "price": "6"}
    assert added("label", "louvre") == {"label": "louvre"}


def test_the_table_of_labels_is_read_by_training(index, ids, other_photo, tmp_path):
    a, b, c, d, *_ = ids
    index.marks.add(a, same=b, different=d)
    index.marks.add(other_photo, same=[c], box=(0, 0, 20, 20))
    index.label(b, "tower")
    index.label(ids[4:6], "louvre")  # nobody has marked these
    file = tmp_path / "labels.csv"
    table = index.marks.read().write(file)
    assert (table.classes, table.photos, table.conflicting, table.missing) == (4, 7, 0, 0)
    found = read_labelled(file)
    names = [found.class_names[kind] for kind in found.labels]
    assert sorted(names) == sorted(["tower", "tower", c, c, d, "louvre", "louvre"])
    assert [found.box(place) for place in range(7) if found.box(place)] == [(0, 0, 20, 20)]
    index.marks.add(ids[4], different=ids[5])  # contradicts the label
    assert index.marks.read().write(file).conflicting == 2
    assert "louvre" not in read_labelled(file).class_names


def test_photos_with_labels_and_marks_make_the_classes_of_an_index(index):
    one, two, three, four, five = (entry.id for entry in itertools.islice(index.entries(), 5))
    assert (index.marks.read().labels, index.marks.classes()) == ({}, [])
    index.label([one, two], "chair")
    index.marks.add(two, same=[three], different=[four])
    index.marks.add(four, same=[five])
    chair, other = index.marks.classes()
    assert (chair.name, chair.photos, chair.labelled, chair.marks) == ("chair", 3, 2, 2)
    assert (other.name, other.photos, other.labelled, other.marks) == (min(four, five), 2, 0, 2)
    assert index.marks.read().labels == {one: "chair", two: "chair"}
    assert chair.open >= 0


def test_suggestions_are_unknown_pairs_spread_over_classes(index):
    names = [entry.id for entry in index.entries()]
    classes = {"red": names[:6], "blue": names[6:12]}
    for name, members in classes.items():
        index.label(members, name)
    index.marks.add(names[12], same=[names[13]], different=[names[0]])
    found = index.marks.suggest(12)
    assert len(found) == 12
    pairs = {frozenset((each.one.id, each.other.id)) for each in found}
    assert len(pairs) == 12
    assert frozenset(names[12:14]) not in pairs
    assert frozenset((names[12], names[0])) not in pairs
    labelled = {name for members in classes.values() for name in members}
    assert all(not pair <= labelled for pair in pairs)
    # The first suggestions are of different classes, of which there are three.
    assert {each.name for each in found[:3]} == {"red", "blue", min(names[12:14])}
    assert all(-1 <= each.score <= 1.001 for each in found)


def test_suggestions_of_a_calibrated_model_are_nearest_to_one_half(index):
    first = next(iter(index.entries())).id
    index.label([first], "red")
    # One half is at the score 0.7.
    known = Calibration(slope=10, intercept=-7, source="", photos=0, pairs=0, positives=0)
    found = find_suggestions(index.store, index.marks.read(), known, 5)
    scores = [hit.score for hit in index.search(like=first, k=20)]
    nearest = sorted(abs(known.probability(score) - 0.5) for score in scores)[:5]
    assert [abs(each.probability - 0.5) for each in found] == pytest.approx(nearest, abs=1e-5)
    assert {each.one.id for each in found} == {first}
    with pytest.raises(InputError, match="`count` must be 1 or more"):
        index.marks.suggest(0)
