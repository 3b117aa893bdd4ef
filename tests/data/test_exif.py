"""What a camera wrote into photos: when, where, and with which camera."""

import pytest
from index_examples import texture
from PIL import Image
from PIL.TiffImagePlugin import IFDRational

from listwise.data.photos import PhotoFile

TAKEN = "2019:12:31 23:59:59"
PLACE = {1: "N", 2: (48.0, 51.0, 30.0), 3: "W", 4: (0.0, 7.0, 39.9)}


def save(path, details=None, place=None, number=0, **tags):
    exif = Image.Exif()
    names = {"maker": 0x010F, "model": 0x0110, "changed": 0x0132}
    for name, value in tags.items():
        exif[names[name]] = value
    exif.get_ifd(0x8769).update(details or {})
    exif.get_ifd(0x8825).update(place or {})
    texture(number).save(path, exif=exif)
    return PhotoFile(str(path))


@pytest.mark.parametrize("kind", ["jpg", "png", "webp"])
def test_every_format_has_them(tmp_path, kind):
    photo = save(tmp_path / f"a.{kind}", {0x9003: TAKEN}, PLACE, maker="Apple", model="iPhone 15")
    assert photo.exif() == {
        "date": "2019-12-31T23:59:59",
        "latitude": "48.858333",
        "longitude": "-0.127750",
        "camera": "Apple iPhone 15",
    }


@pytest.mark.parametrize(
    ("details", "place", "tags", "expected"),
    [
        ({}, {}, {}, {}),
        ({0x9003: "    :  :     :  :  "}, {}, {}, {}),
        ({0x9003: "0000:00:00 00:00:00"}, {}, {}, {}),
        ({}, {}, {"changed": TAKEN}, {"date": "2019-12-31T23:59:59"}),
        ({}, {}, {"maker": "Canon", "model": "Canon\n EOS\0 5D"}, {"camera": "Canon EOS 5D"}),
        ({}, {2: (91.0, 0.0, 0.0), 4: (1.0, 2.0)}, {}, {}),
        ({}, {2: (IFDRational(0, 0),) * 3, 4: (1.0,)}, {}, {}),
        ({}, {2: (1.0, 30.0, 0.0)}, {}, {"latitude": "1.500000"}),
    ],
)
def test_what_is_missing_or_wrong_is_left_out(tmp_path, details, place, tags, expected):
    assert save(tmp_path / "a.jpg", details, place, **tags).exif() == expected


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damaged_data_is_left_out(tmp_path):
    photo = save(tmp_path / "a.jpg", {0x9003: TAKEN}, PLACE)
    content = (tmp_path / "a.jpg").read_bytes()
    at = content.index(b"Exif")
    for start in range(at, at + 120, 3):
        damaged = content[:start] + b"\xff\xfe\x7f" + content[start + 3 :]
        assert isinstance(photo._replace(content=damaged).exif(), dict)
