"""Headers of plain JPEG files are read as Pillow reads them, and all others are left to Pillow."""

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from listwise.data.headers import plain_jpeg_size
from listwise.data.images import exif_orientation

PHOTO = Image.effect_noise((37, 23), 60)


def jpeg(mode="RGB", **options):
    file = io.BytesIO()
    PHOTO.convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


def exif(orientation):
    made = Image.Exif()
    made[0x010F] = "maker"
    if orientation is not None:
        made[0x0112] = orientation
    return made


@pytest.mark.parametrize(("mode", "subsampling"), [("L", 0), ("RGB", 0), ("RGB", 1), ("RGB", 2)])
def test_plain_files(mode, subsampling):
    assert plain_jpeg_size(jpeg(mode, subsampling=subsampling)) == (37, 23)
    assert plain_jpeg_size(jpeg(mode, comment=b"\xff\xd8\xff\xc0")) == (37, 23)


@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
def test_orientations(orientation):
    content = jpeg(exif=exif(orientation))
    with Image.open(io.BytesIO(content)) as image:
        expected = exif_orientation(image)
    assert expected == (orientation or 1)
    assert plain_jpeg_size(content) == ((37, 23) if expected == 1 else None)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xd8\xff\xd9",
        jpeg()[:-1],  # cut off
        jpeg(progressive=True),
        jpeg("CMYK"),  # has a color transform of Adobe
        jpeg(keep_rgb=True),
        jpeg(exif=exif(9)),
        jpeg(xmp=b'<x tiff:Orientation="6"/>'),
        jpeg().replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c"),  # 12 bits
        jpeg().replace(b"\xff\xc0", b"\xff\xc9"),  # arithmetic coding
        jpeg()[:2] + b"\xff\xe2\x00\x06MPF\0" + jpeg()[2:],  # several pictures
    ],
)
def test_other_files_are_left_to_pillow(content):
    assert plain_jpeg_size(content) is None


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([1, 6]), st.integers(0, 700), st.binary(min_size=1, max_size=3))
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_header_is_read_as_pillow_reads_it_or_not_at_all(orientation, place, damage):
    content = jpeg(exif=exif(orientation))
    content = content[:place] + damage + content[place + len(damage) :]
    found = plain_jpeg_size(content)
    if found is not None:
        try:
            image = Image.open(io.BytesIO(content))
        except Exception:
            return  # decoding reports the error
        with image:
            assert (image.format, image.size) == ("JPEG", found)
            assert image.mode in ("L", "RGB")
            assert exif_orientation(image) == 1
