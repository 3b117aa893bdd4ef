"""The benchmark of re-ranking, on few photos."""

import numpy as np
import pytest
from PIL import Image

from listwise.benchmarks import rerank as benchmark
from listwise.data import Images
from listwise.data.catalog import Benchmark
from listwise.errors import InputError
from listwise.evaluation import JudgedQueries
from listwise.local.compact import compact_features, encode_features
from listwise.local.features import photo_features
from listwise.models import RetrievalNet


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three textures, each from two sides."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for number in range(3):
        blocks = rng.integers(0, 255, (24, 32, 3)).astype(np.uint8)
        whole = Image.fromarray(blocks).resize((256, 192), Image.Resampling.NEAREST)
        (folder / str(number)).mkdir()
        for side, left in enumerate((0, 24)):
            whole.crop((left, 0, left + 224, 192)).save(folder / str(number) / f"{side}.png")
    return folder


def test_stored_and_fresh_features_find_the_other_side(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "core_count", lambda: 1)
    names = [f"{number}/{side}" for side in (1, 0) for number in range(3)]
    paths = [str(photos / f"{name}.png") for name in names]
    boxes = (None, (0.0, 0.0, 200.0, 192.0), None)
    none: list[list[int]] = [[], [], []]
    judged = JudgedQueries.revisited(
        names[:3], names[3:], boxes, easy=[[0], [1], [2]], hard=none, junk=none
    )
    database = Images(tuple(paths[:3]), tuple(names[:3]), None)
    queries = Images(tuple(paths[3:]), tuple(names[3:]), boxes)
    RetrievalNet("test_resnet", weights="random").save(tmp_path / "model")
    opened = Benchmark("sides", database, queries, judged)
    found, stored, fresh = benchmark.run(tmp_path / "model", opened, queries=2)
    assert found.p50 is None
    assert stored.easy == fresh.easy == stored.medium == fresh.medium == 100
    assert 0 < stored.p50 <= stored.p99
    assert 1000 < stored.bytes_per_photo <= 40_000


def test_stored_features_are_those_of_an_index(photos):
    path = photos / "0" / "0.png"
    with Image.open(path) as photo:
        assert encode_features(photo_features(path)) == compact_features(photo.convert("RGB"))


def test_labelled_photos_have_no_judged_queries(photos):
    with pytest.raises(InputError, match="no judged queries"):
        next(benchmark.run("model", photos))
