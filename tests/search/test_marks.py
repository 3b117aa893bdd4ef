"""Marks of an index: written, read, undone, exported; the same in every store."""

import json
import os
import threading
from pathlib import Path

import programs
import pytest
from mark_writers import line
from PIL import Image

from listwise.data import read_labelled
from listwise.errors import InputError
from listwise.search import open_index
from listwise.search.checksums import DamagedIndexError
from listwise.search.entries import NoEntryError
from listwise.search.folder.mark_file import FILE, MarkFile
from listwise.search.mark_log import parse_line


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
    made = index.mark(a, same=[b, c], different=d, by="ann", ranks={b: 1, index.entry(d).key: 7})
    with open_index(folder, model) as again:
        marks = again.marks()
    assert list(marks) == made == list(marks.history)
    assert facts(marks) == [(a, b, True, "ann"), (a, c, True, "ann"), (a, d, False, "ann")]
    assert [mark.rank for mark in marks] == [1, None, 7]
    assert len({mark.id for mark in marks}) == 3
    assert made[0].query.path == index.entry(a).path
    assert marks.of(a) == ([b, c], [d])
    assert marks.of(d) == ([], [a])


def test_an_index_without_marks(index, tmp_path):
    assert len(index.marks()) == 0
    assert index.marks().write(tmp_path / "labels.csv").photos == 0


def test_an_undone_mark_does_not_count_and_stays_in_the_history(index, ids):
    a, b, *_ = ids
    first, second = index.mark(a, same=b) + index.mark(a, different=b)
    assert facts(index.marks()) == [(a, b, False, "")]
    assert index.unmark(second.id, by="bob") == 1
    assert facts(index.marks()) == [(a, b, True, "")]
    assert index.unmark([first.id, second.id]) == 1
    marks = index.marks()
    assert (len(marks), marks.undone, len(marks.history)) == (0, 2, 2)
    assert not marks.conflicts
    with pytest.raises(InputError, match="no mark 123: give the id of a mark"):
        index.unmark("123")


def test_a_photo_that_is_no_entry_is_kept(index, ids, other_photo, folder):
    (mark,) = index.mark(other_photo, same=ids[0])
    content = other_photo.read_bytes()
    other_photo.unlink()
    (found,) = index.marks()
    assert found == mark
    assert found.query.id == f"query:{found.query.digest}"
    kept = folder / "queries" / os.path.basename(found.query.path)
    assert kept.suffix == ".jpg"
    assert kept.read_bytes() == content
    part = index.mark(kept, same=ids[0], box=(0, 0, 20, 20))[0].query
    assert (part.path, part.box) == (found.query.path, (0, 0, 20, 20))
    assert part.id != found.query.id
    pixels = index.mark(Image.new("RGB", (9, 9)), different=ids[1])[0].query
    assert Image.open(pixels.path).size == (9, 9)


def test_kept_photos_are_found_in_an_index_that_was_moved(index, ids, other_photo, folder, model):
    index.mark(other_photo, same=ids[:2])
    index.close()
    moved = folder.rename(folder.with_name("moved"))
    with open_index(moved, model) as again:
        marks = again.marks()
        assert len(marks) == 2
        assert marks.active[0].query.path == str(next((moved / "queries").iterdir()))
        assert again.search(other_photo, marks=True)[0].id in ids[:2]


def test_a_photo_that_is_an_entry_is_found_by_its_content(index, ids, other_photo):
    entry = index.entry(ids[0])
    other_photo.write_bytes(Path(entry.path).read_bytes())
    (mark,) = index.mark(other_photo, same=[ids[0], ids[1]])  # the photo itself gets no mark
    assert (mark.query.id, mark.entry) == (ids[0], ids[1])
    (by_key,) = index.mark(entry.key, different=[ids[2]])
    assert by_key.query == mark.query


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "nothing to mark: give `same` or `different`"),
        ({"same": ["x"], "different": ["x"]}, "is in `same` and in `different`"),
        ({"different": ["q"]}, "is the query itself: it cannot be `different`"),
        ({"same": "nothing"}, "has no photo nothing: give an id or a key"),
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
        index.mark(ids[0], **given)
    assert not index.marks().history
    with pytest.raises(InputError, match="no-such-file"):
        index.mark("no-such-file.jpg", same=ids[0])
    with pytest.raises(InputError, match=r"test_marks\.py"):
        index.mark(Path(__file__), same=ids[0])
    with pytest.raises(NoEntryError):
        index.mark(12345, same=ids[0])
    with pytest.raises(InputError, match="`box` is for a photo: leave it out for an entry"):
        index.mark(index.entry(ids[0]).key, same=ids[1], box=(0, 0, 9, 9))


