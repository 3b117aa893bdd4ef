import math

import cv2
import numpy as np
import pytest
from PIL import Image

from listwise.data import ImageError
from listwise.local.features import (
    EXTENT,
    PATCH,
    hessian_affine,
    photo_features,
    root_sift,
)


def textured(width: int = 240, height: int = 180, seed: int = 0) -> Image.Image:
    """A photo of polygons and ellipses on smooth ground, with structure at many sizes."""
    generator = np.random.default_rng(seed)
    ground = generator.normal(0, 1, (height // 8 + 1, width // 8 + 1)).astype(np.float32)
    canvas = 128 + 30 * cv2.resize(ground, (width, height), interpolation=cv2.INTER_CUBIC)
    for _ in range(width * height // 400):
        shade = float(generator.uniform(0, 255))
        x, y = (int(generator.integers(0, length)) for length in (width, height))
        size = float(generator.uniform(3, 20))
        if generator.random() < 0.5:
            axes = (round(size), round(size * generator.uniform(0.3, 1)))
            cv2.ellipse(canvas, (x, y), axes, generator.uniform(0, 180), 0, 360, shade, -1)
        else:
            corners = generator.normal((x, y), size, (int(generator.integers(3, 7)), 2))
            cv2.fillPoly(canvas, [np.rint(corners).astype(np.int32)], shade)
    canvas += generator.normal(0, 2, canvas.shape).astype(np.float32)
    canvas = cv2.GaussianBlur(canvas, (0, 0), 0.8)
    return Image.fromarray(np.clip(canvas, 0, 255).astype(np.uint8))


def test_features_have_the_promised_shapes_and_repeat_exactly() -> None:
    photo = textured()
    found, again = hessian_affine(photo), hessian_affine(photo)
    n = len(found)
    assert n > 300
    assert found.points.shape == (n, 2)
    assert found.scales.shape == (n,)
    assert found.shapes.shape == (n, 2, 2)
    assert found.descriptors.shape == (n, 128)
    for name in ("points", "scales", "shapes", "descriptors"):
        assert getattr(found, name).dtype == np.float32
        np.testing.assert_array_equal(getattr(found, name), getattr(again, name))
    assert (found.points >= 0).all()
    assert (found.points < photo.size).all()
    np.testing.assert_allclose(np.linalg.norm(found.descriptors, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(np.linalg.det(found.shapes), 1, atol=1e-4)
    assert (found.shapes[:, 0, 1] == 0).all()  # upright
    assert (found.shapes[:, 0, 0] > 0).all()


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (9, 9), (20000, 4), (200, 150)])
def test_photos_without_structure_have_no_features(size: tuple[int, int]) -> None:
    found = hessian_affine(Image.new("RGB", size, "gray"))
    assert len(found) == 0
    assert found.descriptors.shape == (0, 128)


@pytest.mark.parametrize(("across", "down"), [(9.0, 9.0), (14.0, 7.0), (6.0, 12.0)])
def test_a_region_has_the_place_size_and_shape_of_a_blob(across: float, down: float) -> None:
    x, y = np.meshgrid(np.arange(700), np.arange(680))
    bump = np.exp(-((x - 330.3) ** 2) / (2 * across**2) - ((y - 340.6) ** 2) / (2 * down**2))
    found = hessian_affine(Image.fromarray(np.rint(40 + 180 * bump).astype(np.uint8)))
    near = np.flatnonzero(np.hypot(*(found.points - (330.3, 340.6)).T) < 1.0)
    assert len(near)
    strongest = near[0]
    np.testing.assert_allclose(found.points[strongest], (330.3, 340.6), atol=0.05 * across)
    # The determinant of the Hessian of a Gaussian blob is largest at its own size.
    assert math.sqrt(across * down) == pytest.approx(found.scales[strongest], rel=0.2)
    axes = found.shapes[strongest] @ found.shapes[strongest].T
    np.testing.assert_allclose(axes, np.diag([across / down, down / across]), rtol=0.2, atol=0.01)


@pytest.mark.parametrize(("width", "height"), [(300, 220), (1500, 1100)])
def test_features_follow_the_photo_to_another_size(width: int, height: int) -> None:
    photo = textured(480, 352)
    found = hessian_affine(photo.resize((width, height), Image.Resampling.LANCZOS), count=800)
    expected = hessian_affine(photo, count=800).scaled(width / 480)
    gaps = np.linalg.norm(expected.points[:, None] - found.points[None], axis=2)
    alike = expected.descriptors @ found.descriptors.T
    best = alike.argmax(axis=1)
    close = gaps[np.arange(len(best)), best] < 0.01 * width
    assert close[:300].mean() > 0.4
    medians = np.median(
        (found.scales[best] / expected.scales)[close]
    )  # the same regions at their own size
    assert medians == pytest.approx(1, abs=0.1)


def test_descriptors_are_root_sift() -> None:
    """Against a transcription, pixel by pixel, on regions whose samples are pixels."""
    generator = np.random.default_rng(1)
    gray = cv2.GaussianBlur(generator.random((120, 130), np.float32), (0, 0), 1.5)
    half = PATCH // 2
    scale = half / EXTENT
    centers = [(40, 50), (70, 61), (90, 30)]
    regions = (
        np.array(centers, np.float32),
        np.full(3, scale, np.float32),
        np.tile(np.eye(2, dtype=np.float32), (3, 1, 1)),
    )
    found = root_sift(gray, regions)
    for row, (cx, cy) in zip(found, centers, strict=True):
        patch = gray[cy - half : cy + half + 1, cx - half : cx + half + 1].astype(np.float64)
        np.testing.assert_allclose(row, _sift_by_pixels(patch), atol=2e-3)


def _sift_by_pixels(patch: np.ndarray) -> np.ndarray:
    inner = len(patch) - 2
    histogram = np.zeros((4, 4, 8))
    for i in range(inner):
        for j in range(inner):
            dx = patch[i + 1, j + 2] - patch[i + 1, j]
            dy = patch[i + 2, j + 1] - patch[i, j + 1]
            u, v = (2 * i + 1) / inner - 1, (2 * j + 1) / inner - 1
            weight = math.hypot(dx, dy) * math.exp(-(u * u + v * v) / 2)
            direction = (math.atan2(dy, dx) % (2 * math.pi)) / (2 * math.pi) * 8
            row, column = (i + 0.5) / inner * 4 - 0.5, (j + 0.5) / inner * 4 - 0.5
            for a in range(4):
                for b in range(4):
                    share = max(0, 1 - abs(row - a)) * max(0, 1 - abs(column - b))
                    for c in range(8):
                        turn = abs(direction - c)
                        histogram[a, b, c] += weight * share * max(0, 1 - min(turn, 8 - turn))
    flat = histogram.reshape(-1)
    flat = np.minimum(flat / np.sqrt((flat**2).sum()), 0.2)
    return np.sqrt(flat / flat.sum())


def test_a_photo_on_disk_gives_places_in_the_whole_photo(tmp_path) -> None:
    photo = textured(300, 240)
    photo.save(tmp_path / "a.png")
    box = (60.0, 50.0, 250.0, 220.0)
    of_box = photo_features(tmp_path / "a.png", box)
    alone = hessian_affine(photo.crop((60, 50, 250, 220)))
    np.testing.assert_allclose(of_box.points, alone.moved(60, 50).points, atol=1e-4)
    np.testing.assert_array_equal(of_box.descriptors, alone.descriptors)


def test_a_large_jpeg_gives_places_in_its_own_pixels(tmp_path) -> None:
    photo = textured(700, 500)
    photo.resize((4200, 3000), Image.Resampling.BICUBIC).save(tmp_path / "a.jpg", quality=95)
    found = photo_features(tmp_path / "a.jpg", count=300)
    small = hessian_affine(photo, count=300)
    best = (small.descriptors @ found.descriptors.T).argmax(axis=1)
    gaps = np.linalg.norm(small.scaled(6).points - found.points[best], axis=1)
    assert (gaps < 12).mean() > 0.4


def test_an_unreadable_photo_is_an_image_error(tmp_path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"no photo")
    with pytest.raises(ImageError, match=r"a\.jpg"):
        photo_features(tmp_path / "a.jpg")
