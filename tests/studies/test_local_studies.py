"""Features of a benchmark that are kept for the next time."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from PIL import Image

from listwise.data import Images
from listwise.data.catalog import Benchmark
from listwise.errors import InputError
from listwise.local.features import Features
from listwise.studies.local import describe_locally


@dataclass
class Counting:
    """An extractor that says what it was asked."""

    seen: list[str] = field(default_factory=list)
    name: str = "demo"
    dim: int = 8

    def __call__(self, path, box):
        self.seen.append(path)
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
    return Benchmark("small", "revisited", database, queries)


def test_kept_features_are_used_again_for_the_same_photos_alone(tmp_path):
    small = small_benchmark(tmp_path / "small", 30)
    extractor = Counting()
    queries, database = describe_locally(small, extractor, tmp_path / "kept", workers=0)
    assert (queries.ids, database.ids) == (("q",), tuple("abcd"))
    assert len(extractor.seen) == 5
    describe_locally(small, extractor, tmp_path / "kept", workers=0)
    assert len(extractor.seen) == 5
    large = small_benchmark(tmp_path / "large", 60)
    with pytest.raises(InputError, match="at another size: give another folder"):
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