def test_marks_of_removed_photos_come_back_with_them(index, ids, tmp_path):
    a, b, c, *_ = ids
    paths = {name: index.entry(name).path for name in ids}
    index.mark(a, same=[b, c])
    index.remove(b)
    marks = index.marks()
    assert facts(marks) == [(a, c, True, "")]
    assert [mark.entry for mark in marks.missing] == [b]
    assert marks.write(tmp_path / "labels.csv").missing == 1
    moved = tmp_path / "moved.jpg"
    moved.write_bytes(Path(paths[b]).read_bytes())
    (new,) = index.add(moved, workers=0).added
    assert facts(index.marks()) == [(a, new, True, ""), (a, c, True, "")]
    # The file under this id shows something else now.
    index.remove(new)
    Image.new("RGB", (40, 30)).save(moved)
    index.add(moved, workers=0)
    assert [mark.entry for mark in index.marks().missing] == [b]


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
    index.mark(a, same=b, different=d)
    index.mark(other_photo, same=[c], box=(0, 0, 20, 20))
    index.label(b, "tower")
    index.label(ids[4:6], "louvre")  # nobody has marked these
    file = tmp_path / "labels.csv"
    table = index.marks().write(file)
    assert (table.classes, table.photos, table.conflicting, table.missing) == (4, 7, 0, 0)
    found = read_labelled(file)
    names = [found.class_names[kind] for kind in found.labels]
    assert sorted(names) == sorted(["tower", "tower", c, c, d, "louvre", "louvre"])
    assert [found.box(place) for place in range(7) if found.box(place)] == [(0, 0, 20, 20)]
    index.mark(ids[4], different=ids[5])  # contradicts the label
    assert index.marks().write(file).conflicting == 2
    assert "louvre" not in read_labelled(file).class_names


def test_a_torn_line_is_cut_off(index, ids, folder):
    index.mark(ids[0], same=ids[1:3])
    file = folder / FILE
    whole = file.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole)):
        file.write_bytes(whole[:cut])
        assert len(MarkFile(folder).read()) == 1, cut
    file.write_bytes(whole[:-1])
    (mark,) = index.mark(ids[4], same=ids[5])
    assert facts(index.marks()) == [(ids[0], ids[1], True, ""), (ids[4], ids[5], True, "")]
    assert index.check().ok
    assert index.marks().active[-1] == mark


def test_a_damaged_line_is_reported_and_repaired(index, ids, folder):
    made = index.mark(ids[0], same=ids[1:4])
    file = folder / FILE
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([lines[0], lines[1].replace(b"true", b"fals", 1), lines[2]]))
    with pytest.raises(DamagedIndexError, match=r"marks.jsonl line 2 .* --repair"):
        index.marks()
    index.mark(ids[5], same=ids[6])  # new marks can be written
    found = index.check()
    assert found.marks == ["marks.jsonl line 2"]
    assert not found.ok
    assert index.check(repair=True).ok
    assert [mark.entry for mark in index.marks()] == [made[0].entry, made[2].entry, ids[6]]
    assert index.check().ok


def test_a_repair_removes_damaged_lines_only(tmp_path):
    log = MarkFile(tmp_path)
    log.append([line("1"), "damaged", line("2")])
    log.drop(["marks.jsonl line 1", "marks.jsonl line 2"])  # another repair was faster
    assert [parse_line(each.text).id for each in log.read()] == ["1", "2"]


def test_threads_write_without_losing_marks(index, ids):
    def write(number):
        for other in ids[8:16]:
            index.mark(ids[number], same=other, by=str(number))

    threads = [threading.Thread(target=write, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    marks = index.marks()
    assert len(marks) == len({json.dumps(fact) for fact in facts(marks)}) == 32


def test_processes_that_write_are_killed_and_lose_nothing(tmp_path):
    process = programs.script(Path(__file__).with_name("mark_writers.py"), tmp_path)
    out, err = process.communicate()
    assert process.returncode == 0, err
    found = [parse_line(each.text) for each in MarkFile(tmp_path).read()]
    assert None not in found
    names = {mark.id for mark in found}
    assert len(names) == len(found)
    stored = out.split()
    assert len(stored) >= 60
    assert {f"{each}-{part}" for each in stored for part in range(3)} <= names
    assert {f"after-{number}" for number in range(6)} <= names


def test_a_full_disk_leaves_the_log_as_it_was(tmp_path, monkeypatch):
    log = MarkFile(tmp_path)
    log.append([line("1")])
    before = (tmp_path / FILE).read_bytes()
    write = os.write

    def half(file, content):
        if len(content) < 20:
            raise OSError(28, "No space left on device")
        return write(file, content[: len(content) // 2])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(InputError, match=r"cannot write to .*: No space left on device"):
        log.append([line("2"), line("3")])
    monkeypatch.setattr(os, "write", write)
    assert (tmp_path / FILE).read_bytes() == before
    log.append([line("4")])
    assert [parse_line(each.text).id for each in log.read()] == ["1", "4"]
