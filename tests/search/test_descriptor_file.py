"""A copy of the descriptors, from which large indexes are opened and searched."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

from listwise.search.entries import Entry, NewEntries, entry_key
from listwise.search.folder import search_cache
from listwise.search.folder import store as folder_store
from listwise.search.folder.descriptor_file import DescriptorFile, DescriptorWriter
from listwise.search.folder.store import FolderStore
from listwise.search.folder.table import EntryTable, Rows
from listwise.search.opening import create_store, open_store
from listwise.search.store import IndexHeader, SearchIntent

DIM = 16
COUNT = 600
EXACT = SearchIntent(recall=1.0)
LITTLE = SearchIntent(memory=10_000)  # bytes: less than the descriptors take


def unit(seed: int, count: int) -> np.ndarray:
    rows = np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def entries(names: range, rows: np.ndarray) -> NewEntries:
    return NewEntries([Entry(f"n{i}", "", 4, 3) for i in names], rows, [b""] * len(rows))


QUERIES = unit(1, 5)


@pytest.fixture(autouse=True)
def always_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_store, "_COPIED", 0)


@pytest.fixture(scope="module", params=[EXACT, LITTLE], ids=["exact", "compressed"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index with a copy of its descriptors; leave it as it is."""
    folder = tmp_path_factory.mktemp("made") / "index"
    header = IndexHeader(model="m" * 64, model_folder="m", whitened=False, dim=DIM)
    with pytest.MonkeyPatch.context() as patch, create_store(folder, header) as index:
        patch.setattr(folder_store, "_COPIED", 0)
        index.put(entries(range(COUNT), unit(0, COUNT)))
        index.tune(request.param)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """The same, to be written to."""
    return Path(shutil.copytree(made, tmp_path / "index"))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The numbers of descriptors that are read from the table; None for all."""
    counts: list[int | None] = []
    real = EntryTable.rows

    def rows(self, keys=None):
        counts.append(None if keys is None else len(keys))
        return real(self, keys)

    monkeypatch.setattr(EntryTable, "rows", rows)
    return counts


def copy_of(folder: Path) -> Path:
    [path] = folder.glob("search-*.f32")
    return path


def check(folder: Path, expected: dict[str, np.ndarray]) -> None:
    """Each entry is found by its own descriptor, with the right scores."""
    names, rows = list(expected), np.stack(list(expected.values()))
    with open_store(folder) as index:
        scores, keys = index.search(rows, 1)
        assert keys[:, 0].tolist() == [entry_key(name) for name in names]
        np.testing.assert_allclose(scores[:, 0], 1, atol=1e-5)
        scores, keys = index.search(QUERIES, 5)
        by_key = {entry_key(name): row for name, row in expected.items()}
        for query, row_scores, row_keys in zip(QUERIES, scores, keys.tolist(), strict=True):
            assert row_scores == pytest.approx([float(by_key[key] @ query) for key in row_keys])
        vectors = index.vectors(keys[0])
        np.testing.assert_array_equal(vectors, [by_key[key] for key in keys[0].tolist()])


def test_an_opened_index_reads_the_copy_alone(folder: Path, asked: list[int | None]) -> None:
    check(folder, {f"n{i}": row for i, row in enumerate(unit(0, COUNT))})
    assert set(asked) <= {0}


def test_changes_since_the_copy_are_searched(folder: Path, asked: list[int | None]) -> None:
    expected = {f"n{i}": row for i, row in enumerate(unit(0, COUNT))}
    before = copy_of(folder).read_bytes()
    for opened_before in (True, False):
        first = 10 if opened_before else 20
        with open_store(folder) as index:
            if opened_before:
                index.search(QUERIES, 1)
            new = unit(first, 4)
            index.put(entries(range(first, first + 2), new[:2]))
            index.put(entries(range(COUNT + first, COUNT + first + 2), new[2:]))
            index.remove([entry_key(f"n{first + 5}")])
        names = [first, first + 1, COUNT + first, COUNT + first + 1]
        expected |= {f"n{name}": row for name, row in zip(names, new, strict=True)}
        del expected[f"n{first + 5}"]
        asked.clear()
        check(folder, expected)
        assert None not in asked  # never all
    assert copy_of(folder).read_bytes() == before


def test_a_row_that_is_twice_in_a_copy_is_searched_once(tmp_path: Path) -> None:
    """A row that changes while a compressed search is built may be read twice."""
    header = IndexHeader(model="m" * 64, model_folder="m", whitened=False, dim=DIM)
    rows = unit(0, COUNT)
    with create_store(tmp_path / "index", header) as index:
        index.put(entries(range(COUNT), rows))
        index.tune(LITTLE)
        state = search_cache.read_state(tmp_path / "index")
        assert state is not None
        assert state.descriptors is not None
        copy = DescriptorFile.open(tmp_path / "index", state.descriptors)
        assert copy is not None
        writer = DescriptorWriter(tmp_path / "index", DIM)
        for part in (slice(0, 9), slice(0, COUNT)):
            stamps = copy.stamps[part] - (part.stop == 9)
            writer.add(Rows(copy.keys[part], stamps, copy.rows[part]))
        twice = state.model_copy(update={"descriptors": writer.save()})
        search_cache.save_state(tmp_path / "index", twice)
    with open_store(tmp_path / "index") as index:
        index.tune(EXACT)
        _, keys = index.search(rows[:1], COUNT)
        assert len(set(keys[0].tolist())) == keys.shape[1] == COUNT


def test_a_copy_is_written_again_after_many_changes(folder: Path) -> None:
    before = copy_of(folder)
    new = unit(2, COUNT // 2)
    with open_store(folder) as index:
        index.put(entries(range(COUNT, COUNT + len(new)), new))
        index.tune(search_cache.read_state(folder).intent)  # type: ignore[union-attr]
    assert copy_of(folder) != before
    rows = np.concatenate([unit(0, COUNT), new])
    check(folder, {f"n{i}": row for i, row in enumerate(rows)})


def test_another_search_method_uses_the_same_copy(folder: Path) -> None:
    before = copy_of(folder)
    with open_store(folder) as index:
        for intent in (LITTLE, EXACT, LITTLE):
            index.tune(intent)
            assert copy_of(folder) == before
    check(folder, {f"n{i}": row for i, row in enumerate(unit(0, COUNT))})
    before.write_bytes(bytes(before.stat().st_size))  # damaged
    with open_store(folder) as index:
        index.tune(LITTLE.model_copy(update={"recall": 0.9}))
    assert copy_of(folder) != before
    check(folder, {f"n{i}": row for i, row in enumerate(unit(0, COUNT))})


def test_a_damaged_copy_is_not_used(folder: Path) -> None:
    path = copy_of(folder)
    content = bytearray(path.read_bytes())
    content[4 * DIM * 7 + 2] ^= 64
    path.write_bytes(content)
    expected = {f"n{i}": row for i, row in enumerate(unit(0, COUNT))}
    check(folder, expected)
    if path.exists():  # an exact search has written a new one
        assert path.name in FolderStore.damaged_files(str(folder))
        assert path.name in FolderStore.repair_files(str(folder))
        check(folder, expected)
    assert FolderStore.damaged_files(str(folder)) == []


@pytest.mark.parametrize("left", [0, 100])
def test_a_copy_that_is_cut_or_missing_is_not_used(folder: Path, left: int) -> None:
    path = copy_of(folder)
    path.write_bytes(path.read_bytes()[:left]) if left else path.unlink()
    check(folder, {f"n{i}": row for i, row in enumerate(unit(0, COUNT))})


def test_a_full_disk_leaves_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full:
        def write(self, content: object) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            pass

    real = DescriptorWriter.__init__

    def start(self, *arguments):
        real(self, *arguments)
        self._file.close()
        self._file = Full()

    monkeypatch.setattr(DescriptorWriter, "__init__", start)
    header = IndexHeader(model="m" * 64, model_folder="m", whitened=False, dim=DIM)
    rows = unit(0, COUNT)
    for intent in (EXACT, LITTLE):
        folder = tmp_path / f"index{intent.recall}"
        with create_store(folder, header) as index, caplog.at_level(logging.WARNING):
            index.put(entries(range(COUNT), rows))
            assert index.tune(intent).recall > 0.9
        assert "No space left" in caplog.text
        assert not list(folder.glob("search-*.f32*"))
        check(folder, {f"n{i}": row for i, row in enumerate(rows)})


def test_the_state_of_an_earlier_version_is_read(folder: Path) -> None:
    """It has no field for a copy, and a checksum without it."""
    state = search_cache.read_state(folder)
    assert state is not None
    search_cache.save_state(folder, state.model_copy(update={"descriptors": None}))
    path = folder / "search.json"
    content = json.loads(path.read_text())
    del content["descriptors"]
    path.write_text(json.dumps(content))
    assert search_cache.read_state(folder) is not None
    check(folder, {f"n{i}": row for i, row in enumerate(unit(0, COUNT))})


def test_the_file_keeps_what_was_written(tmp_path: Path, folder: Path) -> None:
    state = search_cache.read_state(folder)
    assert state is not None
    assert state.descriptors is not None
    copy = DescriptorFile.open(folder, state.descriptors)
    assert copy is not None
    assert copy.sound()
    before = copy_of(folder).read_bytes()
    copy.rows[3] = 0
    assert not copy.sound()
    assert copy_of(folder).read_bytes() == before
