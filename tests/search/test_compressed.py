import logging
import os
import shutil
from pathlib import Path

import faiss
import numpy as np
import pytest

from listwise.search import exact_search
from listwise.search.entries import (
    Entry,
    NewEntries,
    damaged_entries,
    descriptor_sums,
    entry_key,
)
from listwise.search.exact import ExactIndex, ExactNeighbors
from listwise.search.folder import method
from listwise.search.folder import table as folder_table
from listwise.search.folder.compressed import compressed_memory, trained_index
from listwise.search.folder.descriptors import Descriptors
from listwise.search.folder.method import SearchState
from listwise.search.folder.store import FolderStore
from listwise.search.methods import SearchIntent, TuningResult
from listwise.search.opening import create_store, open_store
from listwise.search.store import IndexHeader

DIM = 64
LITTLE = SearchIntent(memory=300_000)  # bytes: less than the descriptors take


def clustered(rng: np.random.Generator, count: int) -> np.ndarray:
    centers = np.random.default_rng(7).normal(size=(150, DIM))
    spectrum = np.arange(4, DIM + 4) ** -0.4
    rows = (centers[rng.integers(0, 150, count)] + rng.normal(size=(count, DIM))) * spectrum
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def entries(start: int, rows: np.ndarray) -> NewEntries:
    made = [Entry(f"n{i}", f"/p/n{i}", 4, 3) for i in range(start, start + len(rows))]
    return NewEntries(made, rows, [b""] * len(rows))


def recall(found: np.ndarray, rows: np.ndarray, queries: np.ndarray, k: int) -> float:
    _, places = exact_search(queries, rows, k)
    shares = [
        len({entry_key(f"n{place}") for place in wanted} & set(line)) / k
        for wanted, line in zip(places.tolist(), found.tolist(), strict=True)
    ]
    return float(np.mean(shares))


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    return clustered(np.random.default_rng(0), 2000)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, rows: np.ndarray) -> Path:
    folder = tmp_path_factory.mktemp("made") / "index"
    with create_store(folder, header()) as index:
        index.put(entries(0, rows))
        index.method.tune(LITTLE)
    return folder


@pytest.fixture
def folder(tmp_path: Path, made: Path) -> Path:
    """An index of `rows`, searched compressed."""
    return Path(shutil.copytree(made, tmp_path / "index"))


def saved(folder: Path) -> dict[str, object]:
    """The search method that is saved, and the name of its file."""
    with open_store(folder) as index:
        return index.method.facts() | {
            "bytes": 0,
            "codes": sorted(map(str, folder.glob("codes-*"))),
        }


def header(dim: int = DIM) -> IndexHeader:
    return IndexHeader(model="m" * 64, model_folder="m", whitened=False, dim=dim)


@pytest.mark.slow
def test_recall_is_what_was_measured(tmp_path: Path, rows: np.ndarray) -> None:
    queries = clustered(np.random.default_rng(1), 200)
    notes: list[str] = []
    with create_store(tmp_path / "index", header()) as index:
        index.put(entries(0, rows))
        for wanted in (None, 0.99):
            intent = SearchIntent(memory=300_000, recall=wanted)
            tuned = index.method.tune(intent, notes.append)
            assert tuned.method.startswith("compressed")
            assert tuned.recall >= (wanted or 0.95)
            assert 0 < tuned.memory <= 300_000
            assert tuned.milliseconds > 0
            assert recall(index.search(queries, 10)[1], rows, queries, 10) >= tuned.recall - 0.05
            for k in (1, 10, 40):
                scores, found = index.search(queries, k)
                # What is returned is scored exactly.
                np.testing.assert_allclose(
                    scores[0], index.vectors(found[0]) @ queries[0], atol=1e-5
                )
                assert (np.diff(scores, axis=1) <= 0).all()
            told = index.info()
            assert (told["method"], told["recall"]) == (tuned.method, tuned.recall)
            assert told["intent"]["recall"] == wanted
    assert len(notes) == 1  # that it is compressed, at first
    assert "building a compressed search" in notes[0]


