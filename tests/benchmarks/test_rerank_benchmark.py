"""The benchmark of re-ranking, on few drawn photos."""

import numpy as np
import pytest
from PIL import Image

from listwise.benchmarks import rerank as benchmark
from listwise.errors import InputError
from listwise.local.compact import compact_features, encode_features
from listwise.local.features import photo_features


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


def test_stored_features_are_those_of_an_index(photos):
    path = photos / "0" / "0.png"
    with Image.open(path) as photo:
        assert encode_features(photo_features(path)) == compact_features(photo.convert("RGB"))


def test_labelled_photos_have_no_judged_queries(photos):
    with pytest.raises(InputError, match="no judged queries"):
        next(benchmark.run("model", photos))
