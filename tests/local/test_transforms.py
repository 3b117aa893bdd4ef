"""Transforms that are fitted and scored together are those that are fitted one by one."""

import numpy as np
import plain_verification as plain
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_verification import mapped, planted

from listwise.local.transforms import PointPairs, fit_affine, fit_homographies
from listwise.local.verification import nearest_pairs, verify


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


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31),
    sizes=st.tuples(st.integers(2, 60), st.integers(2, 60)),
    same=st.integers(0, 3),
)
def test_nearest_pairs_are_those_of_the_plain_implementation(
    seed: int, sizes: tuple[int, int], same: int
) -> None:
    generator = np.random.default_rng(seed)
    one, two = (generator.uniform(0, 1, (size, 4)).astype(np.float32) for size in sizes)
    one[:same] = two[0]  # the first of equal descriptors is paired
    one, two = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (one, two))
    assert nearest_pairs(one, two, 0.95).tolist() == [
        list(p) for p in plain.nearest(one, two, 0.95)
    ]


@pytest.mark.parametrize(
    ("fit", "single"), [(fit_affine, plain.affine), (fit_homographies, plain.homography)]
)
def test_a_fit_depends_on_its_own_pairs_alone(fit, single) -> None:
    generator = np.random.default_rng(0)
    start = generator.uniform(0, 400, (60, 2))
    start[40:] = start[40] + np.linspace(0, 1, 20)[:, None] * (90, 40)  # on a line
    end = mapped(np.array([[1.1, 0.2, 5], [-0.1, 0.9, 30], [3e-4, 1e-4, 1]]), start)
    end[:40] += generator.normal(0, 0.5, (40, 2))
    end[25:30] = end[25:30, ::-1] * (-1, 1)  # mirrored
    chosen = np.zeros((7, 60), bool)
    for row, part in enumerate((slice(0, 0), slice(0, 2), slice(0, 3), slice(0, 12))):
        chosen[row, part] = True
    chosen[4, 5:25], chosen[5, 40:], chosen[6, 25:30] = True, True, True
    transforms, sound = fit(start, end, chosen)
    expected = [single(start[pairs], end[pairs]) for pairs in chosen]
    assert sound.tolist() == [each is not None for each in expected]
    assert sound.any()
    for place in np.flatnonzero(sound):
        np.testing.assert_allclose(transforms[place], expected[place], rtol=1e-6, atol=1e-6)


def test_errors_of_affine_transforms_are_those_of_homographies() -> None:
    generator = np.random.default_rng(0)
    start, end = generator.uniform(0, 400, (2, 30, 2))
    pairs = PointPairs(start, end, 8.0, 5.0, generator.normal(0, 0.3, 30))
    transforms = np.tile(np.eye(3), (9, 1, 1))
    transforms[:, :2] += generator.normal(0, 0.1, (9, 2, 3)) * (1, 1, 50)
    errors = pairs.errors(transforms)
    assert 0 < np.isinf(errors).sum() < errors.size
    np.testing.assert_allclose(pairs.affine_errors(transforms), errors, rtol=1e-9)
    assert pairs.affine_errors(transforms[:0]).shape == (0, 30)
