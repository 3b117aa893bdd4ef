import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import plain_verification as plain
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from test_features import textured

from listwise.data.catalog.ground_truth import read_ground_truth
from listwise.local.features import Features, hessian_affine, photo_features
from listwise.local.rerank import MINIMUM
from listwise.local.verification import Verification, nearest_pairs, similar_pairs, verify

HOMOGRAPHIES = {
    "shift": np.array([[1, 0, 20], [0, 1, -12], [0, 0, 1]], float),
    "zoom": np.array([[0.7, 0, 10], [0, 0.7, 30], [0, 0, 1]], float),
    "affine": np.array([[0.9, 0.1, 5], [-0.15, 1.1, 30], [0, 0, 1]], float),
    "perspective": np.array([[1.0, 0.08, 4], [0.04, 0.95, 10], [6e-4, 2e-4, 1]], float),
}


def mapped(transform: np.ndarray, points: np.ndarray) -> np.ndarray:
    homogeneous = np.concatenate([points, np.ones((len(points), 1))], axis=1) @ transform.T
    return homogeneous[:, :2] / homogeneous[:, 2:]


def warped(photo: Image.Image, transform: np.ndarray) -> Image.Image:
    return Image.fromarray(
        cv2.warpPerspective(np.asarray(photo), transform, photo.size, borderValue=128)
    )


@pytest.mark.parametrize("name", HOMOGRAPHIES)
def test_a_warped_photo_is_found_with_its_transform(name: str) -> None:
    transform = HOMOGRAPHIES[name]
    photo = textured(300, 240)
    found = verify(hessian_affine(photo), hessian_affine(warped(photo, transform)))
    assert found.inliers > 100
    assert found.inliers == len(found.points) == len(found.query_points)
    expected = mapped(transform, found.query_points.astype(float))
    errors = np.linalg.norm(found.points - expected, axis=1)
    assert np.median(errors) < 1
    assert np.quantile(errors, 0.95) < 5
    corners = np.array([[30, 30], [270, 30], [30, 210], [270, 210]], float)
    distances = np.linalg.norm(
        mapped(found.transform, corners) - mapped(transform, corners), axis=1
    )
    assert distances.max() < 0.5


@pytest.mark.parametrize("amount", [0.03, 0.08, 0.15])
@pytest.mark.parametrize("seed", range(4))
def test_the_corners_of_a_photo_are_found(seed: int, amount: float) -> None:
    photo = textured(400, 300, seed=seed)
    corners = np.array([[0, 0], [400, 0], [0, 300], [400, 300]], np.float32)
    shift = np.random.default_rng(seed).uniform(-amount, amount, (4, 2)) * photo.size
    transform = cv2.getPerspectiveTransform(corners, (corners + shift).astype(np.float32))
    one, two = hessian_affine(photo), hessian_affine(warped(photo, transform))
    found, back = verify(one, two), verify(two, one)
    expected = mapped(transform, corners)
    assert np.linalg.norm(mapped(found.transform, corners) - expected, axis=1).max() < 0.5
    assert np.linalg.norm(mapped(back.transform, expected) - corners, axis=1).max() < 0.5


@pytest.mark.parametrize("true", [4, 6, 12, 40])
def test_the_order_of_two_photos_makes_no_difference(true: int) -> None:
    transform = np.array([[1.1, 0.1, 20], [-0.1, 0.9, -15], [4e-4, 2e-4, 1]])
    for seed in range(20):
        one, two, pairs = planted(seed, true, 40, lambda x: mapped(transform, x), 2.0)
        pairs = np.random.default_rng(seed).permutation(pairs)
        found, other = verify(one, two, pairs), verify(two, one, pairs[:, ::-1])
        assert found.inliers == other.inliers
        np.testing.assert_array_equal(found.query_points, other.points)
        np.testing.assert_array_equal(found.points, other.query_points)
        np.testing.assert_allclose(found.transform, other.inverse().transform, atol=1e-6)


def test_the_order_makes_no_difference_to_the_features_that_are_paired() -> None:
    photos = [hessian_affine(textured(seed=seed), count) for seed in (0, 1) for count in (40, 60)]
    for one in photos:
        for two in photos:
            pairs = nearest_pairs(one.descriptors, two.descriptors, 0.97)
            other = nearest_pairs(two.descriptors, one.descriptors, 0.97)[:, ::-1]
            assert sorted(pairs.tolist()) == sorted(other.tolist())
            assert verify(one, two).inliers == verify(two, one).inliers


