"""Damage to the files of an index is refused or harmless, and check and repair undo it."""

import contextlib
import os
import re
import shutil
import sqlite3

import numpy as np
import pytest

from listwise.data import read_images
from listwise.errors import InputError
from listwise.search import DamagedIndexError, Index, SearchIntent, check_index, open_store
from listwise.search.entries import Entry, NewEntries
from listwise.search.filling import add_photos

SOAK = bool(os.environ.get("LISTWISE_SOAK"))
FLIPS = 200 if SOAK else 10  # in each file


@pytest.fixture(scope="module")
def original(filled, tmp_path_factory):
    """An index with removed and replaced entries and a compressed search; leave it as it is."""
    folder = tmp_path_factory.mktemp("original") / "index"
    shutil.copytree(filled, folder)
    with open_store(folder) as store:
        first, second, *_ = store
        changed = Entry(second.id, second.path, 1, 2, digest=second.digest, attributes={"a": "b"})
        rows = store.vectors([second.key])
        store.put(NewEntries([changed], rows, [store.thumbnail(second.key) or b""]))
        store.remove([first.key])
        store.method.tune(SearchIntent(memory=1, recall=1.0))
    return folder


@pytest.fixture
def damaged(original, tmp_path):
    """A copy to be damaged."""
    shutil.copytree(original, tmp_path / "index")
    return tmp_path / "index"


def answers(folder, queries):
    """Everything that an index answers."""
    with open_store(folder) as store:
        entries = sorted(store, key=lambda entry: entry.key)
        keys = [entry.key for entry in entries]
        scores, found = store.search(queries, 5)
        digests = store.with_digests([entry.digest for entry in entries])
        known = len(store), store.get(keys), sorted(digests), found.tolist()
        thumbnails = [store.thumbnail(key) for key in keys]
        return entries, thumbnails, known, scores, store.vectors(keys)


def same(one, two):
    exact = all(a == b for a, b in zip(one[:3], two[:3], strict=True))
    close = (np.allclose(a, b, atol=1e-5) for a, b in zip(one[3:], two[3:], strict=True))
    return exact and all(close)


