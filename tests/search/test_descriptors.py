"""The file of descriptors: exact search through rows that are appended and removed."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from listwise.search.entries import DamagedIndexError, descriptor_sums
from listwise.search.folder import descriptors
from listwise.search.folder.descriptors import Descriptors, append_rows

NONE = np.zeros(0, np.int64)
steps = st.lists(
    st.tuples(st.booleans(), st.sets(st.integers(0, 30), min_size=1, max_size=12)), max_size=12
)


class Writer:
    """Appends rows to a file and removes them, as a store does."""

    def __init__(self, path: Path, dim: int) -> None:
        path.write_bytes(b"left from an interrupted change" * 99)
        self.rows = Descriptors(path, dim, lambda keys: DamagedIndexError(f"damaged: {keys}"))

    def add(self, keys: np.ndarray, rows: np.ndarray) -> None:
        append_rows(self.rows.path, rows, len(self.rows.keys))
        self.rows.update(keys, descriptor_sums(keys, rows), NONE)

    def remove(self, positions: np.ndarray) -> None:
        self.rows.update(NONE, NONE, positions)


@given(st.integers(0, 2**32 - 1), steps, st.integers(1, 40), st.integers(1, 40))
def test_it_equals_a_dictionary_that_is_sorted(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    changes: list[tuple[bool, set[int]]],
    queried: int,
    k: int,
) -> None:
    rng = np.random.default_rng(seed)
    model: dict[int, np.ndarray] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(descriptors, "_BLOCK", 3 * 4 * 4)  # three rows
        patch.setattr(descriptors, "_QUERIES", 30)
        writer = Writer(tmp_path_factory.mktemp("rows") / "rows.f32", 4)
        for adds, chosen in changes:
            if adds:
                rows = rng.integers(-9, 9, (len(chosen), 4)).astype(np.float32)
                start = len(writer.rows.keys)
                writer.add(np.array(list(chosen), np.int64), rows)
                model |= dict(enumerate(rows, start))
            else:
                gone = [place for place in chosen if place in model]
                writer.remove(np.array(gone, np.int64))
                for place in gone:
                    del model[place]
            assert len(writer.rows) == len(model)
            queries = rng.integers(-9, 9, (queried, 4)).astype(np.float32)
            check(writer.rows, queries, k, model, None)
            some = sorted(place for place in model if place % 3)
            part = {place: model[place] for place in some}
            check(writer.rows, queries, k, part, np.array(some, np.int64))
    places = np.array(sorted(model), np.int64)
    assert writer.rows.read(places).tolist() == [model[place].tolist() for place in sorted(model)]


def check(
    rows: Descriptors,
    queries: np.ndarray,
    k: int,
    model: dict[int, np.ndarray],
    among: np.ndarray | None,
) -> None:
    scores, found = rows.search(queries, k, among)
    assert found.shape == scores.shape == (len(queries), min(k, len(model)))
    for query, row, places in zip(queries, scores, found.tolist(), strict=True):
        products = {place: float(query @ vector) for place, vector in model.items()}
        wanted = sorted(products.values(), reverse=True)[:k]
        assert row.tolist() == wanted
        assert [products[place] for place in places] == wanted
        # Equal scores come by position.
        pairs = list(zip([-score for score in wanted], places, strict=True))
        assert pairs == sorted(set(pairs))


def test_damaged_rows_are_refused_unless_they_were_removed(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
    writer = Writer(tmp_path / "rows.f32", 6)
    writer.add(np.arange(20), rows)
    content = bytearray(writer.rows.path.read_bytes())
    content[7 * 24 + 3] ^= 1
    writer.rows.path.write_bytes(content)
    assert writer.rows.read(np.arange(7)).tolist() == rows[:7].tolist()
    for use in (lambda: writer.rows.read(np.arange(20)), lambda: writer.rows.search(rows, 1)):
        with pytest.raises(DamagedIndexError, match=r"damaged: \[7\]"):
            use()
    writer.remove(np.array([7]))
    assert writer.rows.search(rows[:1], 20)[1].shape == (1, 19)
    writer.rows.path.write_bytes(content[:100])  # it is too short
    short = Descriptors(writer.rows.path, 6, lambda keys: DamagedIndexError("short"))
    short.update(writer.rows.keys, writer.rows.sums, NONE)
    with pytest.raises(DamagedIndexError, match="short"):
        short.search(rows, 1)


@pytest.mark.parametrize("dim", [1, 3, 64])
def test_every_flipped_bit_changes_the_checksum(dim: int) -> None:
    rng = np.random.default_rng(dim)
    keys = rng.integers(0, 2**63 - 1, 3)
    rows = rng.normal(size=(3, dim)).astype(np.float32)
    sums = descriptor_sums(keys, rows)
    for place in range(4 * dim):
        for bit in range(8):
            changed = rows.copy()
            changed.view(np.uint8)[1, place] ^= 1 << bit
            assert (descriptor_sums(keys, changed) == sums).tolist() == [True, False, True]
    assert descriptor_sums(keys[::-1], rows)[0] != sums[0]
