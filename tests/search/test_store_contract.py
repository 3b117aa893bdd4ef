"""What every index does, whichever engine holds it."""

import contextlib
import dataclasses
import json

import numpy as np
import pytest

from listwise.errors import InputError
from listwise.search import DamagedIndexError, alpha_query_expansion, exact_search
from listwise.search import entries as entries_module
from listwise.search.entries import Entry, NewEntries
from listwise.search.methods import SearchIntent
from listwise.search.opening import create_store, open_store, store_exists
from listwise.search.store import IndexHeader

DIM = 16
HEADER = IndexHeader(model="f" * 64, model_folder="/models/m", whitened=True, dim=DIM)
JPEG = b"\xff\xd8\xff\xe0 not \x00 text \xff\xd9"


@pytest.fixture(scope="module", params=["embedded", "lite", "server"])
def new_place(request):
    """Gives the names of places where there is no index yet."""
    return request.getfixturevalue(f"{request.param}_places")


@pytest.fixture(scope="module")
def shared(new_place):
    with create_store(new_place(), HEADER) as index:
        yield index


@pytest.fixture
def index(shared):
    """An empty index: one for all tests of an engine, since a server needs seconds for one."""
    shared.remove([entry.key for entry in shared])
    return shared


def vectors(count, seed=0, dim=DIM):
    rows = np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def entry(name, **values):
    values = {"width": 64, "height": 48, "digest": f"digest of {name}"} | values
    return Entry(name, values.pop("path", f"/photos/{name}"), **values)


def fill(index, count, seed=0):
    """Put entries into an index: the entries and their descriptors."""
    entries = [entry(f"photo {number}.jpg") for number in range(count)]
    rows = vectors(count, seed)
    index.put(NewEntries(entries, rows, [b""] * count))
    return entries, rows


def found_ids(index, query, k):
    _, keys = index.search(query[None], k)
    return [index.get([int(key)])[int(key)].id for key in keys[0]]


def test_an_index_exists_once_it_is_created_and_keeps_what_was_put(new_place):
    place = new_place()
    assert not store_exists(place)
    with pytest.raises(InputError, match="no index at"):
        open_store(place)
    with create_store(place, HEADER) as made:
        assert made.header == HEADER
        assert store_exists(place)
        with pytest.raises(InputError, match="already"):
            create_store(place, HEADER)
        entries, rows = fill(made, 50)
        made.remove([entries[0].key])
    with open_store(place) as opened:
        assert opened.header == HEADER
        assert len(opened) == 49
        assert opened.get([one.key for one in entries]) == {one.key: one for one in entries[1:]}
        np.testing.assert_array_equal(opened.vectors([entries[7].key]), rows[7:8])
        assert found_ids(opened, rows[7], 1) == [entries[7].id]
        assert entries[0].id not in found_ids(opened, rows[0], 10)


def test_an_empty_index_and_empty_requests(index):
    index.put(NewEntries([], np.zeros((0, DIM), np.float32), []))
    assert len(index) == 0
    assert list(index) == []
    assert list(index.entries(count=10)) == []
    assert index.with_digests(["a", ""]) == {}
    for unknown in (1, -1, 2**63, 10**30):
        assert index.get([unknown]) == {}
        assert index.thumbnail(unknown) is None
        assert index.remove([unknown]) == 0
    scores, keys = index.search(vectors(3), 5)
    assert scores.shape == keys.shape == (3, 0)
    assert index.method.tune(SearchIntent()).recall == 1
    fill(index, 3)
    assert index.remove([]) == 0
    assert index.get([]) == index.with_digests([]) == {}
    assert index.vectors([]).shape == (0, DIM)
    scores, keys = index.search(np.zeros((0, DIM), np.float32), 2)
    assert scores.shape == keys.shape == (0, 2)


def test_search_is_exact_search(index):
    entries, rows = fill(index, 500)
    queries = vectors(20, seed=1).astype(np.float64)
    for k in (10, 600):
        scores, keys = index.search(queries, k)
        wanted, places = exact_search(queries, rows, k)
        assert scores.dtype == np.float32
        assert keys.dtype == np.int64
        assert scores.shape == (20, min(k, 500))
        np.testing.assert_allclose(scores, wanted, atol=1e-5)
        np.testing.assert_array_equal(keys, np.array([one.key for one in entries])[places])


