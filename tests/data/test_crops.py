import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance
from torch.utils.data import DataLoader

from listwise.data import (
    CropDataset,
    CropSettings,
    LabelledImages,
    UnreadableClassError,
    collate,
    load_image,
    random_crop,
    read_labelled,
    whole_image,
)
from listwise.data.crops import _jitter
from listwise.errors import InputError

STILL = {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0}
"""Settings under which colors do not change."""


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """A photo-like picture: soft noise in all colors."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(2, height // 8), max(2, width // 8), 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def compass(width: int, height: int) -> Image.Image:
    """Red grows from 28 to 228 with x, green with y."""
    x = 28 + 200 * (np.arange(width) + 0.5) / width
    y = 28 + 200 * (np.arange(height) + 0.5) / height
    red, green = np.meshgrid(x, y)
    return Image.fromarray(
        np.stack([red, green, np.full_like(red, 128)], axis=2).round().astype(np.uint8)
    )


def generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_shape_and_repeatability():
    photo = noise(120, 90)
    options = CropSettings(size=64)
    crops = [random_crop(photo, options, generator(seed)) for seed in (1, 1, 2)]
    for crop in crops:
        assert crop.shape == (3, 64, 64)
        assert crop.dtype == torch.uint8
        assert crop.is_contiguous()
    assert torch.equal(crops[0], crops[1])
    assert not torch.equal(crops[0], crops[2])


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


@given(
    width=st.integers(150, 500),
    height=st.integers(150, 500),
    rotation=st.sampled_from([0.0, 10.0, 40.0, 180.0]),
    max_ratio=st.sampled_from([1.0, 4 / 3]),
    min_area=st.sampled_from([0.3, 0.6, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_geometry_is_what_the_settings_say(width, height, rotation, max_ratio, min_area, seed):
    # The colors of the crop tell where in the photo each of its pixels comes from.
    size = 100
    options = CropSettings(
        size=size, rotation=rotation, max_ratio=max_ratio, min_area=min_area, **STILL
    )
    crop = random_crop(compass(width, height), options, generator(seed)).numpy().astype(float)
    steps = (np.arange(size) + 0.5) / size
    v, u = np.meshgrid(steps, steps, indexing="ij")
    design = np.stack([np.ones(size * size), u.ravel(), v.ravel()], axis=1)
    x, y = (
        np.linalg.lstsq(design, (crop[band].ravel() - 28) / 200 * side, rcond=None)[0]
        for band, side in ((0, width), (1, height))
    )
    across, down = np.array([x[1], y[1]]), np.array([x[2], y[2]])
    long, tall = np.linalg.norm(across), np.linalg.norm(down)
    slack = 1.5  # pixels, for the rounding of colors

    assert abs(across @ down) / (long * tall) < 0.03
    assert across[0] * down[1] - across[1] * down[0] > 0  # not mirrored
    assert abs(math.degrees(math.atan2(across[1], across[0]))) <= rotation + 1.0
    assert 1 / max_ratio - 0.03 <= long / tall <= max_ratio + 0.03
    corners = [np.array([x[0], y[0]]) + a * across + b * down for a in (0, 1) for b in (0, 1)]
    for corner in corners:
        assert -slack <= corner[0] <= width + slack
        assert -slack <= corner[1] <= height + slack
    # Area, against the largest rectangle of the same shape and direction that fits.
    spans = np.ptp(np.array(corners), axis=0)
    largest = min(width / spans[0], height / spans[1]) ** 2
    assert 1 / largest >= min_area - 0.04


def test_crops_are_spread_over_the_photo():
    photo = compass(400, 200)
    options = CropSettings(size=32, min_area=0.25, max_ratio=1.0, rotation=0.0, **STILL)
    crops = torch.stack([random_crop(photo, options, generator(s)).float() for s in range(200)])
    left = (crops[:, 0].mean((1, 2)) - 28) / 200 * 400
    widths = (crops[:, 0, 0, -1] - crops[:, 0, 0, 0]) / 200 * 400 * 32 / 31
    assert left.min() < 120
    assert left.max() > 280
    assert left.mean() == pytest.approx(200, abs=20)
    assert widths.min() < 120
    assert widths.max() > 180


@pytest.mark.parametrize("side", [60, 100, 137, 640])
def test_whole_square_photo_is_a_plain_resize(side):
    photo = noise(side, side)
    options = CropSettings(size=100, min_area=1.0, max_ratio=1.0, rotation=0.0, **STILL)
    crop = random_crop(photo, options, generator(0))
    plain = np.asarray(photo.resize((100, 100), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    difference = np.abs(crop.numpy().astype(int) - plain.astype(int))
    assert difference.max() <= 3
    assert difference.mean() < 1.0


@pytest.mark.parametrize("side", [60, 150, 640])
def test_a_tiny_rotation_hardly_changes_the_crop(side):
    # The two ways to resample, with and without rotation, must agree where they meet.
    photo = noise(side, side).resize((side // 4, side // 4)).resize((side, side))
    crops = [
        random_crop(
            photo,
            CropSettings(size=100, min_area=1.0, max_ratio=1.0, rotation=angle, **STILL),
            generator(0),
        )
        for angle in (0.0, 0.01)
    ]
    assert (crops[0].float() - crops[1].float()).abs().mean() < 2.0


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
@pytest.mark.parametrize("seed", range(4))
def test_crops_of_a_smooth_picture_are_its_values_at_the_rectangles_points(size, seed):
    # Enlarged (in more than one strip) or reduced: the picture is known between its pixels.
    width, height = 330, 280

    def shade(x, y):
        waves = np.sin(x / 41 + y / 67), np.cos(x / 53 - y / 37), np.sin(x / 71) * np.cos(y / 47)
        return 127.5 + 100 * np.stack(waves)

    grid = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
    photo = Image.fromarray(shade(*grid).round().astype(np.uint8).transpose(1, 2, 0))
    options = CropSettings(size=size, rotation=60.0, **STILL)
    crop = random_crop(photo, options, generator(seed)).numpy().astype(np.float64)
    corner, across, down = rectangle(width, height, options, seed)
    steps = (np.arange(size) + 0.5) / size
    v, u = np.meshgrid(steps, steps, indexing="ij")
    x, y = (corner[i] + u * across[i] + v * down[i] for i in (0, 1))
    difference = np.abs(crop - shade(x, y))
    # A reduced pixel is a mean over many: waves lose some of their height.
    assert difference.max() < (2.5 if size > 40 else 5.0)
    assert difference.mean() < (0.6 if size > 40 else 1.5)


@pytest.mark.parametrize("size", [190, 128, 100])
def test_crops_look_as_pillow_would_make_them(size):
    # Reduced with a filter that widens, then turned: the same picture by other code.
    width, height = 220, 180
    photo = noise(width, height)
    options = CropSettings(size=size, rotation=20.0, **STILL)
    for seed in range(4):
        crop = random_crop(photo, options, generator(seed)).numpy().astype(int)
        corner, across, down = rectangle(width, height, options, seed)
        reduction = max(1.0, float(np.linalg.norm(across) * np.linalg.norm(down)) ** 0.5 / size)
        small = (round(width / reduction), round(height / reduction))
        shrink = np.array([small[0] / width, small[1] / height])
        (a, d), (b, e), (c, f) = across * shrink / size, down * shrink / size, corner * shrink
        made = photo.resize(small, Image.Resampling.BICUBIC).transform(
            (size, size),
            Image.Transform.AFFINE,
            (a, b, c, d, e, f),
            Image.Resampling.BICUBIC,
        )
        # Outside of its picture Pillow's transform is black, and frays at the edge.
        inner = np.s_[:, 2:-2, 2:-2]
        expected = np.asarray(made).transpose(2, 0, 1).astype(int)
        assert np.abs(crop - expected)[inner].mean() < 2.0


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


def test_jitter_stays_within_its_limits():
    photo = Image.new("RGB", (32, 32), (100, 100, 100))
    options = CropSettings(size=8, **{**STILL, "brightness": 0.2})
    values = [int(random_crop(photo, options, generator(seed))[0, 0, 0]) for seed in range(100)]
    assert 80 <= min(values) < 88
    assert 112 < max(values) <= 120


@pytest.mark.parametrize(
    "wrong",
    [{"size": 0}, {"min_area": 0.8, "max_area": 0.5}, {"rotation": -1}, {"color": 1}],
)
def test_settings_are_checked(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CropSettings(**wrong)


@pytest.mark.parametrize("area", [0.3, 0.5, 1.0])
def test_min_side_is_where_the_smallest_crop_keeps_its_pixels(area):
    options = CropSettings(
        size=100, min_area=area, max_area=area, max_ratio=1.0, rotation=0.0, **STILL
    )
    side = options.min_side
    crop = random_crop(compass(side + 200, side), options, generator(0)).numpy().astype(float)
    pixels_down = (crop[1, -1].mean() - crop[1, 0].mean()) / 200 * side * 100 / 99
    assert pixels_down == pytest.approx(100, abs=1.5)


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


def test_loader_with_workers_gives_what_the_data_set_gives(photos):
    dataset = CropDataset(photos, SMALL, seed=1)
    batches = [[(iteration, index) for index in (0, 5, 11)] for iteration in range(4)]
    for workers in (0, 2):
        loader = DataLoader(dataset, batch_sampler=batches, collate_fn=collate, num_workers=workers)
        found = list(loader)
        assert len(found) == 4
        for keys, batch in zip(batches, found, strict=True):
            assert batch.images.shape == (3, 3, 32, 32)
            assert batch.images.dtype == torch.uint8
            assert batch.labels.tolist() == [0, 1, 2]
            assert batch.labels.dtype == torch.int64
            assert batch.errors == ()
            for key, image in zip(keys, batch.images, strict=True):
                assert torch.equal(dataset[key].image, image)


def test_boxes_are_respected(tmp_path):
    photo = Image.new("RGB", (100, 100), "red")
    photo.paste((0, 0, 255), (60, 20, 90, 80))
    photo.save(tmp_path / "a.png")
    (tmp_path / "t.csv").write_text("path,label,box\na.png,x,60 20 90 80\n")
    dataset = CropDataset(read_labelled(tmp_path / "t.csv"), CropSettings(size=16, **STILL), seed=0)
    crop = dataset[0, 0].image
    assert crop.float().mean((1, 2)).tolist() == [0.0, 0.0, 255.0]


def test_a_photo_decoded_small_gives_the_same_crop(tmp_path):
    (tmp_path / "x").mkdir()
    path = tmp_path / "x" / "a.jpg"
    noise(900, 700).resize((1800, 1400)).save(path, quality=95)
    options = CropSettings(size=64, **STILL)
    assert load_image(path, min_side=options.min_side).size == (225, 175)
    small = CropDataset(read_labelled(tmp_path), options, seed=0)[2, 0].image
    full = random_crop(load_image(path), options, np.random.default_rng([0, 2, 0]))
    assert (small.float() - full.float()).abs().mean() < 2.0


def test_a_broken_photo_is_replaced_by_the_next_of_its_class(photos):
    for index in (4, 7):
        Path(photos.paths[index]).write_bytes(Path(photos.paths[index]).read_bytes()[:300])
    dataset = CropDataset(photos, SMALL, seed=1)
    stand_in = dataset[0, 4]
    assert stand_in.label == 1
    assert len(stand_in.errors) == 1
    assert photos.paths[4] in stand_in.errors[0]
    expected = random_crop(load_image(photos.paths[5]), SMALL, np.random.default_rng([1, 0, 4]))
    assert torch.equal(stand_in.image, expected)
    assert torch.equal(dataset[0, 4].image, expected)

    # From the last of the class it goes round to the first, here broken too.
    round_trip = dataset[0, 7]
    assert all(photos.paths[i] in e for i, e in zip((7, 4), round_trip.errors, strict=True))
    expected = random_crop(load_image(photos.paths[5]), SMALL, np.random.default_rng([1, 0, 7]))
    assert torch.equal(round_trip.image, expected)

    batch = collate([dataset[0, 4], dataset[0, 0], dataset[0, 7]])
    assert batch.images.shape == (3, 3, 32, 32)
    assert batch.labels.tolist() == [1, 0, 1]
    assert len(batch.errors) == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_a_class_without_readable_photo_is_one_line(photos, workers):
    for index in range(8, 12):
        Path(photos.paths[index]).write_bytes(b"")
    loader = DataLoader(
        CropDataset(photos, SMALL, seed=0),
        batch_sampler=[[(0, 9)]],
        collate_fn=collate,
        num_workers=workers,
    )
    with pytest.raises(UnreadableClassError) as caught:
        list(loader)
    assert isinstance(caught.value, InputError)
    message = str(caught.value)
    assert message.startswith("no photo of the class 'class2'")
    assert photos.paths[9] in message
    assert "\n" not in message
