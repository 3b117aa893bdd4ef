"""Damage to the files of an index is refused or harmless, and check and repair undo it."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from listwise.data import read_images
from listwise.errors import InputError
from listwise.search import DamagedIndexError, Index, SearchIntent, check_index, open_store
from listwise.search.checksums import descriptor_sums, sound_descriptors
from listwise.search.entries import Entry, NewEntries
from listwise.search.filling import add_photos
from listwise.search.folder import guards
from listwise.search.folder import table as entry_table
from listwise.search.opening import create_store, header_of

SOAK = bool(os.environ.get("LISTWISE_SOAK"))
FLIPS = 8 if SOAK else 2  # in each data file


@pytest.fixture(scope="module")
def original(filled, tmp_path_factory):
    """An index with removed and replaced entries and a compressed search; leave it as it is."""
    folder = tmp_path_factory.mktemp("original") / "index"
    shutil.copytree(filled, folder)
    with pytest.MonkeyPatch.context() as patch, open_store(folder) as store:
        patch.setattr(guards, "_TAIL", 4096)  # a small file would be protected as a whole
        first, second, *_ = store
        changed = Entry(second.id, second.path, 1, 2, digest=second.digest, attributes={"a": "b"})
        rows = store.vectors([second.key])
        store.put(NewEntries([changed], rows, [store.thumbnail(second.key) or b""]))
        store.remove([first.key])
        shutil.rmtree(folder / "guards")
        guards.update(folder)
        store.tune(SearchIntent(memory=1, recall=1.0))
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
        assert store.get(keys) == dict(zip(keys, entries, strict=True))
        assert len(store) == len(entries)
        assert len(store.with_digests([entry.digest for entry in entries])) == len(entries)
        thumbnails = [store.thumbnail(key) for key in keys]
        return entries, thumbnails, found.tolist(), scores, store.vectors(keys)


def same(one, two):
    exact = all(a == b for a, b in zip(one[:3], two[:3], strict=True))
    close = (np.allclose(a, b, atol=1e-5) for a, b in zip(one[3:], two[3:], strict=True))
    return exact and all(close)


def flip(path, place, bit=3):
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def place_of(folder, content):
    """The data file that holds these bytes, and where."""
    for path in sorted((folder / "entries.lance" / "data").iterdir()):
        place = path.read_bytes().find(content)
        if place >= 0:
            return path, place
    raise AssertionError("not stored as it is")


def live(expected):
    """Numbers of the entries that were written once: no removed row holds the same bytes."""
    return [number for number, one in enumerate(expected[0]) if "a" not in one.attributes]


@pytest.fixture(scope="module")
def queries(original):
    with open_store(original) as store:
        return store.vectors([entry.key for entry in store.page(3, 2)])


@pytest.fixture(scope="module")
def expected(original, queries):
    """What the index answers before it is damaged."""
    return answers(original, queries)


@pytest.mark.slow
def test_a_flipped_bit_is_refused_or_changes_nothing(damaged, original, queries, expected):
    rng = np.random.default_rng(0)
    files = [path for path in sorted(original.rglob("*")) if path.is_file()]
    if not SOAK:  # the first and the last of each folder
        folders = {
            path.parent: [each for each in files if each.parent == path.parent] for path in files
        }
        files = [path for few in folders.values() for path in dict.fromkeys((few[0], few[-1]))]
    messages, kinds = [], set()
    for path in files:
        name = path.relative_to(original)
        content = path.read_bytes()
        for _ in range(FLIPS if path.parent.name == "data" else 1 if content else 0):
            flip(damaged / name, rng.integers(len(content)), int(rng.integers(8)))
            try:
                assert same(answers(damaged, queries), expected), name
            except InputError as error:
                messages.append(str(error))
                kinds.add(name.parts[min(1, len(name.parts) - 1)])
            shutil.rmtree(damaged)
            shutil.copytree(original, damaged)
    assert len(messages) > 5
    assert kinds >= {"index.json", "_versions", "_deletions", "_indices", "data"}
    for message in messages:
        assert "\n" not in message
        assert ".rs" not in message
        assert "listwise index check" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [
        ("index.json", "search-*.codes.faiss"),
        (
            "search.json",
            "entries.lance/_deletions/*",
            "entries.lance/_indices/*/page_data.lance",
            "entries.lance/data/*",
        ),
        ("guards/*manifest*",),
    ],
    ids=["header and codes", "search and table", "guards"],
)
def test_damaged_files_are_restored(damaged, queries, expected, kinds):
    paths = [min(damaged.glob(kind)) for kind in kinds]
    for path in paths:
        flip(path, path.stat().st_size - 60)
    found = check_index(damaged)
    assert {str(path.relative_to(damaged)) for path in paths} <= set(found.files)
    assert not found.ok
    repaired = check_index(damaged, repair=True)
    assert repaired.ok
    assert repaired.repaired == found.files
    assert repaired.entries == len(expected[0])
    assert same(answers(damaged, queries), expected)
    assert check_index(damaged).damaged == 0


def test_the_manifest_is_restored(damaged, queries, expected):
    manifest = min((damaged / "entries.lance" / "_versions").glob("*.manifest"))
    manifest.write_bytes(b"")
    with pytest.raises(DamagedIndexError, match="changed after it was written"):
        open_store(damaged)
    assert check_index(damaged, repair=True).ok
    assert same(answers(damaged, queries), expected)


def test_a_damaged_descriptor_is_named_and_computed_again(damaged, model, queries, expected):
    number = live(expected)[7]
    entry, row = expected[0][number], expected[4][number]
    path, place = place_of(damaged, row.tobytes())
    flip(path, place + 43, bit=6)  # an exponent: the number becomes very large or very small
    with open_store(damaged) as store:
        with pytest.raises(
            DamagedIndexError, match=rf"checksums of 1 entry do not match \({entry.id}\);"
        ):
            store.vectors([entry.key])
        with pytest.raises(DamagedIndexError, match="do not match"):
            store.search(row[None], 5)
        result = Index(store, model).check(photos=True, repair=True)
        assert result.ok
        assert result.descriptors == result.repaired == [entry.id]
        assert result.entries == len(expected[0])
        assert not result.changed
    assert same(answers(damaged, queries), expected)


def test_thumbnails_and_values(damaged, model, photos, queries, expected):
    first, second = live(expected)[4], live(expected)[9]
    picture, text = expected[0][first], expected[0][second]
    flip(*_shifted(place_of(damaged, expected[1][first]), 200))
    flip(*_shifted(place_of(damaged, text.digest.encode()), 5))
    with open_store(damaged) as store:
        with pytest.raises(DamagedIndexError, match="thumbnail"):
            store.thumbnail(picture.key)
        with pytest.raises(DamagedIndexError, match=text.id):
            store.get([text.key])
        index = Index(store, model)
        result = index.check()
        assert (result.thumbnails, result.descriptors) == ([picture.id], [])
        assert len(result.values) == 1
        assert text.path in result.values[0]
        result = index.check(repair=True)
        assert result.ok
        assert (result.repaired, result.removed) == ([picture.id], result.values)
        assert len(store) == len(expected[0]) - 1
        add_photos(store, model, read_images(photos), workers=0)
        index.remove(expected_missing(expected, store))
    assert {entry.id for entry in answers(damaged, queries)[0]} == {one.id for one in expected[0]}


def _shifted(found, more):
    return found[0], found[1] + more


def expected_missing(expected, store):
    return [entry.id for entry in store if entry.id not in {one.id for one in expected[0]}]


def test_an_entry_whose_photo_is_gone_is_listed(damaged, model, queries, expected):
    with open_store(damaged) as store:
        lost = Entry("gone", "/no/such.jpg", 4, 4, digest="d")
        store.put(NewEntries([lost], np.eye(1, store.header.dim, dtype=np.float32), [b""]))
        index = Index(store, model)
        result = index.check()
        assert (result.missing, result.ok) == (["gone"], True)
    path, place = place_of(damaged, np.eye(1, model.dim, dtype=np.float32).tobytes())
    shutil.rmtree(damaged / "guards")  # it holds a copy of this small file
    flip(path, place + 9)
    with open_store(damaged) as store:
        result = Index(store, model).check(repair=True)
        assert (result.lost, result.repaired, result.ok) == (["gone"], [], False)
        Index(store, model).remove("gone")
    assert same(answers(damaged, queries), expected)


def test_an_index_without_checksums(tmp_path, model, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(entry_table, "SUMS", ())
        store = create_store(tmp_path / "index", header_of(model))
    shutil.rmtree(tmp_path / "index" / "guards")
    rows = np.random.default_rng(0).normal(size=(30, model.dim)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    entries = [Entry(f"{number}", "", 4, 4) for number in range(30)]
    store.put(NewEntries(entries, rows, [b"jpeg"] * 30))
    keys = [entry.key for entry in entries]
    np.testing.assert_array_equal(store.vectors(keys), rows)
    result = Index(store, model).check()
    assert (result.entries, result.unverified, result.ok) == (30, 30, True)
    assert Index(store, model).check(repair=True).ok
    assert Index(store, model).check().unverified == 0
    with open_store(tmp_path / "index") as store:
        np.testing.assert_array_equal(store.vectors(keys), rows)
        assert store.search(rows[:1], 1)[1] == keys[0]
        store.put(NewEntries(entries[:1], rows[1:2], [b""]))
        assert Index(store, model).check().unverified == 0


@pytest.mark.parametrize("dim", [1, 3, 64])
def test_every_flipped_bit_changes_the_checksum(dim):
    rng = np.random.default_rng(dim)
    keys = rng.integers(0, 2**63 - 1, 3)
    rows = rng.normal(size=(3, dim)).astype(np.float32)
    sums = descriptor_sums(keys, rows)
    for place in range(4 * dim):
        for bit in range(8):
            changed = rows.copy()
            changed.view(np.uint8)[1, place] ^= 1 << bit
            assert sound_descriptors(keys, changed, sums).tolist() == [True, False, True]
    assert not sound_descriptors(keys[::-1], rows, sums)[0]


def test_without_a_checksum_a_descriptor_has_to_be_a_unit_vector():
    rows = np.array([[1, 0], [0.6, 0.8], [2, 0], [np.nan, 0], [1e37, 0], [0, 0]], np.float32)
    sound = sound_descriptors(np.arange(6), rows, None)
    assert sound.tolist() == [True, True, False, False, False, True]


def test_errors_of_lancedb_name_none_of_its_source_files(tmp_path: Path, model):
    with create_store(tmp_path / "index", header_of(model)) as store:
        row = np.eye(1, model.dim, dtype=np.float32)
        store.put(NewEntries([Entry("a", "", 1, 1)], row, [b""]))
        shutil.rmtree(tmp_path / "index" / "entries.lance" / "data")
    with (
        pytest.raises(InputError, match="cannot be used") as caught,
        open_store(store.uri) as again,
    ):
        again.vectors([Entry("a", "", 1, 1).key])
    assert ".rs" not in str(caught.value)
    assert "\n" not in str(caught.value)
