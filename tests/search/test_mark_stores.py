"""The log of marks in every store: written by two clients, kept by upgrades, repaired."""

import os

import numpy as np
import pytest
from PIL import Image

from listwise.errors import InputError
from listwise.search import DamagedIndexError
from listwise.search.entries import Entry, NewEntries
from listwise.search.index import Index
from listwise.search.mark_log import write_line
from listwise.search.milvus.store import MilvusStore
from listwise.search.opening import create_store, open_store
from listwise.search.store import IndexHeader
from listwise.search.upgrading import discard_generations

HEADER = IndexHeader(model="m", model_folder="m", whitened=False, dim=4)
NAMES = [f"e{number}" for number in range(6)]


@pytest.fixture(scope="module", params=["embedded", "lite", "server"])
def store(request):
    place = request.getfixturevalue(f"{request.param}_places")()
    with create_store(place, HEADER) as store:
        made = [Entry(name, f"/{name}", 1, 1, digest=f"d {name}") for name in NAMES]
        rows = np.eye(4, dtype=np.float32)[[0, 1, 2, 3, 0, 1]]
        store.put(NewEntries(made, rows, [b"small"] * 6))
        yield store


def facts(index):
    return [(mark.query.id, mark.entry, mark.same, mark.by) for mark in index.marks.read()]


def test_marks_and_labels_in_every_store(store, tmp_path):
    index = Index(store)
    assert not index.marks.read().history
    first = index.marks.add("e0", same=["e1", "e2"], different="e3", by="ann")
    expected = [("e0", "e1", True, "ann"), ("e0", "e2", True, "ann"), ("e0", "e3", False, "ann")]
    with open_store(store.uri) as other:  # as another process does
        assert facts(Index(other)) == expected
        (second,) = Index(other).marks.add("e4", different=["e5"], by="bob")
    assert facts(index) == [*expected, ("e4", "e5", False, "bob")]
    assert index.marks.undo([first[1].id, second.id]) == 2
    assert facts(index) == [expected[0], expected[2]]
    photo = tmp_path / "query.png"
    Image.new("RGB", (5, 5)).save(photo)
    (third,) = index.marks.add(photo, same="e1")
    assert os.path.exists(third.query.path)
    index.marks.undo(third.id)
    assert index.label(["e1", "e2"], "tower") == 2
    assert index.label("e2", "") == 1
    entries = {entry.id: entry for entry in index}
    assert entries["e1"].attributes == {"label": "tower"}
    assert not entries["e2"].attributes
    assert store.thumbnail(entries["e1"].key) == b"small"
    assert [hit.id for hit in index.search(np.eye(4, dtype=np.float32)[1], k=2)] in (
        ["e1", "e5"],
        ["e5", "e1"],
    )
    assert index.check().damaged == []
    _moved_hits(index)


def _moved_hits(index):
    found = index.search(np.ones(4, np.float32) / 2, k=6, same="e3", different="e1")
    assert [found[0].id, found[-1].id] == ["e3", "e1"]
    assert len(found) == 6
    filtered = index.search(np.ones(4, np.float32) / 2, same="e3", where="label = 'tower'")
    assert [hit.id for hit in filtered] == ["e1"]


def test_a_photo_without_a_file_needs_a_folder(store):
    index = Index(store)
    if isinstance(store, MilvusStore):
        with pytest.raises(InputError, match="keeps no photos: give `query` as a file"):
            index.marks.add(Image.new("RGB", (5, 5)), same="e1")
    else:
        (mark,) = index.marks.add(Image.new("RGB", (5, 5)), same="e1")
        assert index.marks.undo(mark.id) == 1


def test_upgrades_rollbacks_and_discards_keep_the_marks(store):
    index = Index(store)
    (mark,) = index.marks.add("e4", same="e5")
    before = store.mark_log.read()
    generations = store.generations
    with generations.create(1, HEADER) as new:
        assert new.mark_log.read() == before
        generations.save_record(generations.record().begun(1))
        with generations.pausing():
            generations.switch(1)
        with open_store(store.uri) as current:
            assert current.generation == 1
            assert current.mark_log.read() == before
            with current.generations.pausing():
                current.generations.switch(0)
    with open_store(store.uri) as current:
        discard_generations(current)
        assert current.mark_log.read() == before
    index.marks.undo(mark.id)


def test_a_damaged_line_is_found_and_removed(store):
    index = Index(store)
    index.marks.add("e4", same="e5")
    before = facts(index)
    (new,) = index.marks.add("e2", different="e4", by="eve")
    log = store.mark_log
    if isinstance(store, MilvusStore):
        row = {"key": int(new.id, 16) >> 1, "order": new.time, "unused": [0.0, 1.0]}
        log._connection.call(
            "upsert",
            data=[row | {"line": write_line(new).replace("eve", "bob")}],
        )
    else:
        with log._database.writing() as connection:
            connection.execute("UPDATE marks SET line = replace(line, 'eve', 'bob')")
    with pytest.raises(DamagedIndexError, match="changed after it was written; run listwise index"):
        index.marks.read()
    assert len(index.check().damaged) == 1
    repaired = index.check(repair=True)
    assert repaired.ok
    assert repaired.repaired == repaired.damaged
    assert facts(index) == before