def flip(path, place, bit=3):
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def place_of(folder, content, index=False):
    """The file that holds these bytes, and where; `index` is for the copy in an index of SQLite."""
    for path in sorted(folder.iterdir()):
        stored = path.read_bytes()
        for found in re.finditer(re.escape(content), stored):
            # The type of a page is 10 if it belongs to an index.
            if (stored[found.start() // 4096 * 4096] == 10) == index:
                return path, found.start()
    raise AssertionError("not stored as it is")


def live(expected):
    """Numbers of the entries that were written once: no removed row holds the same bytes."""
    return [number for number, one in enumerate(expected[0]) if "a" not in one.attributes]


@pytest.fixture(scope="module")
def queries(original):
    with open_store(original) as store:
        return store.vectors([entry.key for entry in store.entries(start=3, count=2)])


@pytest.fixture(scope="module")
def expected(original, queries):
    """What the index answers before it is damaged."""
    return answers(original, queries)


@pytest.mark.slow
def test_a_flipped_bit_is_refused_or_found_or_changes_nothing(damaged, original, queries, expected):
    rng = np.random.default_rng(0)
    messages, found = [], 0
    for path in sorted(original.iterdir()):
        content = path.read_bytes()
        name = path.name
        # The first pages of a database say where everything else is.
        places = rng.integers(len(content), size=FLIPS if content else 0).tolist()
        places += rng.integers(min(len(content), 4096), size=FLIPS if content else 0).tolist()
        for place in places:
            flip(damaged / name, place, int(rng.integers(8)))
            try:
                if not same(answers(damaged, queries), expected):
                    found += 1
                    assert not check_index(damaged).ok, f"{name} {place}"
            except InputError as error:
                messages.append(str(error))
            shutil.rmtree(damaged)
            shutil.copytree(original, damaged)
    assert len(messages) > 5
    print(len(messages), "refused,", found, "found by a check")
    for message in messages:
        assert "\n" not in message
        assert "listwise index check" in message


def test_a_value_of_another_type_is_damage(damaged):
    database = damaged / "entries-0.sqlite"
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE entries SET path = CAST(path AS BLOB) WHERE position = 7")
        connection.execute("UPDATE thumbnail SET content = CAST(content AS TEXT)")  # the same bytes
    with open_store(damaged) as store, pytest.raises(InputError, match="1 entry do not match"):
        list(store)
    assert len(check_index(damaged).damaged) == 1
    assert len(check_index(damaged, repair=True).removed) == 1
    assert check_index(damaged).ok


@pytest.mark.parametrize("kind", ["index", "attributes", "codes", "descriptors"])
def test_damaged_files_are_restored(damaged, model, queries, expected, kind):
    """What follows from the rest of an index is made again."""
    database = damaged / "entries-0.sqlite"
    if kind == "attributes":
        with contextlib.closing(sqlite3.connect(database)) as connection, connection:
            connection.execute("DELETE FROM attributes")
    elif kind == "index":
        path, place = place_of(damaged, expected[0][7].digest.encode(), index=True)
        flip(path, place + 5)
    elif kind == "codes":
        flip(min(damaged.glob("codes-*")), 999)
    else:
        path = min(damaged.glob("descriptors-*"))
        path.write_bytes(path.read_bytes()[:5000])
    found = check_index(damaged)
    assert found.damaged
    assert not found.ok
    repaired = check_index(damaged, model, repair=True)
    assert repaired.ok
    assert set(found.damaged) <= set(repaired.repaired)
    assert same(answers(damaged, queries), expected)
    assert check_index(damaged).damaged == []


def test_what_cannot_be_repaired_says_so(damaged):
    database = damaged / "entries-0.sqlite"
    content = bytearray(database.read_bytes())
    content[4096:] = bytes(len(content) - 4096)
    database.write_bytes(content)
    assert check_index(damaged).damaged == ["entries-0.sqlite"]
    with pytest.raises(DamagedIndexError, match="restore a backup of it, or build the index again"):
        check_index(damaged, repair=True)


def test_damaged_entries_are_named_and_encoded_again(damaged, model, queries, expected):
    row, picture = (live(expected)[number] for number in (7, 4))
    path, place = place_of(damaged, expected[4][row].tobytes())
    flip(path, place + 43, bit=6)  # an exponent: the number becomes very large or very small
    path, place = place_of(damaged, expected[1][picture])
    flip(path, place + 200)
    one, other = expected[0][row], expected[0][picture]
    with open_store(damaged) as store:
        with pytest.raises(DamagedIndexError, match=rf"of 1 entry do not match \({one.id}\);"):
            store.vectors([one.key])
        with pytest.raises(DamagedIndexError, match="do not match"):
            store.search(expected[4][row][None], 5)
        with pytest.raises(DamagedIndexError, match="thumbnail"):
            store.thumbnail(other.key)
        result = Index(store, model).check(photos=True, repair=True)
        assert result.ok
        assert set(result.damaged) == set(result.repaired) == {one.id, other.id}
        assert (result.entries, result.changed) == (len(expected[0]), [])
    assert same(answers(damaged, queries), expected)


def test_an_entry_with_damaged_values_is_removed(damaged, model, photos, expected):
    entry = expected[0][live(expected)[9]]
    path, place = place_of(damaged, entry.digest.encode())
    flip(path, place + 5)
    with open_store(damaged) as store:
        with pytest.raises(DamagedIndexError, match=entry.id):
            store.get([entry.key])
        result = Index(store, model).check(repair=True)
        assert result.ok
        (name,) = result.removed
        assert entry.path in name
        assert len(store) == len(expected[0]) - 1
        add_photos(store, model, read_images(photos), workers=0)
        assert {one.id for one in expected[0]} <= {one.id for one in store}


def test_an_entry_whose_photo_is_gone_is_listed(damaged, model, queries, expected):
    with open_store(damaged) as store:
        lost = Entry("gone", "/no/such.jpg", 4, 4, digest="d")
        store.put(NewEntries([lost], np.eye(1, store.header.dim, dtype=np.float32), [b""]))
        result = Index(store, model).check()
        assert (result.missing, result.ok) == (["gone"], True)
    path, place = place_of(damaged, np.eye(1, model.dim, dtype=np.float32).tobytes())
    flip(path, place + 9)
    with open_store(damaged) as store:
        result = Index(store, model).check(repair=True)
        assert (result.lost, result.repaired, result.ok) == (["gone"], [], False)
        Index(store, model).remove("gone")
    assert same(answers(damaged, queries), expected)
