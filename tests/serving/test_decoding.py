"""Photos of requests: what is decoded, and where it lies in the whole photo."""

import io

import numpy as np
import pytest
from index_examples import texture
from PIL import Image

from listwise.data import ImageError, load_image
from listwise.serving.decoding import decode_query


def saved(photo, kind, orientation=1):
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"JPEG": {"quality": 95}, "PNG": {"compress_level": 1}}
    photo.save(file, kind, exif=exif, **options[kind])
    return file


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("box", [None, (150, 90, 1150, 690), (30, 40, 130, 100)])
def test_it_is_the_part_reduced(kind, orientation, box):
    file = saved(texture(3, (1280, 960)), kind, orientation)
    found = decode_query(file, box, 120)
    exact = load_image(file, box)
    size = exact.size
    exact.thumbnail((120, 120), Image.Resampling.BICUBIC)
    assert abs(found.image.width - exact.width) <= 1
    assert abs(found.image.height - exact.height) <= 1
    other = np.asarray(exact.resize(found.image.size), float)
    assert abs(np.asarray(found.image, float) - other).mean() < 6
    corners = np.array([[-0.5, -0.5], [found.image.width - 0.5, found.image.height - 0.5]])
    left, top = (0, 0) if box is None else box[:2]
    expected = np.array([[left, top], [left + size[0], top + size[1]]]) - 0.5
    assert found.in_whole_photo(corners) == pytest.approx(expected, abs=12)


def test_small_photos_stay_as_they_are():
    photo = texture(1, (90, 60))
    found = decode_query(saved(photo, "PNG"), (10, 20, 50, 60), 120)
    assert np.array_equal(np.asarray(found.image), np.asarray(photo.crop((10, 20, 50, 60))))
    points = np.array([[0.0, 0.0], [3.0, 4.0]], np.float32)
    assert found.in_whole_photo(points).tolist() == [[10, 20], [13, 24]]


def test_a_box_outside_is_refused():
    with pytest.raises(ImageError, match="outside the image of 90 × 60"):
        decode_query(saved(texture(1, (90, 60)), "PNG"), (100, 0, 120, 20), 120)
