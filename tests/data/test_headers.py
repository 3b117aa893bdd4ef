"""Files whose header would take seconds to read."""

import io
import os
import struct
import time
import zlib

import pytest
from PIL import Image

from listwise.data import decode_photos, read_images
from listwise.data.gpu_photos import usual_jpeg
from listwise.data.headers import MAX_PARTS, has_bounded_header
from listwise.data.images import ImageError, image_size, read_image_file


def encoded(kind: str, **options) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), "red").save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind))


JPEG, PNG, GIF = encoded("JPEG"), encoded("PNG"), encoded("GIF")
EMPTY = 10**6
SLOW = {
    "fill bytes": JPEG[:2] + b"\xff" * 5 * EMPTY + JPEG[2:],
    "bytes between segments": JPEG[:2] + b"\xff\xe0\0\2" + b"\0" * EMPTY + JPEG[2:],
    "empty segments": JPEG[:2] + b"\xff\xe5\0\2" * EMPTY + JPEG[2:],
    "chunks before the pixels": PNG[:33] + chunk(b"teXt") * EMPTY + PNG[33:],
    "chunks after the pixels": PNG[:-12] + chunk(b"teXt") * EMPTY + PNG[-12:],
    "tiny chunks of pixels": PNG[:33] + (chunk(b"IDAT", b"x")) * EMPTY + PNG[33:],
    "chunks without pixels": PNG[:33] + chunk(b"IDAT") * EMPTY + PNG[33:],
    "blocks": GIF[:-1].replace(b",\0\0\0\0", b"!\xfe\0" * EMPTY + b",\0\0\0\0", 1) + GIF[-1:],
    "parts of a block": GIF.replace(b",\0\0\0\0", b"!\xfe" + b"\1a" * EMPTY + b"\0,\0\0\0\0", 1),
}


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_header_is_refused_at_once(name):
    content = SLOW[name]
    assert len(content) > EMPTY
    started = time.perf_counter()
    with pytest.raises(ImageError, match=f"has more than {MAX_PARTS} parts"):
        image_size(io.BytesIO(content))
    assert time.perf_counter() - started < 0.2  # Pillow takes 0.5 s and more


def test_a_gpu_does_not_decode_them_either():
    for name in ("fill bytes", "empty segments"):
        started = time.perf_counter()
        assert usual_jpeg(SLOW[name]) is None
        assert time.perf_counter() - started < 0.1


def test_a_pipe_named_as_a_photo_is_reported(tmp_path):
    os.mkfifo(tmp_path / "a.jpg")
    (tmp_path / "b.jpg").write_bytes(JPEG)
    images = read_images(tmp_path)
    for read in (read_image_file, image_size):
        with pytest.raises(ImageError, match=r"a\.jpg.* is not a regular file"):
            read(images.paths[0])
    decoded = list(decode_photos(images.files()))
    assert isinstance(decoded[0], ImageError)
    assert decoded[1].size == (16, 16)


@pytest.mark.parametrize(
    "content", [JPEG, PNG, GIF, JPEG[:30], PNG[:40], GIF[:9], b"", b"\xff\xd8"]
)
def test_other_files_are_left_to_the_decoder(content):
    assert has_bounded_header(io.BytesIO(content))


def test_a_header_with_many_parts_is_read():
    photo = Image.effect_noise((64, 64), 60).convert("RGB")
    file = io.BytesIO()
    photo.save(file, "JPEG", icc_profile=bytes(600_000), exif=bytes(60_000), comment=b"a" * 60_000)
    assert image_size(file) == (64, 64)
    many = PNG[:33] + chunk(b"teXt") * (MAX_PARTS - 10) + PNG[33:]
    assert has_bounded_header(io.BytesIO(many))