def test_changes_are_searched_at_once_and_after_opening(
    folder: Path, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("the lists were made anew")

    monkeypatch.setattr(method, "trained_index", never)
    reader = open_store(folder)
    queries = clustered(np.random.default_rng(2), 30)
    nearest = reader.search(queries[:1], 1)[1][0, 0]
    with open_store(folder) as index:
        index.search(queries, 1)
        index.put(entries(len(rows), queries[:20]))  # new
        index.put(entries(3, -rows[3:4]))  # changed
        index.remove([int(nearest)])
        check_changed(index, rows, queries, int(nearest))
    reader.refresh()
    check_changed(reader, rows, queries, int(nearest))
    check_changed(open_store(folder), rows, queries, int(nearest))


def check_changed(index: object, rows: np.ndarray, queries: np.ndarray, gone: int) -> None:
    assert isinstance(index, FolderStore)
    scores, found = index.search(queries[:20], 10)
    assert index.method.state.codes
    assert found[:, 0].tolist() == [entry_key(f"n{len(rows) + i}") for i in range(20)]
    np.testing.assert_allclose(scores[:, 0], 1, atol=1e-5)
    assert gone not in found
    scores, found = index.search(-rows[3:4], 1)
    assert found.tolist() == [[entry_key("n3")]]
    assert entry_key("n3") not in index.search(rows[3:4], 20)[1]


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_a_damaged_cache_is_made_anew(
    folder: Path, rows: np.ndarray, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    [codes] = folder.glob("codes-*")
    content = bytearray(codes.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "missing":
        codes.unlink()
    else:
        codes.write_bytes(content)
    queries = clustered(np.random.default_rng(2), 50)
    with caplog.at_level(logging.WARNING), open_store(folder) as index:
        assert recall(index.search(queries, 10)[1], rows, queries, 10) > 0.9
    assert "missing or damaged" in caplog.text
    assert index.info()["intent"] == LITTLE.model_dump()
    assert len(list(folder.glob("codes-*"))) == 1
    caplog.clear()
    open_store(folder).search(queries, 10)
    assert not caplog.records


def test_a_full_disk_is_a_warning(
    folder: Path,
    rows: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("write error: No space left on device")

    monkeypatch.setattr(faiss, "write_index", full)
    with open_store(folder) as index:
        assert index.method.tune(SearchIntent(memory=250_000)).recall > 0.9
        assert index.search(rows[:1], 1)[1].tolist() == [[entry_key("n0")]]
    assert "the search method is not saved" in caplog.text


def test_what_was_chosen_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved(folder)
    with monkeypatch.context() as patch:
        patch.setattr(method, "set_probes", None)  # nothing is measured again
        with open_store(folder) as index:
            tuned = index.method.tune(LITTLE)
    assert saved(folder) == before
    assert before["method"] == tuned.method
    # Another intent is another choice.
    with open_store(folder) as index:
        assert index.method.tune(SearchIntent()).method == "exact"
        assert index.info()["method"] == "exact"
    assert not list(folder.glob("codes-*"))


def test_many_changes_are_saved(folder: Path, rows: np.ndarray) -> None:
    more = clustered(np.random.default_rng(4), 1500)
    with open_store(folder) as index:
        index.put(entries(len(rows), more))
    [before] = folder.glob("codes-*")
    size = before.stat().st_size
    with open_store(folder) as index:
        index.search(more[:1], 1)
    [after] = folder.glob("codes-*")
    assert after != before
    assert after.stat().st_size > 1.5 * size
    queries = clustered(np.random.default_rng(2), 50)
    with open_store(folder) as index:
        every = np.concatenate([rows, more])
        assert recall(index.search(queries, 10)[1], every, queries, 10) > 0.9


def test_a_search_does_not_wait_for_a_writer(folder: Path, rows: np.ndarray) -> None:
    more = clustered(np.random.default_rng(4), 1500)
    with open_store(folder) as index:
        index.put(entries(len(rows), more))
    before = saved(folder)
    with open_store(folder) as writer, writer.generations.pausing(), open_store(folder) as index:
        assert index.search(more[:1], 1)[1].tolist() == [[entry_key(f"n{len(rows)}")]]
    assert saved(folder) == before  # saving is left to another time


def test_it_changes_by_itself_when_opened(
    tmp_path: Path,
    rows: np.ndarray,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with create_store(tmp_path / "index", header()) as index:
        index.put(entries(0, rows))
    monkeypatch.setattr(method, "_SLOWEST", 1)
    monkeypatch.setattr(method, "_EXACT_MILLISECONDS", 1e-6)
    with open_store(tmp_path / "index") as index:
        index.search(rows[:1], 1)
        assert index.info()["method"].startswith("compressed")
    assert "building a compressed search" in caplog.text


def test_exact_where_that_will_do(
    tmp_path: Path, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(method, "machine_memory", lambda: 2**33)
    descriptors = Descriptors(tmp_path / "rows", DIM, damaged_entries)
    (tmp_path / "rows").write_bytes(rows.tobytes())
    keys = np.arange(len(rows))
    descriptors.update(keys, descriptor_sums(keys, rows), keys[:0])

    def exact(spent: float = 99.0, usual: float = 100.0, **limits: float) -> bool:
        monkeypatch.setattr(method, "median_milliseconds", lambda search, queries: spent)
        return method.exact_result(SearchIntent(**limits), descriptors, usual) is not None

    def known(tuned: float, times: int, **limits: float) -> bool:
        result = TuningResult("exact", 1.0, tuned, 1)
        state = SearchState(intent=limits, tuned=result, entries=len(rows) // times)
        return method.exact_is_known_to_do(state, descriptors)

    assert exact()
    assert not exact(101.0)
    assert exact(199.0, 200.0)
    assert exact(299.0, milliseconds=300)
    assert not exact(11.0, milliseconds=10)
    assert exact(900.0, recall=1)
    assert not exact(900.0, recall=1, milliseconds=10)
    assert not exact(memory=2**18)
    assert known(1e9, 1)  # so few are searched fast anywhere
    monkeypatch.setattr(method, "_SLOWEST", 1)
    assert known(99.0, 2)
    assert not known(101.0, 2)
    assert not known(11.0, 1, milliseconds=10)
    monkeypatch.setattr(method, "machine_memory", lambda: 2**19)
    assert not exact()
    assert not known(1.0, 1)


def test_what_cannot_be_met_is_said(tmp_path: Path, rows: np.ndarray) -> None:
    notes: list[str] = []
    with create_store(tmp_path / "index", header()) as index:
        index.put(entries(0, rows[:300]))
        index.method.tune(SearchIntent(memory=100, milliseconds=1e-6, recall=1.0), notes.append)
    assert "bytes of memory instead of 100" in notes[-1]
    assert "ms per query instead of 1e-06" in notes[-1]


@pytest.mark.parametrize("dim", [3, DIM, 100])
def test_any_size_can_be_compressed(dim: int, tmp_path: Path) -> None:
    rows = np.random.default_rng(dim).normal(size=(20, dim)).astype(np.float32)
    for count in (0, 1, 2, 20):
        with create_store(tmp_path / f"index{count}", header(dim)) as index:
            index.put(entries(0, rows[:count]))
            index.method.tune(SearchIntent(memory=1))
            scores, found = index.search(rows[:3], 20)
            wanted, places = exact_search(rows[:3], rows[:count], 20)
            np.testing.assert_allclose(scores, wanted, rtol=1e-5)
            keys = np.array([entry_key(f"n{i}") for i in range(count)], np.int64)
            assert found.tolist() == keys[places].tolist()


def test_codes_follow_descriptors_to_another_file(
    folder: Path, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_table, "_SLACK", 0)
    monkeypatch.setattr(method, "trained_index", None)  # the lists stay
    queries = clustered(np.random.default_rng(2), 50)
    [before] = folder.glob("descriptors-*")
    with open_store(folder) as index, open_store(folder) as reader:
        reader.search(queries, 10)
        index.remove([entry_key(f"n{i}") for i in range(len(rows)) if i % 4])
        left = {entry_key(f"n{i}"): rows[i] for i in range(0, len(rows), 4)}
        for each in (index, reader):
            scores, found = each.search(queries, 10)
            for query, line, keys in zip(queries, scores, found.tolist(), strict=True):
                np.testing.assert_allclose(line, [left[key] @ query for key in keys], atol=1e-5)
            assert index.info()["method"].startswith("compressed")
    assert not before.exists()


def test_the_truth_is_exact_search_without_oneself(rows: np.ndarray) -> None:
    chosen = np.array([5, 77, 1000])
    truth = ExactNeighbors(chosen, rows[chosen], ExactIndex(rows).search)
    _, places = exact_search(rows[chosen], rows, 11)
    expected = [
        [place for place in line if place != own]
        for line, own in zip(places.tolist(), chosen, strict=True)
    ]
    assert truth.keys.tolist() == expected
    assert truth.recall(truth.keys) == 1
    assert truth.recall(truth.keys[:, :4]) == pytest.approx(0.4)
    assert truth.recall(truth.keys + len(rows)) == 0


def test_memory_is_what_it_is_said_to_be(tmp_path: Path, rows: np.ndarray) -> None:
    index = trained_index(rows, len(rows))
    index.add_with_ids(rows, np.arange(len(rows)))
    faiss.write_index(index, str(tmp_path / "file"))
    said = compressed_memory(len(rows), DIM) - 17 * len(
        rows
    )  # keys and checksums are no part of it
    assert said == pytest.approx(os.path.getsize(tmp_path / "file"), rel=0.1)
