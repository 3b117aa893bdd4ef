"""Codes of local features that an index stores."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_features import textured

from listwise.errors import InputError
from listwise.local.compact import (
    COUNT,
    MAX_BYTES,
    compact_features,
    decode_features,
    encode_features,
    nearest_decoded,
)
from listwise.local.features import Features, hessian_affine
from listwise.local.verification import verify


def made(count: int, seed: int, extent: float) -> Features:
    """Random features with the properties of Hessian-affine ones."""
    generator = np.random.default_rng(seed)
    shapes = np.zeros((count, 2, 2))
    shapes[:, 0, 0] = np.exp(generator.uniform(-0.8, 0.8, count))
    shapes[:, 1, 0] = generator.uniform(-2, 2, count)
    shapes[:, 1, 1] = 1 / shapes[:, 0, 0]
    histograms = generator.exponential(1, (count, 128))
    arrays = (
        generator.uniform(0, extent, (count, 2)),
        generator.uniform(0.5, 200, count),
        shapes,
        np.sqrt(histograms / histograms.sum(axis=1, keepdims=True)),
    )
    return Features(*(array.astype(np.float32) for array in arrays))


@given(
    count=st.integers(0, COUNT + 200),
    seed=st.integers(0, 1000),
    extent=st.sampled_from([1.0, 362.0, 20_000.0]),
)
def test_decoded_features_are_nearly_those_that_were_encoded(count, seed, extent):
    features = made(count, seed, extent)
    content = encode_features(features)
    assert len(content) <= MAX_BYTES
    decoded = decode_features(content)
    kept = min(count, COUNT)
    assert len(decoded) == kept
    np.testing.assert_allclose(decoded.points, features.points[:kept], atol=2e-5 * extent)
    np.testing.assert_allclose(decoded.scales, features.scales[:kept], rtol=1e-3)
    np.testing.assert_allclose(decoded.shapes, features.shapes[:kept], rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(np.linalg.det(decoded.shapes), np.ones(kept), rtol=1e-4)
    assert decoded.descriptors.shape == (kept, 128)
    assert decoded.descriptors.dtype == np.float32
    if kept:
        assert (decoded.descriptors * features.descriptors[:kept]).sum(axis=1).min() > 0.9
    assert encode_features(decoded)[18 + 10 * kept :] == content[18 + 10 * kept :]


def test_decoded_features_verify_as_the_original_ones_do():
    scene = textured(300, 220, seed=11)
    query = hessian_affine(scene, COUNT)
    view = scene.crop((60, 30, 230, 180))
    fresh = verify(query, hessian_affine(view, COUNT))
    coded = decode_features(encode_features(query))
    seen = decode_features(compact_features(view))
    stored = verify(coded, seen, nearest_decoded(coded, seen))
    assert stored.inliers > 0.8 * fresh.inliers > 20
    np.testing.assert_allclose(stored.transform[:2, 2], (-60, -30), atol=2)
    other = decode_features(compact_features(textured(170, 150, seed=3)))
    assert verify(coded, other, nearest_decoded(coded, other)).inliers < 7


def test_points_are_in_pixels_of_the_whole_photo():
    scene = textured(300, 220, seed=11)
    part, half = scene.crop((60, 30, 230, 180)), scene.resize((150, 110))
    whole = decode_features(compact_features(scene))
    placed = decode_features(compact_features(part, (60, 30)))
    grown = decode_features(compact_features(half, zoom=2.0))
    for other in (placed, grown):
        found = verify(whole, other)
        assert found.inliers > 20
        assert np.median(np.abs(found.query_points - found.points)) < 1


@pytest.mark.parametrize("change", [lambda c: c[:-1], lambda c: b"\x09" + c[1:], lambda c: b""])
def test_what_is_not_a_code_is_refused(change):
    with pytest.raises(InputError, match="local features are damaged or of a newer Listwise"):
        decode_features(change(encode_features(made(5, 0, 100))))