def test_unrelated_photos_share_nothing() -> None:
    photos = [hessian_affine(textured(seed=seed)) for seed in range(4)]
    counts = [verify(a, b).inliers for a in photos for b in photos if a is not b]
    assert max(counts) < MINIMUM


REAL = os.environ.get("LISTWISE_REAL_DATA")


@pytest.mark.skipif(REAL is None, reason="LISTWISE_REAL_DATA is not set")
def test_real_photos_of_one_building_are_told_from_others() -> None:
    folder = Path(str(REAL)) / "data" / "roxford5k"
    truth = read_ground_truth(folder / "gnd_roxford5k.pkl")
    counts: dict[str, list[int]] = {"easy": [], "other": []}
    for query in (0, 35, 48):
        sought = photo_features(folder / f"jpg/{truth.queries[query]}.jpg", truth.boxes[query])
        others = truth.grades["easy"][(query + 35) % 70][:2]
        for kind, images in (("easy", truth.grades["easy"][query][:3]), ("other", others)):
            for image in images:
                found = photo_features(folder / f"jpg/{truth.names[image]}.jpg")
                counts[kind].append(verify(sought, found).inliers)
    assert max(counts["other"]) < MINIMUM
    assert sum(count >= MINIMUM for count in counts["easy"]) >= len(counts["easy"]) / 2


def planted(
    seed: int, true: int, false: int, warp: Callable[[np.ndarray], np.ndarray], noise: float
) -> tuple[Features, Features, np.ndarray]:
    """Features of two photos; the first `true` pairs belong together, the others do not."""
    generator = np.random.default_rng(seed)
    n = true + false
    one = generator.uniform(0, 400, (n, 2))
    two = warp(one) + generator.normal(0, noise, (n, 2))
    low, high = two[:true].min(axis=0), two[:true].max(axis=0)
    two[true:] = generator.uniform(low, high, (false, 2))
    frames = np.tile(np.eye(2), (n, 1, 1)) * generator.uniform(2, 6, (n, 1, 1))
    step = 1e-3
    jacobian = np.stack(
        [(warp(one + step * axis) - warp(one)) / step for axis in np.eye(2)], axis=2
    )
    moved = jacobian @ frames * (1 + generator.normal(0, 0.05, (n, 1, 1)))
    pairs = np.stack([np.arange(n)] * 2, axis=1)
    return _features(one, frames), _features(two, moved), pairs


def _features(points: np.ndarray, frames: np.ndarray) -> Features:
    scales = np.sqrt(np.abs(np.linalg.det(frames)))
    return Features(
        points.astype(np.float32),
        scales.astype(np.float32),
        (frames / scales[:, None, None]).astype(np.float32),
        np.zeros((len(points), 8), np.float32),
    )


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    true=st.integers(12, 60),
    false=st.integers(0, 150),
    scale=st.floats(0.3, 3),
    shear=st.floats(-0.4, 0.4),
    tilt=st.floats(-3e-4, 3e-4),
)
def test_planted_pairs_are_told_from_outliers(
    seed: int, true: int, false: int, scale: float, shear: float, tilt: float
) -> None:
    transform = np.array([[scale, shear, 20], [0, scale, -15], [tilt, tilt / 2, 1]])
    one, two, pairs = planted(seed, true, false, lambda x: mapped(transform, x), 0.3 * scale)
    found = verify(one, two, pairs)
    right = {tuple(point) for point in one.points[:true]}
    hits = sum(tuple(point) in right for point in found.query_points)
    assert hits >= 0.9 * true
    # A random pair agrees by chance as often as the tolerance's share of the photo, at most.
    assert found.inliers - hits <= 2 + 0.05 * false
    errors = np.linalg.norm(
        mapped(found.transform, one.points[:true].astype(float)) - two.points[:true], axis=1
    )
    assert np.median(errors) < 3 * scale


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31))
def test_random_pairs_are_refused(seed: int) -> None:
    one, two, pairs = planted(seed, 4, 60, lambda x: x, 0.0)
    generator = np.random.default_rng(seed)
    assert verify(one, two, generator.permutation(pairs[:, :1]).repeat(2, 1)[:3]).inliers == 0
    shuffled = np.stack([pairs[:, 0], generator.permutation(pairs[:, 1])], axis=1)
    assert verify(one, two, shuffled).inliers < 8