def test_what_is_put_is_found_at_once_and_what_is_removed_never_again(index):
    entries, rows = fill(index, 30)
    for number in range(4):
        one = entry(f"new {number}")
        index.put(NewEntries([one], rows[number : number + 1], [b""]))
        assert one.id in found_ids(index, rows[number], 2)
        assert len(index) == 31
        assert index.remove([one.key]) == 1
        assert one.id not in found_ids(index, rows[number], 30)
        assert index.get([one.key]) == {}
        assert len(index) == 30
    assert index.remove([entries[0].key, entries[1].key, entry("never").key]) == 2
    assert index.remove([entries[0].key, entries[1].key]) == 0
    assert {one.id for one in index} == {one.id for one in entries[2:]}


def test_putting_an_id_again_replaces_its_entry(index):
    entries, rows = fill(index, 20)
    fill(index, 20)
    assert sorted(one.id for one in index) == sorted(one.id for one in entries)
    changed = dataclasses.replace(
        entries[3], path="/moved.jpg", digest="other", box=(1.0, 2.5, 30.0, 40.0)
    )
    other = vectors(1, seed=5).astype(np.float64)
    # The last of the entries that share an id counts.
    index.put(NewEntries([entries[3], changed], np.vstack([rows[3:4], other]), [b"", JPEG]))
    assert len(index) == 20
    assert index.get([changed.key]) == {changed.key: changed}
    assert index.thumbnail(changed.key) == JPEG
    assert index.with_digests([entries[3].digest, "other"]) == {"other": changed}
    np.testing.assert_array_equal(index.vectors([changed.key]), other.astype(np.float32))
    assert found_ids(index, other[0], 1) == [changed.id]
    scores, keys = index.search(rows[3:4], 20)
    assert (keys == changed.key).sum() == 1
    assert scores[keys == changed.key] == pytest.approx([other[0] @ rows[3]], abs=1e-5)


def test_any_text_comes_back_as_it_was(index):
    names = [
        'it\'s "quoted" \\ back\\slash.jpg',
        "Ünïcode/日本語 🙂.jpg",
        "  spaces  and\ttab\nand line ",
        "key in [1]; --",
        "%like_",
    ]
    entries = [
        entry(
            name,
            digest=f"digest {name}",
            box=(0.5, 1.0, 20.25, 30.0),
            attributes={name: name, "": "", "artist": "Élise O'Brien", "json": '{"a": [1]}'},
        )
        for name in names
    ]
    index.put(NewEntries([*entries, entry("other")], vectors(6), [*[JPEG] * 5, b""]))
    for one in entries:
        assert index.get([one.key]) == {one.key: one}
        assert index.with_digests([one.digest]) == {one.digest: one}
    left = {one.id: one for one in index}
    assert left == {one.id: one for one in [*entries, entry("other")]}
    for one in entries:
        assert index.remove([one.key]) == 1
        del left[one.id]
        assert {other.id for other in index} == left.keys()


def test_thumbnails_are_bytes(index):
    every = bytes(range(256)) * 170  # 43 KB
    entries = [entry("none"), entry("small"), entry("all bytes")]
    index.put(NewEntries(entries, vectors(3), [b"", JPEG, every]))
    assert index.thumbnail(entries[0].key) is None
    assert index.thumbnail(entries[1].key) == JPEG
    assert index.thumbnail(entries[2].key) == every
    assert index.thumbnail(entry("unknown").key) is None


def test_vectors_come_in_the_order_of_their_keys(index):
    entries, rows = fill(index, 40)
    order = [5, 3, 5, 39, 0]
    got = index.vectors(np.array([entries[place].key for place in order]))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, rows[order])
    with pytest.raises(InputError, match="no entry"):
        index.vectors([entry("unknown").key])


