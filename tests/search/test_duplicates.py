"""Duplicates: exact copies and near-duplicates, found in blocks."""

import numpy as np
import pytest
from index_examples import texture
from PIL import Image

from listwise.errors import InputError
from listwise.search import Index, duplicates
from listwise.search.duplicates import find_duplicates
from listwise.search.entries import Entry, NewEntries
from listwise.search.opening import create_store, header_of
from listwise.search.store import IndexHeader
from listwise.search.views import draw_duplicates

DIM = 16
HEADER = IndexHeader(model="f" * 64, model_folder="/models/m", whitened=True, dim=DIM)


@pytest.fixture(scope="module", params=["embedded", "lite", "server"])
def store(request):
    with create_store(request.getfixturevalue(f"{request.param}_places")(), HEADER) as made:
        yield made


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def fill(store, rows, digests=None, sizes=None):
    store.remove([entry.key for entry in store])
    digests = digests or [f"d{i}" for i in range(len(rows))]
    sizes = sizes or [(8, 6)] * len(rows)
    entries = [Entry(f"{i}", "", *sizes[i], None, digests[i]) for i in range(len(rows))]
    store.put(NewEntries(entries, unit(rows), [b""] * len(rows)))


def ids(groups):
    return [tuple(entry.id for entry in group.entries) for group in groups]


def test_groups_are_found_across_blocks(store, monkeypatch):
    monkeypatch.setattr(duplicates, "_BLOCK", 7)
    drawn = np.random.default_rng(0)
    rows = drawn.normal(size=(50, DIM))
    for copy, of in ((30, 3), (41, 3), (49, 3), (12, 5)):
        rows[copy] = rows[of] + 0.05 * drawn.normal(size=DIM)
    fill(store, rows, sizes=[(8, 6 + (i == 41)) for i in range(50)])
    steps = []
    groups = find_duplicates(store, 0.95, on_progress=steps.append)
    assert ids(groups) == [("41", "3", "30", "49"), ("12", "5")]  # the largest photo first
    assert sum(steps) == 50
    assert not any(group.exact for group in groups)
    assert all(0.95 <= group.score < 1 for group in groups)
    assert find_duplicates(store, 0.99999) == []

    def stop(count):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        find_duplicates(store, on_progress=stop)
    with pytest.raises(InputError, match="`threshold` must be from -1 to 1"):
        find_duplicates(store, 1.5)


def test_copies_are_groups_whatever_their_descriptors(store):
    rows = np.random.default_rng(1).normal(size=(6, DIM))
    fill(store, rows, digests=["a", "b", "a", "c", "", ""])
    (group,) = find_duplicates(store, 0.999)
    assert (ids([group]), group.exact, group.score) == ([("0", "2")], True, 1.0)


def test_a_group_is_larger_than_the_neighbors_of_one_photo(store):
    rows = np.repeat(np.random.default_rng(2).normal(size=(2, DIM)), 60, axis=0)
    rows += 0.001 * np.random.default_rng(3).normal(size=rows.shape)
    fill(store, rows)
    assert sorted(map(len, ids(find_duplicates(store)))) == [60, 60]


def test_near_duplicates_are_verified_by_geometry(model, tmp_path):
    photo = texture(1)
    photo.save(tmp_path / "a.jpg", quality=95)
    photo.resize((160, 120)).save(tmp_path / "small.jpg", quality=85)
    texture(2).save(tmp_path / "b.jpg")
    Image.new("RGB", (64, 48), "red").save(tmp_path / "plain.jpg")
    with create_store(tmp_path / "index", header_of(model)) as store:
        index = Index(store, model)
        index.add([tmp_path / name for name in ("a.jpg", "small.jpg", "b.jpg", "plain.jpg")])
        # With a low threshold, only geometry tells the photos apart.
        unverified = index.duplicates(threshold=-1, verify=False)
        assert [len(group.entries) for group in unverified] == [4]
        (group,) = index.duplicates(threshold=-1, verify=True, progress=False)
        assert [entry.path.rpartition("/")[2] for entry in group.entries] == ["a.jpg", "small.jpg"]
        assert index.duplicates(threshold=-1) == [group]
        assert draw_duplicates([group]).height > 96
        index.remove(group.entries[1:])
        assert index.duplicates(threshold=-1, verify=True) == []