@pytest.mark.parametrize(
    "warp",
    [
        lambda x: x * (-1, 1) + (400, 0),  # a mirror image
        lambda x: x * (1, 0.05),  # pressed flat
        lambda x: x * 0.02,  # shrunk to a point
    ],
)
def test_transforms_that_no_camera_makes_are_refused(
    warp: Callable[[np.ndarray], np.ndarray],
) -> None:
    one, two, pairs = planted(0, 60, 0, warp, 0.0)
    assert verify(one, two, pairs).inliers < 15


def test_pairs_must_agree_in_size_with_the_transform() -> None:
    one, two, pairs = planted(0, 40, 0, lambda x: x * 1.5, 0.0)
    swollen = replace(two, scales=np.where(np.arange(40) < 15, 3, 1) * two.scales)
    found = verify(one, swollen, pairs)
    assert found.inliers == 25
    assert {tuple(point) for point in found.points} == {tuple(point) for point in two.points[15:]}


def test_many_points_on_one_place_are_no_match() -> None:
    one, two, pairs = planted(0, 40, 0, lambda x: x, 0.0)
    pairs[:, 1] = 0
    assert verify(one, two, pairs).inliers < 4


def test_no_feature_is_counted_twice() -> None:
    one, two, pairs = planted(3, 30, 0, lambda x: x * 1.2 + 5, 0.2)
    found = verify(one, two, np.concatenate([pairs, pairs, pairs[::-1]]))
    assert found.inliers == len(np.unique(found.query_points, axis=0)) == 30
    assert len(np.unique(found.points, axis=0)) == 30


def test_nothing_to_compare_is_nothing_found() -> None:
    none = hessian_affine(Image.new("L", (50, 50)))
    some = hessian_affine(textured())
    for found in (verify(none, some), verify(some, none), verify(none, none)):
        assert isinstance(found, Verification)
        assert found.inliers == 0
        assert found.points.shape == found.query_points.shape == (0, 2)
        assert found.transform.shape == (3, 3)


# One by one, and together


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    true=st.integers(0, 40),
    false=st.integers(0, 60),
    scale=st.floats(0.3, 3),
    tilt=st.floats(-6e-4, 6e-4),
    noise=st.sampled_from([0.1, 2.0, 6.0]),
)
def test_the_inliers_are_those_of_the_plain_implementation(
    seed: int, true: int, false: int, scale: float, tilt: float, noise: float
) -> None:
    transform = np.array([[scale, 0.2, 20], [-0.1, scale, -15], [tilt, tilt / 2, 1]])
    one, two, pairs = planted(seed, true + 4, false, lambda x: mapped(transform, x), noise)
    expected = plain.verify(one, two, pairs)
    found = verify(one, two, pairs)
    assert found.inliers == (len(expected) if len(expected) >= 4 else 0)
    if found.inliers:
        np.testing.assert_array_equal(found.query_points, one.points[expected])
        np.testing.assert_array_equal(found.points, two.points[expected])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    same=st.integers(0, 3),
    least=st.floats(-0.5, 0.9),
)
def test_pairs_are_those_of_the_plain_implementation(
    seed: int, sizes: tuple[int, int], same: int, least: float
) -> None:
    generator = np.random.default_rng(seed)
    one, two = (generator.uniform(0, 1, (size, 4)).astype(np.float32) for size in sizes)
    if len(two):
        one[:same] = two[0]  # the first of equal descriptors is paired
    one, two = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (one, two))
    mutual = plain.mutual(one, two)
    expected = [[i, j] for i, j in mutual if one[i] @ two[j] >= least]
    assert similar_pairs(one, two, least).tolist() == expected
    if min(sizes) > 1:
        first, second = sorted((one, two), key=lambda rows: (len(rows), rows.tobytes()))
        mutual = plain.mutual(first, second)
        expected = [[i, j] for i, j in mutual if plain.is_clear(first[i] @ second.T, j, 0.95)]
        found = nearest_pairs(one, two, 0.95)
        assert (found if first is one else found[:, ::-1]).tolist() == expected