def test_query_expansion_through_the_index_is_that_of_its_descriptors(index):
    _, rows = fill(index, 200)
    queries = vectors(6, seed=3)
    np.testing.assert_allclose(
        alpha_query_expansion(queries, index), alpha_query_expansion(queries, rows), atol=1e-5
    )


def test_pages_are_parts_of_one_order(index):
    entries, _ = fill(index, 95)
    pages = [list(index.entries(None, start, 20)) for start in range(0, 120, 20)]
    assert [len(page) for page in pages] == [20, 20, 20, 20, 15, 0]
    walked = [one for page in pages for one in page]
    assert sorted(one.id for one in walked) == sorted(one.id for one in entries)
    assert list(index.entries(start=37, count=5)) == walked[37:42]
    assert list(index) == walked
    index.remove([walked[0].key])
    assert {one.id for one in index} == {one.id for one in walked[1:]}


def test_more_entries_than_one_request_names(index):
    entries, rows = fill(index, 1100)
    assert len(index) == 1100
    assert sorted(one.id for one in index) == sorted(one.id for one in entries)
    keys = [one.key for one in entries]
    assert index.get(keys) == dict(zip(keys, entries, strict=True))
    assert len(index.with_digests([one.digest for one in entries])) == 1100
    np.testing.assert_array_equal(index.vectors(keys), rows)
    # What was written is sound when it is examined.
    index.put(NewEntries([entry("with picture")], vectors(1, seed=9), [JPEG]))
    index.put(NewEntries(entries[:3], rows[3:6], [JPEG, b"", JPEG]))
    found = [one for part in index.examine() for one in part]
    assert len(found) == len(index) == 1101
    assert all(one.sound for one in found)
    assert {one.name for one in found} == {one.id for one in index}
    assert entries[7] in [one.entry for one in found]
    assert index.generations.check_files(index.uri) == []
    gone = next(one for one in found if one.name == entries[1].id)
    index.discard([gone.place])
    assert {one.id for one in index} == {one.name for one in found} - {gone.name}
    assert index.remove(keys[2:]) == 1098
    assert {one.id for one in index} == {entries[0].id, "with picture"}


def test_descriptors_that_do_not_fit_are_refused(index):
    fill(index, 3)
    for rows, reason in [
        (vectors(1, dim=DIM + 1), "need descriptors"),
        (vectors(2), "need descriptors"),
        (np.full((1, DIM), np.nan, np.float32), "not finite"),
        (np.full((1, DIM), np.inf, np.float32), "not finite"),
    ]:
        with pytest.raises(InputError, match=reason):
            index.put(NewEntries([entry("broken")], rows, [b""]))
    assert len(index) == 3
    with pytest.raises(InputError, match=f"{DIM + 1}"):
        index.search(vectors(1, dim=DIM + 1), 3)
    with pytest.raises(InputError, match="not finite"):
        index.search(np.full((1, DIM), np.nan), 3)
    with pytest.raises(InputError, match="`k` must be 1 or more, not 0"):
        index.search(vectors(1), 0)


def test_two_ids_with_one_key_are_refused(index, monkeypatch):
    monkeypatch.setattr(entries_module, "entry_key", lambda name: len(name))
    index.put(NewEntries([entry("one")], vectors(1), [b""]))
    with pytest.raises(InputError, match="two and one have the same key"):
        index.put(NewEntries([entry("two")], vectors(1), [b""]))
    with pytest.raises(InputError, match="have the same key"):
        index.put(NewEntries([entry("four"), entry("five")], vectors(2), [b"", b""]))
    assert [one.id for one in index] == ["one"]
    index.remove([3])


def test_tuning_is_measured_and_remembered(index):
    fill(index, 300)
    notes = []
    tuned = index.method.tune(SearchIntent(), notes.append)
    assert tuned.recall >= 0.99
    assert tuned.milliseconds > 0
    assert tuned.memory >= 300 * DIM * 4
    assert all("\n" not in note for note in notes)
    info = json.loads(json.dumps(index.info()))
    assert (info["entries"], info["dim"], info["whitened"]) == (300, DIM, True)
    assert (info["method"], info["recall"]) == (tuned.method, tuned.recall)


