"""Many pairs of photos verified at once."""

import numpy as np

from listwise.local import workers as module
from listwise.local.features import Features
from listwise.local.storage import FeatureFile, FeatureHeader, FeatureWriter, store_exactly
from listwise.local.workers import verify_pairs


def a_feature_file(path, photos, seed):
    """Features of photos that see the first 40 of the same 60 places, and 20 of their own."""
    generator = np.random.default_rng(seed)
    places = np.random.default_rng(99).uniform(0, 300, (60, 2))
    kinds = np.random.default_rng(98).standard_normal((60, 8))
    rows = []
    for number in range(photos):
        points, descriptors = places.copy(), kinds.copy()
        points[40:] = generator.uniform(0, 300, (20, 2))
        descriptors[40:] = generator.standard_normal((20, 8))
        if number % 2:  # sees something else
            generator.shuffle(points)
        descriptors /= np.linalg.norm(descriptors, axis=1, keepdims=True)
        shapes = np.broadcast_to(np.eye(2), (60, 2, 2))
        arrays = (points, np.full(60, 10.0), shapes, descriptors)
        found = Features(*(np.ascontiguousarray(array, np.float32) for array in arrays))
        rows.append(store_exactly(f"{number}", 300, 300, found))
    with FeatureWriter(path, FeatureHeader(extractor="demo", dim=8)) as writer:
        for row, photo in enumerate(rows):
            writer.write(row, photo)
    return FeatureFile.open(path)


def test_pairs_are_verified_once_and_alike_in_any_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PAIRS", 3)
    queries = a_feature_file(tmp_path / "q.arrow", 2, 0)
    database = a_feature_file(tmp_path / "d.arrow", 4, 1)
    pairs = [(query, image) for query in range(2) for image in range(4)]
    done = []
    here = verify_pairs(queries, database, pairs + pairs, on_pair=done.append)
    assert sum(done) == len(here) == 8
    assert here[0, 0].inliers >= 35
    assert here[0, 1].inliers < 10
    there = verify_pairs(queries, database, pairs, workers=2)
    assert there.keys() == here.keys()
    for pair, found in here.items():
        assert found.inliers == there[pair].inliers
        np.testing.assert_array_equal(found.points, there[pair].points)
