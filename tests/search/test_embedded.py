from pathlib import Path

import numpy as np
import pytest

from listwise.search import exact_search
from listwise.search.index import (
    Entry,
    IndexHeader,
    NewEntries,
    create_index,
    entry_key,
)

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
    keys = np.array([entry_key(name) for name in names])
    with create_index(tmp_path / "index", header(dim)) as index:
        index.put(some(names, rows))
        for k in (1, 10, count + 3):
            scores, places = exact_search(queries, rows, k)
            found_scores, found = index.search(queries, k)
            assert found.shape == (25, min(k, count))
            np.testing.assert_allclose(found_scores, scores, atol=1e-6)
            places_of = {int(key): place for place, key in enumerate(keys)}
            own = np.vectorize(places_of.__getitem__)(found)
            again = np.take_along_axis(queries @ rows.T, own, 1)
            np.testing.assert_allclose(again, scores, atol=1e-6)
            assert all(len(set(row)) == len(row) for row in found.tolist())