def test_other_content_than_was_written_is_refused(index, monkeypatch):
    index.change_header(local=True)
    entries, rows = fill(index, 20)
    new = NewEntries(entries, rows, [b""] * 20, [b"local"] * 20)
    wrong = list(entries_module.new_rows(new))
    wrong[4]["descriptor_sum"] ^= 1
    wrong[7]["local_sum"] += 1
    with monkeypatch.context() as patch:
        # As if stored numbers had changed after their checksums were computed.
        for module in ("folder.table", "milvus.rows"):
            patch.setattr(f"listwise.search.{module}.new_rows", lambda new: wrong)
        index.put(new)
    if index.engine == "embedded":
        index.close()  # forgets the descriptors in memory, and reads the table again
    for read, what in (
        (index.vectors, "of 1 entry do not"),
        (lambda keys: index.contents("local", keys), "of the local"),
    ):
        with pytest.raises(DamagedIndexError, match=what) as caught:
            read([one.key for one in entries])
        assert "listwise index check" in str(caught.value)
    broken = [one.entry for part in index.examine() for one in part if not one.sound]
    assert sorted(one.id for one in broken) == sorted([entries[4].id, entries[7].id])
    index.put(NewEntries(entries[4:5], rows[4:5], [b""]))
    np.testing.assert_array_equal(index.vectors([entries[4].key]), rows[4:5])


def test_local_features_belong_to_their_entries(new_place):
    place = new_place()
    codes = [bytes([number]) * 30_000 for number in range(5)]
    with create_store(place, HEADER) as made:
        entries, rows = fill(made, 5)
        assert made.contents("local", [one.key for one in entries]) == {}
        assert made.info()["local"] is None
        made.change_header(local=True)
        assert made.header.local is True
        assert made.local_sizes() == dict.fromkeys([one.key for one in entries], 0)
        new = entry("new")
        made.put(NewEntries([new, entries[0]], rows[:2], [b"", b""], [codes[3], b""]))
        assert made.contents("local", [one.key for one in [new, *entries]]) == {new.key: codes[3]}
        replaced = dataclasses.replace(entries[2], digest="replaced")
        made.put(NewEntries([replaced], rows[2:3], [JPEG]))
        made.remove([entries[4].key])
        made.put_local([*entries[1:3], entries[4]], codes[:3])  # the last two have changed
    with open_store(place) as opened:
        assert opened.header.local is True
        expected = {new.key: codes[3], entries[1].key: codes[0]}
        assert opened.contents("local", [one.key for one in [new, *entries]]) == expected
        assert opened.info()["local"] == {"entries": 2, "bytes": 60_000}
        sizes = {entry.key: 0 for entry in (entries[0], replaced, entries[3])}
        assert opened.local_sizes() == sizes | {new.key: 30_000, entries[1].key: 30_000}
        assert opened.get([entries[1].key]) == {entries[1].key: entries[1]}
        np.testing.assert_array_equal(opened.vectors([entries[1].key]), rows[1:2])
        assert opened.thumbnail(replaced.key) == JPEG
        assert all(one.sound for part in opened.examine() for one in part)
        opened.remove([new.key])
        assert opened.contents("local", [new.key]) == {}
        assert opened.info()["local"] == {"entries": 1, "bytes": 30_000}


def test_two_openings_of_one_index_see_each_other(new_place):
    place = new_place()
    with create_store(place, HEADER) as first, open_store(place) as second:
        entries, rows = fill(first, 10)
        second.refresh()
        assert len(second) == 10
        assert found_ids(second, rows[4], 1) == [entries[4].id]
        second.remove([entries[4].key])
        first.refresh()
        assert len(first) == 9
        assert entries[4].id not in found_ids(first, rows[4], 9)


def test_an_index_of_another_format_is_refused(new_place):
    place = new_place()
    with contextlib.suppress(InputError):  # a store may read what it has just written
        create_store(place, HEADER.model_copy(update={"format_version": 999})).close()
    assert store_exists(place)
    with pytest.raises(InputError, match="999") as caught:
        open_store(place)
    assert "\n" not in str(caught.value)
