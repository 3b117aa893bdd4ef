import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from listwise.data import (
    CropDataset,
    CropSettings,
    LabelledImages,
    collate,
    load_image,
    random_crop,
    read_labelled,
    whole_image,
)
from listwise.data.crops import _jitter

STILL = {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0}
"""Settings under which colors do not change."""


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """A photo-like picture: soft noise in all colors."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(2, height // 8), max(2, width // 8), 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(
    width=st.integers(1, 200),
    height=st.integers(1, 200),
    size=st.integers(8, 80),
    rotation=st.sampled_from([0.0, 10.0, 90.0, 180.0]),
    seed=st.integers(0, 10**6),
)
def test_nothing_from_outside_the_photo_is_seen(width, height, size, rotation, seed):
    photo = Image.new("RGB", (width, height), (150, 120, 200))
    options = CropSettings(size=size, min_area=0.9, rotation=rotation, max_ratio=2.0, **STILL)
    crop = random_crop(photo, options, generator(seed))
    expected = torch.tensor([150, 120, 200], dtype=torch.uint8)[:, None, None]
    assert torch.equal(crop, expected.expand_as(crop))


def test_reduction_does_not_alias():
    checks = (np.indices((900, 900)).sum(axis=0) % 2 * 255).astype(np.uint8)
    photo = Image.fromarray(checks).convert("RGB")
    for seed in range(5):
        options = CropSettings(size=64, rotation=45.0, **STILL)
        crop = random_crop(photo, options, generator(seed)).float()
        assert (crop - 127.5).abs().max() < 20


def rectangle(width: int, height: int, options: CropSettings, seed: int):
    """Corner, edge across and edge down of the crop that a seed draws, from the settings alone."""
    u = np.random.default_rng(seed).random(10)
    angle = (2 * u[0] - 1) * options.rotation * math.pi / 180
    ratio = options.max_ratio ** (2 * u[1] - 1)
    unit = np.array([ratio**0.5, ratio**-0.5])
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    span = np.abs(turn) @ unit
    area = options.min_area + u[2] * (options.max_area - options.min_area)
    scale = min(width / span[0], height / span[1]) * area**0.5
    middle = u[3:5] * (np.array([width, height]) - span * scale) + span * scale / 2
    across, down = turn[:, 0] * unit[0] * scale, turn[:, 1] * unit[1] * scale
    return middle - across / 2 - down / 2, across, down


@pytest.mark.parametrize("size", [530, 300, 160, 97, 40, 24])
@pytest.mark.parametrize(
    ("seed", "changes"),
    [
        (0, {"rotation": 60.0}),
        (1, {"rotation": 180.0, "max_ratio": 1.0}),
        (2, {"rotation": 0.0, "min_area": 0.3}),
        (3, {"rotation": 40.0, "max_ratio": 2.0, "min_area": 0.9}),
    ],
)
def test_crops_of_a_smooth_picture_are_its_values_at_the_rectangles_points(size, seed, changes):
    # Enlarged (in more than one strip) or reduced: the picture is known between its pixels.
    width, height = 330, 280

    def shade(x, y):
        waves = np.sin(x / 41 + y / 67), np.cos(x / 53 - y / 37), np.sin(x / 71) * np.cos(y / 47)
        return 127.5 + 100 * np.stack(waves)

    grid = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
    photo = Image.fromarray(shade(*grid).round().astype(np.uint8).transpose(1, 2, 0))
    options = CropSettings(size=size, **changes, **STILL)
    crop = random_crop(photo, options, generator(seed)).numpy().astype(np.float64)
    corner, across, down = rectangle(width, height, options, seed)
    steps = (np.arange(size) + 0.5) / size
    v, u = np.meshgrid(steps, steps, indexing="ij")
    x, y = (corner[i] + u * across[i] + v * down[i] for i in (0, 1))
    difference = np.abs(crop - shade(x, y))
    # A reduced pixel is a mean over many: waves lose some of their height.
    assert difference.max() < (2.5 if size > 40 else 5.0)
    assert difference.mean() < (0.6 if size > 40 else 1.5)


def test_photos_longer_than_opencv_takes():
    photo = Image.new("RGB", (40_000, 24), (10, 200, 90))
    crop = random_crop(photo, CropSettings(size=16, **STILL), generator(0))
    assert crop.float().mean((1, 2)).tolist() == [10.0, 200.0, 90.0]


def test_flip_mirrors_and_changes_nothing_else():
    photo = noise(150, 120)
    for seed in range(3):
        plain = random_crop(photo, CropSettings(size=48), generator(seed))
        mirrored = random_crop(photo, CropSettings(size=48, flip=1.0), generator(seed))
        assert torch.equal(plain.flip(2), mirrored)
    options = CropSettings(size=48, flip=0.5)
    flipped = [
        not torch.equal(
            random_crop(photo, options, generator(s)),
            random_crop(photo, CropSettings(size=48), generator(s)),
        )
        for s in range(60)
    ]
    assert 15 < sum(flipped) < 45


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.3])
def test_jitter_agrees_with_pillow(factor):
    # Within 60 to 180 so that nothing is cut off at black or white.
    photo = Image.fromarray((60 + np.asarray(noise(64, 64)) * (120 / 255)).astype(np.uint8))
    unchanged = {"brightness": 1.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}
    for name, enhancer in (
        ("brightness", ImageEnhance.Brightness),
        ("contrast", ImageEnhance.Contrast),
        ("saturation", ImageEnhance.Color),
    ):
        found = _jitter(np.asarray(photo), **{**unchanged, name: factor}).astype(int)
        expected = np.asarray(enhancer(photo).enhance(factor)).astype(int)
        assert np.abs(found - expected).max() <= 2, name


def test_hue_turns_colors_but_not_grays_or_lightness():
    photo = (90 + np.asarray(noise(64, 64)) * (60 / 255)).astype(np.uint8)
    turned = _jitter(photo, 1.0, 1.0, 1.0, 0.1)
    assert np.abs(turned.astype(int) - photo).max() > 10
    grays = [np.asarray(Image.fromarray(x).convert("L")).astype(int) for x in (photo, turned)]
    assert np.abs(grays[0] - grays[1]).max() <= 2
    back = _jitter(turned, 1.0, 1.0, 1.0, -0.1)
    assert np.abs(back.astype(int) - photo).max() <= 2
    gray = np.full((16, 16, 3), 140, dtype=np.uint8)
    assert np.array_equal(_jitter(gray, 1.0, 1.0, 1.0, 0.3), gray)


def test_whole_image_is_never_enlarged():
    photo = noise(90, 60)
    plain = whole_image(photo)
    assert plain.dtype == torch.uint8
    assert np.array_equal(plain.numpy(), np.asarray(photo).transpose(2, 0, 1))
    assert torch.equal(whole_image(photo, max_side=90), plain)
    assert torch.equal(whole_image(photo, max_side=1000), plain)
    assert whole_image(photo, max_side=45).shape == (3, 30, 45)
    assert whole_image(noise(300, 2), max_side=10).shape == (3, 1, 10)


# The data set


@pytest.fixture
def photos(tmp_path: Path) -> LabelledImages:
    for label in range(3):
        (tmp_path / f"class{label}").mkdir()
        for index in range(4):
            photo = noise(60 + 10 * label, 70, seed=10 * label + index)
            photo.save(tmp_path / f"class{label}" / f"{index}.jpg")
    return read_labelled(tmp_path)


SMALL = CropSettings(size=32)


def test_a_crop_depends_on_seed_iteration_and_index_alone(photos):
    dataset = CropDataset(photos, SMALL, seed=7)
    assert len(dataset) == 12
    first = dataset[3, 5]
    assert first.label == 1
    assert first.errors == ()
    dataset[0, 1]
    assert torch.equal(dataset[3, 5].image, first.image)
    assert torch.equal(CropDataset(photos, SMALL, seed=7)[3, 5].image, first.image)
    for other in (
        CropDataset(photos, SMALL, seed=8)[3, 5],
        dataset[4, 5],
        dataset[5, 3],
    ):
        assert not torch.equal(other.image, first.image)


def test_boxes_are_respected(tmp_path):
    photo = Image.new("RGB", (100, 100), "red")
    photo.paste((0, 0, 255), (60, 20, 90, 80))
    photo.save(tmp_path / "a.png")
    (tmp_path / "t.csv").write_text("path,label,box\na.png,x,60 20 90 80\n")
    dataset = CropDataset(read_labelled(tmp_path / "t.csv"), CropSettings(size=16, **STILL), seed=0)
    crop = dataset[0, 0].image
    assert crop.float().mean((1, 2)).tolist() == [0.0, 0.0, 255.0]


class Drawn:
    """A generator of the random numbers that a data set draws for a crop."""

    def __init__(self, dataset, update, index):
        self.draws = dataset.draws(update, np.array([index]))

    def random(self, shape):
        assert self.draws.shape == shape
        return self.draws


def test_the_numbers_of_a_crop_are_uniform_and_depend_on_its_key_alone(photos):
    images = np.arange(5000)
    dataset = CropDataset(photos, SMALL, seed=7)
    draws = dataset.draws(3, images)
    assert draws.shape == (5000, 10)
    assert 0 <= draws.min() < 0.001 < 0.999 < draws.max() < 1
    shares = np.histogram(draws, 20, (0, 1))[0] / draws.size
    assert np.abs(shares - 0.05).max() < 0.005
    correlations = np.corrcoef(draws.T) - np.eye(10)
    assert np.abs(correlations).max() < 0.06
    assert abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < 0.06
    assert (dataset.draws(3, images[[42, 7]]) == draws[[42, 7]]).all()
    others = [CropDataset(photos, SMALL, seed=seed).draws(3, images) for seed in (8, -1, 2**70)]
    for other in (dataset.draws(4, images), *others):
        assert not (other == draws).any()


def test_a_photo_decoded_small_gives_the_same_crop(tmp_path):
    (tmp_path / "x").mkdir()
    path = tmp_path / "x" / "a.jpg"
    noise(900, 700).resize((1800, 1400)).save(path, quality=95)
    options = CropSettings(size=64, **STILL)
    assert load_image(path, min_side=options.min_side).size == (225, 175)
    dataset = CropDataset(read_labelled(tmp_path), options, seed=0)
    small = dataset[2, 0].image
    full = random_crop(load_image(path), options, Drawn(dataset, 2, 0))
    assert (small.float() - full.float()).abs().mean() < 2.0


def test_a_broken_photo_is_replaced_by_the_next_of_its_class(photos):
    for index in (4, 7):
        Path(photos.paths[index]).write_bytes(Path(photos.paths[index]).read_bytes()[:300])
    dataset = CropDataset(photos, SMALL, seed=1)
    stand_in = dataset[0, 4]
    assert stand_in.label == 1
    assert len(stand_in.errors) == 1
    assert photos.paths[4] in stand_in.errors[0]
    expected = random_crop(load_image(photos.paths[5]), SMALL, Drawn(dataset, 0, 4))
    assert torch.equal(stand_in.image, expected)
    assert torch.equal(dataset[0, 4].image, expected)

    # From the last of the class it goes round to the first, here broken too.
    round_trip = dataset[0, 7]
    assert all(photos.paths[i] in e for i, e in zip((7, 4), round_trip.errors, strict=True))
    expected = random_crop(load_image(photos.paths[5]), SMALL, Drawn(dataset, 0, 7))
    assert torch.equal(round_trip.image, expected)

    batch = collate([dataset[0, 4], dataset[0, 0], dataset[0, 7]])
    assert batch.images.shape == (3, 3, 32, 32)
    assert batch.labels.tolist() == [1, 0, 1]
    assert len(batch.errors) == 3
