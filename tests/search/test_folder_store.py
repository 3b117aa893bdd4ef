from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from read_only import call_where_read_only

from listwise.errors import InputError
from listwise.search.entries import Entry, NewEntries, entry_key
from listwise.search.folder import table as folder_table
from listwise.search.opening import create_store, open_store
from listwise.search.store import IndexHeader, Store

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


def test_a_folder_that_may_only_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    with create_store(folder, header(2)) as index:
        index.put(some(["a"], np.ones((1, 2))))

    def search() -> None:
        with open_store(folder) as index:
            assert len(index.search(np.ones((1, 2)), 1)[1]) == 1
            with pytest.raises(InputError, match="cannot write"):
                index.put(some(["b"], np.ones((1, 2))))

    call_where_read_only(folder, search)


def test_the_disk_gets_smaller_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_table, "_SLACK", 0)
    rows = unit(np.random.default_rng(0), 2000, 128)
    folder = tmp_path / "index"
    with create_store(folder, header(128)) as index:
        index.put(some([f"n{i}" for i in range(2000)], rows))
    with open_store(folder) as index, open_store(folder) as other:
        full = index.info()["bytes"]
        assert full > rows.nbytes
        other.search(rows[:1], 1)
        index.remove([entry_key(f"n{i}") for i in range(1900)])
        index.put(some(["n1"], rows[:1]))
        for each in (index, other):
            assert len(each) == 101
            np.testing.assert_array_equal(each.vectors([entry_key("n1950")])[0], rows[1950])
            assert each.search(rows[1900:1901], 1)[1].tolist() == [[entry_key("n1900")]]
            assert each.thumbnail(entry_key("n1901")) == b"n1901"
            assert all(check.sound for part in each.examine() for check in part)
        assert len(list(folder.glob("descriptors-*"))) == 1
    with open_store(folder) as index:
        assert index.info()["bytes"] < full / 4


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
    with ThreadPoolExecutor(1) as pool:
        with open_store(tmp_path / "index") as other, other.generations.pausing():  # it writes
            writing = pool.submit(index.put, some(["c"], rows[2:]))
            wait([writing], timeout=0.3)
            assert not writing.done()
            index.refresh()
            assert index.search(rows[:1], 9)[1].shape[1] == 1
        writing.result()
    assert index.search(rows[:1], 9)[1].shape[1] == 2


def test_searches_of_threads_see_one_commit_each(tmp_path: Path) -> None:
    """No reader finds a part of a change, or what was removed before it began to search."""
    rows = unit(np.random.default_rng(0), 30, 8)
    ten = [f"n{i}" for i in range(10)]
    keys, gone = {entry_key(name) for name in ten}, set[int]()
    writer = create_store(tmp_path / "index", header(8))
    writer.put(some(ten, rows[:10]))

    def look(reader: Store) -> None:
        for number in range(20):
            before = set(gone)
            scores, found = reader.search(rows[number : number + 1], 30)
            assert keys <= set(found[0].tolist())
            assert found.shape[1] in (10, 11)
            assert not before & set(found[0].tolist())
            assert (np.diff(scores[0]) <= 0).all()
            assert len({entry.attributes["mark"] for entry in reader if entry.key in keys}) == 1
            reader.thumbnail(int(found[0, 0]))
            reader.refresh()

    with ThreadPoolExecutor(4) as pool, open_store(tmp_path / "index") as other:
        looks = [pool.submit(look, reader) for reader in (writer, writer, other, other)]
        number = 0
        while not all(each.done() for each in looks):
            number += 1
            writer.put(some(ten, rows[number % 20 :][:10], f"{number} "))
            writer.put(some([f"more {number}"], rows[20:21]))
            writer.remove([entry_key(f"more {number}")])
            gone.add(entry_key(f"more {number}"))
        for each in looks:
            each.result()
