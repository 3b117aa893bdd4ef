import json
import os
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from listwise.errors import InputError
from listwise.search import alpha_query_expansion, exact_search
from listwise.search.entries import Entry, NewEntries, entry_key
from listwise.search.folder import table as entry_table
from listwise.search.opening import create_store, open_store, store_exists
from listwise.search.store import IndexHeader, SearchIntent, Store

MODEL = "ab" * 32


def header(dim: int) -> IndexHeader:
    return IndexHeader(model=MODEL, model_folder="model", whitened=True, dim=dim)


def some(names: list[str], rows: np.ndarray, mark: str = "") -> NewEntries:
    entries = [
        Entry(
            name,
            f"/photos/{name}",
            640,
            480,
            box=(1.0, 2.0, 30.5, 40.0) if i % 2 else None,
            digest=f"{mark}{name}'s digest",
            attributes={"mark": mark, "name": name},
        )
        for i, name in enumerate(names)
    ]
    thumbnails = [b"" if name.endswith("0") else f"{mark}{name}".encode() for name in names]
    return NewEntries(entries, rows.astype(np.float32), thumbnails)


def unit(rng: np.random.Generator, count: int, dim: int) -> np.ndarray:
    rows = rng.normal(size=(count, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize(("count", "dim"), [(1, 1), (7, 5), (3000, 16)])
def test_search_equals_exact_search(tmp_path: Path, count: int, dim: int) -> None:
    rng = np.random.default_rng(count)
    rows, queries = unit(rng, count, dim), unit(rng, 25, dim)
    names = [f"n{i}" for i in range(count)]
    places = {entry_key(name): place for place, name in enumerate(names)}
    with create_store(tmp_path / "index", header(dim)) as index:
        index.put(some(names, rows))
        assert len(index) == count
        for k in (1, 10, count + 3):
            scores, _ = exact_search(queries, rows, k)
            found_scores, found = index.search(queries, k)
            assert found.shape == (25, min(k, count))
            np.testing.assert_allclose(found_scores, scores, atol=1e-6)
            # Scores that differ by rounding alone may change places.
            own = np.vectorize(places.__getitem__)(found)
            again = np.take_along_axis(queries @ rows.T, own, 1)
            np.testing.assert_allclose(again, scores, atol=1e-6)
            assert all(len(set(row)) == len(row) for row in found.tolist())


names = st.sets(st.sampled_from([f"photo {i}" for i in range(12)]), min_size=1, max_size=6)
steps = st.lists(
    st.tuples(st.sampled_from(["put", "put", "remove", "reopen", "other"]), names), max_size=7
)


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 2)
@given(seed=st.integers(0, 2**32 - 1), changes=steps)
def test_it_equals_a_dictionary(
    tmp_path_factory: pytest.TempPathFactory, seed: int, changes: list[tuple[str, set[str]]]
) -> None:
    rng = np.random.default_rng(seed)
    folder = tmp_path_factory.mktemp("indexes") / "index"
    model: dict[str, tuple[str, np.ndarray]] = {}
    index = create_store(folder, header(3))
    for number, (kind, chosen) in enumerate(changes):
        writer = open_store(folder) if kind == "other" else index
        if kind in ("put", "other"):
            rows = unit(rng, len(chosen), 3)
            writer.put(some(sorted(chosen), rows, f"{number} "))
            for name, row in zip(sorted(chosen), rows, strict=True):
                model[name] = (f"{number} ", row)
        elif kind == "remove":
            count = writer.remove([entry_key(name) for name in chosen])
            assert count == len(chosen & set(model))
            model = {name: kept for name, kept in model.items() if name not in chosen}
        else:
            index = open_store(folder)
        index.refresh()
        check(index, model, unit(rng, 2, 3))
    check(open_store(folder), model, unit(rng, 2, 3))


def check(index: Store, model: dict[str, tuple[str, np.ndarray]], queries: np.ndarray) -> None:
    """An index holds just this."""
    assert len(index) == len(model)
    every = {entry.id: entry for entry in index}
    assert set(every) == set(model)
    keys = {name: entry_key(name) for name in model}
    assert index.get([*keys.values(), 5]) == {keys[name]: every[name] for name in model}
    digests = index.with_digests([f"{mark}{name}'s digest" for name, (mark, _) in model.items()])
    assert {entry.id for entry in digests.values()} == set(model)
    for name, (mark, _) in model.items():
        assert every[name].attributes == {"mark": mark, "name": name}
        thumbnail = index.thumbnail(keys[name])
        assert thumbnail == (None if name.endswith("0") else f"{mark}{name}".encode())
    scores, found = index.search(queries, 5)
    assert found.shape == (len(queries), min(5, len(model)))
    if model:
        rows = np.array([row for _, row in model.values()])
        np.testing.assert_array_equal(index.vectors(list(keys.values())), rows)
        by_key = dict(zip(keys.values(), rows, strict=True))
        expected = -np.sort(-queries @ rows.T, axis=1)[:, :5]
        np.testing.assert_allclose(scores, expected, atol=1e-6)
        for query, row, line in zip(queries, scores, found.tolist(), strict=True):
            np.testing.assert_allclose(row, [by_key[key] @ query for key in line], atol=1e-6)


def test_entries_come_back_as_they_went(tmp_path: Path) -> None:
    rows = unit(np.random.default_rng(0), 3, 4)
    new = some(["a", 'ü\'s "b"', "c/0"], rows)
    with create_store(tmp_path / "index", header(4)) as index:
        index.put(new)
    with open_store(str(tmp_path / "index")) as index:
        assert index.header == header(4)
        assert list(index) == list(new.entries)
        assert index.page(1, 1) == [new.entries[1]]
        assert index.page(3, 10) == []
        assert index.get([entry.key for entry in new.entries]) == {
            entry.key: entry for entry in new.entries
        }
        assert index.with_digests(["", "ü's \"b\"'s digest"]) == {
            "ü's \"b\"'s digest": new.entries[1]
        }
        assert index.thumbnail(new.entries[1].key) == 'ü\'s "b"'.encode()
        assert index.thumbnail(new.entries[2].key) is None
        assert index.thumbnail(77) is None
        for none in (-1, 2**63, 10**30):
            assert index.get([none]) == {}
            assert index.thumbnail(none) is None
            assert index.remove([none]) == 0
        keys = [new.entries[2].key, new.entries[0].key, new.entries[2].key]
        np.testing.assert_array_equal(index.vectors(keys), rows[[2, 0, 2]])
        info = json.loads(json.dumps(index.info()))
        assert info["entries"] == 3
        assert info["model"] == MODEL[:12]
        assert info["bytes"] > rows.nbytes


def test_entries_without_digest_are_not_each_other(tmp_path: Path) -> None:
    with create_store(tmp_path / "index", header(1)) as index:
        plain = [Entry("a", "", 1, 1), Entry("b", "", 1, 1)]
        index.put(NewEntries(plain, np.ones((2, 1), np.float32), [b"", b""]))
        assert index.with_digests([""]) == {}


def test_an_entry_twice_in_a_batch_is_one(tmp_path: Path) -> None:
    with create_store(tmp_path / "index", header(2)) as index:
        index.put(some(["a", "b", "a"], np.array([[1, 0], [0, 1], [0.6, 0.8]])))
        assert len(index) == 2
        scores, keys = index.search(np.array([[1, 0]]), 5)
        assert keys.tolist() == [[entry_key("a"), entry_key("b")]]
        np.testing.assert_allclose(scores, [[0.6, 0]], atol=1e-6)


def test_expansion_through_the_index(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    rows, queries = unit(rng, 60, 8), unit(rng, 4, 8)
    with create_store(tmp_path / "index", header(8)) as index:
        index.put(some([f"n{i}" for i in range(60)], rows))
        found = alpha_query_expansion(queries, index)
    np.testing.assert_allclose(found, alpha_query_expansion(queries, rows), atol=1e-6)


def test_an_index_that_was_not_finished_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "index"

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("listwise.search.folder.store.write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            create_store(folder, header(2))
    assert not store_exists(str(folder))
    with pytest.raises(InputError, match="no index at"):
        open_store(folder)
    with create_store(folder, header(3)) as index:
        index.put(some(["a"], np.ones((1, 3))))
        assert len(index) == 1


def test_places_that_will_not_do(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("no folder")
    with pytest.raises(InputError, match="cannot create an index"):
        create_store(file, header(2))
    (tmp_path / "photo.jpg").write_text("not ours")
    with pytest.raises(InputError, match=r"other files \(file\)"):
        create_store(tmp_path, header(2))
    create_store(tmp_path / "index", header(2))
    with pytest.raises(InputError, match="already"):
        create_store(tmp_path / "index", header(2))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_only_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    create_store(folder, header(2)).put(some(["a"], np.ones((1, 2))))
    (folder / "lock").unlink()
    folder.chmod(0o500)
    try:
        index = open_store(folder)
        assert len(index.search(np.ones((1, 2)), 1)[1]) == 1
        with pytest.raises(InputError, match="cannot write"):
            index.put(some(["b"], np.ones((1, 2))))
    finally:
        folder.chmod(0o700)


def test_damage_is_told_in_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    create_store(folder, header(2))
    content = (folder / "index.json").read_text()
    (folder / "index.json").write_text(
        content.replace('"format_version": 1', '"format_version": 9')
    )
    with pytest.raises(InputError, match="has the format 9"):
        open_store(folder)
    (folder / "index.json").write_text("{")
    with pytest.raises(InputError, match="damaged"):
        open_store(folder)
    (folder / "index.json").write_text(content)
    (folder / "entries.lance").rename(folder / "elsewhere")
    with pytest.raises(InputError, match="cannot be used") as caught:
        open_store(folder)
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_is_refused_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with create_store(tmp_path / "index", header(2)) as index:
        index.put(some(["a"], np.ones((1, 2))))
        with pytest.raises(InputError, match=r"\[1, 2\]"):
            index.put(some(["b"], np.ones((1, 3))))
        with pytest.raises(InputError, match="b is not finite"):
            index.put(some(["c", "b"], np.array([[1, 0], [np.nan, 0]])))
        with pytest.raises(InputError, match="2 dimensions"):
            index.search(np.ones((1, 3)), 1)
        with pytest.raises(InputError, match="not finite"):
            index.search(np.array([[np.inf, 0]]), 1)
        with pytest.raises(InputError, match="`k` must be 1 or more, not 0"):
            index.search(np.ones((1, 2)), 0)
        with pytest.raises(InputError, match="the index has no entry 5"):
            index.vectors([5])
        with pytest.raises(InputError, match=r"not of cccccccccccc"):
            index.header.check("c" * 64, index.uri)
        index.header.check(MODEL, index.uri)
        assert [entry.id for entry in index] == ["a"]
        assert index.remove([]) == 0
        assert index.remove([entry_key("other")]) == 0
        monkeypatch.setattr("listwise.search.entries.entry_key", lambda name: entry_key("a"))
        with pytest.raises(InputError, match="have the same key"):
            index.put(some(["d"], np.ones((1, 2))))


def test_an_empty_index(tmp_path: Path) -> None:
    with create_store(tmp_path / "index", header(2)) as index:
        scores, keys = index.search(np.ones((3, 2)), 4)
        assert scores.shape == keys.shape == (3, 0)
        assert list(index) == []
        assert index.vectors([]).shape == (0, 2)
        index.put(NewEntries([], np.zeros((0, 2), np.float32), []))
        assert len(index) == 0


def test_small_commits_are_joined_and_old_versions_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in [("_TIDY_EVERY", 4), ("_SMALL_FILES", 5), ("_SLACK", 50_000)]:
        monkeypatch.setattr(entry_table, name, value)
    monkeypatch.setattr(entry_table, "_OLD", entry_table.timedelta(milliseconds=1))
    rng = np.random.default_rng(0)
    rows = unit(rng, 30, 64)
    index = create_store(tmp_path / "index", header(64))
    index.search(rows[:1], 1)
    other = open_store(tmp_path / "index")
    for i, row in enumerate(rows):
        index.put(some([f"n{i}"], row[None]))
        if i % 7 == 6:
            index.remove([entry_key(f"n{i - 3}")])
            index.put(some([f"n{i - 1}"], row[None]))
            rows[i - 1] = row
    left = [i for i in range(30) if i % 7 != 3]
    table = index._table._table  # type: ignore[attr-defined]
    assert table.stats()["fragment_stats"]["num_fragments"] <= 12
    assert index.info()["bytes"] < 50_000 + 8 * rows.nbytes
    other.refresh()
    for reader in (index, other, open_store(tmp_path / "index")):
        assert sorted(entry.id for entry in reader) == sorted(f"n{i}" for i in left)
        scores, _ = reader.search(rows[:3], len(left))
        np.testing.assert_allclose(scores, -np.sort(-rows[:3] @ rows[left].T, axis=1), atol=1e-6)
        np.testing.assert_array_equal(
            reader.vectors([entry_key(f"n{i}") for i in left]), rows[left]
        )


def test_the_disk_gets_smaller_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in [("_TIDY_EVERY", 4), ("_SLACK", 0)]:
        monkeypatch.setattr(entry_table, name, value)
    monkeypatch.setattr(entry_table, "_OLD", entry_table.timedelta(milliseconds=1))
    rows = unit(np.random.default_rng(0), 2000, 128)
    with create_store(tmp_path / "index", header(128)) as index:
        index.put(some([f"n{i}" for i in range(2000)], rows))
        full = index.info()["bytes"]
        assert full > rows.nbytes
        index.remove([entry_key(f"n{i}") for i in range(1900)])
        for i in range(6):
            index.put(some([f"n{i}"], rows[i][None]))
        assert index.info()["bytes"] < full / 4
        assert len(index) == 106
        np.testing.assert_array_equal(index.vectors([entry_key("n1950")])[0], rows[1950])


def test_photos_beside_the_table_are_no_reason_to_write_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in [("_TIDY_EVERY", 1), ("_SLACK", 1 << 20)]:
        monkeypatch.setattr(entry_table, name, value)
    rows = unit(np.random.default_rng(0), 4, 8)
    with create_store(tmp_path / "index", header(8)) as index:
        (tmp_path / "index" / "uploads").mkdir()
        (tmp_path / "index" / "uploads" / "a.jpg").write_bytes(bytes(4 << 20))
        index.put(some(["a", "b", "c", "d"], rows))
        assert index._table._dropped == -np.inf
        assert index.info()["bytes"] > 4 << 20


def test_a_refresh_reads_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    writer = create_store(tmp_path / "index", header(4))
    writer.put(some([f"n{i}" for i in range(50)], unit(rng, 50, 4)))
    reader = open_store(tmp_path / "index")
    reader.search(np.ones((1, 4)), 1)
    read: list[int] = []
    rows = entry_table.EntryTable.rows

    def counted(self: entry_table.EntryTable, keys: np.ndarray | None = None) -> object:
        for part in rows(self, keys):
            read.extend(part.keys.tolist())
            yield part

    monkeypatch.setattr(entry_table.EntryTable, "rows", counted)
    reader.refresh()
    assert read == []
    writer.put(some(["n3", "new"], unit(rng, 2, 4)))
    writer.remove([entry_key("n7")])
    reader.refresh()
    assert sorted(read) == sorted([entry_key("n3"), entry_key("new")])
    found = reader.search(np.ones((1, 4)), 60)[1][0].tolist()
    assert entry_key("n7") not in found
    assert len(found) == 50


def test_a_version_dropped_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = unit(np.random.default_rng(0), 50, 4)
    writer = create_store(tmp_path / "index", header(4))
    writer.put(some([f"n{i}" for i in range(50)], rows))
    whole = entry_table.EntryTable.rows
    failures = [1]

    def dropped(self: entry_table.EntryTable, keys: np.ndarray | None = None) -> object:
        for part in whole(self, keys):
            if failures:
                failures.pop()
                yield entry_table.Rows(part.keys[:20], part.stamps[:20], part.descriptors[:20])
                raise InputError("a file is gone")
            yield part

    monkeypatch.setattr(entry_table.EntryTable, "rows", dropped)
    scores, _ = open_store(tmp_path / "index").search(rows[:2], 50)
    np.testing.assert_allclose(scores, -np.sort(-rows[:2] @ rows.T, axis=1), atol=1e-6)
    assert not failures


def test_two_writers_take_turns(tmp_path: Path) -> None:
    create_store(tmp_path / "index", header(4))
    rng = np.random.default_rng(0)
    rows = unit(rng, 12, 4)

    def write(start: int) -> None:
        index = open_store(tmp_path / "index")
        index.search(rows[:1], 1)
        for i in range(start, 12, 2):
            index.put(some([f"n{i}", "shared"], rows[[i, i]]))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, (0, 1)))
    index = open_store(tmp_path / "index")
    assert sorted(entry.id for entry in index) == sorted(["shared", *(f"n{i}" for i in range(12))])


def test_a_writer_that_waits_for_another_process_stops_no_reader(tmp_path: Path) -> None:
    rows = unit(np.random.default_rng(0), 3, 4)
    index = create_store(tmp_path / "index", header(4))
    index.put(some(["a"], rows[:1]))
    index.search(rows[:1], 1)
    with ThreadPoolExecutor(2) as pool:
        with FileLock(tmp_path / "index" / "lock"):
            # Another process has committed, and tidies.
            other = entry_table.EntryTable.open(tmp_path / "index")
            other.put(some(["b"], rows[1:2]), 7, replacing=False)
            writing = pool.submit(index.put, some(["c"], rows[2:]))
            time.sleep(0.3)
            refreshing = pool.submit(index.refresh)
            wait([refreshing], timeout=10)
            refreshed = refreshing.done()
            found = index.search(rows[:1], 9)[1].shape[1] if refreshed else 0
        writing.result()
    assert (refreshed, found) == (True, 2)
    assert index.search(rows[:1], 9)[1].shape[1] == 3


def test_threads_search_while_one_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = unit(rng, 40, 8)
    index = create_store(tmp_path / "index", header(8))
    index.put(some([f"n{i}" for i in range(20)], rows[:20]))
    gone: set[int] = set()

    def look(number: int) -> None:
        before = set(gone)
        scores, found = index.search(rows[number % 20][None], 10)
        assert not before & set(found[0].tolist())
        assert (np.diff(scores[0]) <= 0).all()
        index.get(found[0].tolist())
        index.thumbnail(int(found[0, 0]))
        index.refresh()

    with ThreadPoolExecutor(3) as pool:
        looks = [pool.submit(look, number) for number in range(30)]
        for i in range(20, 25):
            index.put(some([f"n{i}"], rows[i][None]))
            index.remove([entry_key(f"n{i - 20}")])
            gone.add(entry_key(f"n{i - 20}"))
        for done in looks:
            done.result()
    assert len(index) == 20


@pytest.mark.slow
def test_many_entries_are_searched_as_by_exact_search(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    count = 50_000 if os.environ.get("LISTWISE_SOAK") else 3000
    rows, queries = unit(rng, count, 2048), unit(rng, 20, 2048)
    names = [str(number) for number in range(len(rows))]
    with create_store(tmp_path / "index", header(2048)) as index:
        for start in range(0, count, count // 2):
            part = slice(start, start + count // 2)
            index.put(some(names[part], rows[part]))
        tuned = index.tune(SearchIntent())
        assert tuned.recall >= 0.99
    with open_store(tmp_path / "index") as index:
        _, keys = index.search(queries, 10)
    expected = exact_search(queries, rows, 10)[1]
    numbers = {entry_key(name): number for number, name in enumerate(names)}
    found = [[numbers[key] for key in row] for row in keys.tolist()]
    shared = [len(set(one) & set(two)) for one, two in zip(found, expected.tolist(), strict=True)]
    assert np.mean(shared) >= 9.9
