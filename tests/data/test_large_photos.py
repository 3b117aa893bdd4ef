"""Photos as large as cameras make them: decoded at a part of their size, in little memory."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from listwise.data import Decoding, PhotoFile, decode_photos, load_image
from listwise.data.images import decode_image
from listwise.data.photos import open_photo

ORIENTATION = 0x0112


def picture(width: int, height: int) -> Image.Image:
    """A smooth picture without symmetry."""
    y, x = np.ogrid[0:height, 0:width]
    waves = [(x / a, y / b) for a, b in ((370, 910), (530, 290), (710, 670))]
    bands = [127 + 60 * np.sin(across) + 60 * np.cos(down) for across, down in waves]
    return Image.fromarray(np.stack(bands, axis=2).astype(np.uint8))


@pytest.fixture(scope="module")
def photo() -> Image.Image:
    """12 megapixels, as most phones make them."""
    return picture(4096, 3072)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, photo) -> Path:
    """The same photo in several kinds of files."""
    folder = tmp_path_factory.mktemp("photos")
    photo.save(folder / "a.jpg", quality=90)
    photo.save(
        folder / "stereo.jpg", "MPO", save_all=True, append_images=[Image.new("RGB", (9, 9))]
    )
    photo.save(folder / "a.png", compress_level=1)
    return folder


@pytest.mark.parametrize("name", ["a.jpg", "stereo.jpg"])
@pytest.mark.parametrize(
    ("box", "max_side", "long_side"),
    [
        (None, None, 4096),
        (None, 1025, 4096),
        (None, 1024, 2048),
        (None, 513, 2048),
        (None, 512, 1024),
        (None, 8, 1024),
        ((0, 0, 2047, 100), 8, 2047),
        ((100, 200, 2148, 300), 8, 1024),
        ((100, 200, 2148, 300), 513, 2048),
        ((0, 0, 9999, 100), 8, 1024),
    ],
)
def test_a_jpeg_file_is_decoded_at_a_part_of_its_size(folder, name, box, max_side, long_side):
    found = decode_image(folder / name, box, None, max_side)
    assert max(found.image.size) == long_side
    assert found.whole == (4096, 3072)
    left, top, right, bottom = (0, 0, 4096, 3072) if box is None else box
    assert found.size == (min(right, 4096) - left, min(bottom, 3072) - top)
    assert found.corner == (left, top)
    assert found.scale == found.size[0] / found.image.width


@pytest.mark.parametrize("turn", range(1, 9))
def test_a_box_of_a_reduced_photo_is_the_box_of_the_whole(tmp_path, turn):
    exif = Image.Exif()
    exif[ORIENTATION] = turn
    picture(2600, 2100).save(tmp_path / "a.jpg", quality=95, exif=exif)
    box = (33, 7, 2090, 1801)
    whole = load_image(tmp_path / "a.jpg")
    reference = whole.crop(box).resize((200, 174), Image.Resampling.BICUBIC)
    assert max(decode_image(tmp_path / "a.jpg", box, None, 200).image.size) < 1100
    found = load_image(tmp_path / "a.jpg", box, max_side=200)
    assert found.size == (200, 174)
    assert np.abs(np.asarray(found).astype(int) - np.asarray(reference)).max() <= 3


@pytest.mark.parametrize("name", ["a.jpg", "stereo.jpg", "a.png"])
@pytest.mark.parametrize("box", [None, (100.0, 50.0, 3000.0, 2500.0)])
def test_the_same_pixels_whatever_else_is_wanted(folder, name, box):
    path = folder / name
    seen = []

    def local(image, corner, scale):
        seen.append((image.size, corner, scale))
        return b"features"

    found = load_image(path, box, max_side=512)
    plain = torch.from_numpy(np.array(found)).permute(2, 0, 1)
    file = PhotoFile(str(path), box)
    for how in (
        Decoding(512),
        Decoding(512, thumbnail=True),
        Decoding(512, local=local),
        Decoding(512, thumbnail=True, local=local),
    ):
        decoded = file.decode(how)
        assert torch.equal(decoded.pixels, plain)
        assert Image.open(io.BytesIO(decoded.thumbnail)).size[0] == 320 if how.thumbnail else True
    assert np.array_equal(np.asarray(file.image(max_side=512)), np.asarray(found))
    assert len(seen) == 2
    (width, height), corner, scale = seen[0]
    assert max(width, height) >= 1024
    assert corner == ((0, 0) if box is None else (100, 50))
    assert scale == decoded.size[0] / width
    if box is None:
        assert np.array_equal(np.asarray(open_photo(path, None, 512)), np.asarray(found))
        (row,) = decode_photos([file], Decoding(512))
        assert torch.equal(row.pixels, plain)


def test_given_photos_are_reduced_too(photo):
    small = open_photo(photo, None, 512)
    assert small.size == (512, 384)
    assert np.array_equal(np.asarray(small), np.asarray(open_photo(np.asarray(photo), None, 512)))
    assert open_photo(photo).size == photo.size
    assert open_photo(small, (0, 0, 200, 100), 512).size == (200, 100)


def as_kind(kind: str, photo: Image.Image) -> Image.Image:
    gray = np.asarray(photo.convert("L")).astype(np.float32)
    if kind in ("I;16", "I", "F"):
        values = {"I;16": gray * 257, "I": gray * 1e6 - 9e6, "F": gray / 255}[kind]
        types = {"I;16": np.uint16, "I": np.int32, "F": np.float32}
        return Image.fromarray(values.astype(types[kind]))
    if kind == "RGBA":
        photo = photo.copy()
        photo.putalpha(photo.getchannel(2).transpose(Image.Transpose.FLIP_LEFT_RIGHT))
        return photo
    return (
        photo.quantize(64, method=Image.Quantize.FASTOCTREE) if kind == "P" else photo.convert(kind)
    )


@pytest.mark.parametrize("kind", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16", "I", "F", "CMYK"])
def test_every_kind_of_image_is_reduced_before_it_is_converted(tmp_path, kind):
    image = as_kind(kind, picture(2200, 600))
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    name = "a.tif" if kind in ("I", "F", "CMYK") else "a.png"
    options = {"tiffinfo": exif} if name == "a.tif" else {"exif": exif, "compress_level": 1}
    image.save(tmp_path / name, **options)
    found = decode_image(tmp_path / name, None, None, 300)
    assert found.image.size == (300, 1100)
    whole = load_image(tmp_path / name)
    assert whole.size == found.whole == (600, 2200)
    size = found.reduced(300).image.size
    reference = whole.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
    difference = np.asarray(found.reduced(300).image).astype(int) - np.asarray(reference)
    assert np.abs(difference).max() <= 3
    assert np.asarray(reference).std() > 20


def test_transparent_colors_are_not_averaged_with_others(tmp_path):
    colors = np.indices((1, 4096)).sum(0) % 2
    image = Image.fromarray(np.repeat(colors.astype(np.uint8), 8, 0))
    image.putpalette([0, 0, 0, 200, 100, 50])
    image.save(tmp_path / "a.png", transparency=0)
    found = np.asarray(load_image(tmp_path / "a.png", max_side=64)).astype(int)
    expected = np.add([255, 255, 255], [200, 100, 50]) / 2
    assert np.abs(found - expected).max() <= 1
