"""Features of a benchmark that are kept for the next time."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_net import TINY_NET

from listwise.data import Images
from listwise.data.catalog import Benchmark
from listwise.descriptors import Model
from listwise.errors import InputError
from listwise.evaluation import JudgedQueries
from listwise.local.features import Features
from listwise.models import RetrievalNet
from listwise.results import describe_benchmark
from listwise.results.local import describe_locally
from listwise.studies.local import global_scores


@dataclass
class Counting:
    """An extractor that says what it was asked."""

    seen: list[str] = field(default_factory=list)
    name: str = "demo"
    dim: int = 8

    def __call__(self, file):
        self.seen.append(file.path)
        rows = np.eye(8, dtype=np.float32)[:3]
        shapes = np.stack([np.eye(2, dtype=np.float32)] * 3)
        return Features(rows[:, :2], np.ones(3, np.float32), shapes, rows)


def small_benchmark(folder, side):
    folder.mkdir()
    paths = [str(folder / f"{i}.png") for i in range(5)]
    for path in paths:
        Image.new("RGB", (side, 20)).save(path)
    database = Images(tuple(paths[:4]), tuple("abcd"), None)
    queries = Images((paths[4],), ("q",), ((2.0, 2.0, 9.0, 9.0),))
    nothing = [np.zeros(0, np.int64)]
    judged = JudgedQueries.revisited(
        database.ids, queries.ids, queries.boxes, easy=nothing, hard=nothing, junk=nothing
    )
    return Benchmark("small", database, queries, judged)


def test_kept_features_are_used_again_for_the_same_photos_alone(tmp_path):
    small = small_benchmark(tmp_path / "small", 30)
    extractor = Counting()
    queries, database = describe_locally(small, extractor, tmp_path / "kept", workers=0)
    assert (queries.ids, database.ids) == (("q",), tuple("abcd"))
    assert len(extractor.seen) == 5
    describe_locally(small, extractor, tmp_path / "kept", workers=0)
    assert len(extractor.seen) == 5
    large = small_benchmark(tmp_path / "large", 60)
    with pytest.raises(InputError, match="at their current size: give another folder"):
        describe_locally(large, extractor, tmp_path / "kept", workers=0)


def test_an_unreadable_photo_stops_it_and_what_is_done_stays(tmp_path):
    small = small_benchmark(tmp_path / "small", 30)
    broken = tmp_path / "small" / "3.png"
    broken.write_text("no image")
    with pytest.raises(InputError, match=r"3\.png"):
        describe_locally(small, Counting(), tmp_path / "kept", workers=0)
    Image.new("RGB", (30, 20)).save(broken)
    extractor = Counting()
    describe_locally(small, extractor, tmp_path / "kept", workers=0)
    assert small.queries.paths[0] not in extractor.seen


# Global descriptors


def test_descriptors_are_kept_and_taken_again(tmp_path):
    small = small_benchmark(tmp_path / "small", 64)
    torch.manual_seed(0)
    model = Model(RetrievalNet(TINY_NET, weights="random").eval())
    done = []
    kept = tmp_path / "kept"
    found = global_scores(small, kept, model, workers=0, on_progress=done.append)
    assert sum(done) == 5
    assert found.shape == (1, 4)
    np.testing.assert_allclose(found, describe_benchmark(model, small).scores(), atol=1e-6)
    before = {path.name: path.stat().st_mtime_ns for path in kept.iterdir()}
    assert sorted(before) == ["database.parquet", "queries.parquet"]
    np.testing.assert_array_equal(global_scores(small, kept), found)
    assert {path.name: path.stat().st_mtime_ns for path in kept.iterdir()} == before
    with pytest.raises(InputError, match="does not hold the photos of small"):
        global_scores(small_benchmark(tmp_path / "large", 80), kept)
    torch.manual_seed(1)
    other = Model(RetrievalNet(TINY_NET, weights="random").eval())
    with pytest.raises(InputError, match="another model"):
        global_scores(small, kept, other)
    global_scores(small, tmp_path / "other", other, workers=0)
    (tmp_path / "other" / "queries.parquet").replace(kept / "queries.parquet")
    with pytest.raises(InputError, match="another model"):
        global_scores(small, kept)
