"""Bound the work of reading the header of an image file.

Pillow reads the parts of a header one by one in Python. Millions of empty parts fit into a small
file, and would keep all threads of a server waiting for seconds.
"""

from collections.abc import Iterator
from typing import BinaryIO

# Parts of the header of one file, and bytes between them. Photos of cameras have dozens.
MAX_PARTS = 2000
# A chunk of a PNG file with fewer bytes counts as a part.
MIN_PIXELS = 256


def has_bounded_header(file: BinaryIO) -> bool:
    """Return whether a file has at most `MAX_PARTS` parts beside its pixels.

    JPEG, PNG and GIF files are read; others are not affected.
    """
    file.seek(0)
    prefix = file.read(8)
    if prefix.startswith(b"\xff\xd8"):
        parts = _jpeg_parts(file)
    elif prefix == b"\x89PNG\r\n\x1a\n":
        parts = _png_parts(file)
    elif prefix.startswith(b"GIF8"):
        parts = _gif_parts(file)
    else:
        return True
    return all(count < MAX_PARTS for count, _ in enumerate(parts))


def _jpeg_parts(file: BinaryIO) -> Iterator[None]:
    """Yield at each segment before the pixels, and at each byte that belongs to none."""
    place = 2
    while True:
        file.seek(place)
        start = file.read(4)
        if len(start) < 4 or start[:2] == b"\xff\xda":
            return
        yield
        if start[0] != 0xFF or start[1] in (0x00, 0xFF):
            place += 1
        elif 0xD0 <= start[1] <= 0xD9 or start[1] == 0x01:  # a marker alone
            place += 2
        else:
            place += 2 + int.from_bytes(start[2:], "big")


def _png_parts(file: BinaryIO) -> Iterator[None]:
    """Yield at each chunk without pixels, or with few of them."""
    while True:
        start = file.read(8)
        length = int.from_bytes(start[:4], "big")
        if len(start) < 8:
            return
        if start[4:] not in (b"IDAT", b"fdAT") or length < MIN_PIXELS:
            yield
        file.seek(length + 4, 1)


def _gif_parts(file: BinaryIO) -> Iterator[None]:
    """Yield at each block before the first image."""
    file.seek(10)
    flags = file.read(3)[:1]
    colors = 2 << (flags[0] & 7) if flags and flags[0] & 0x80 else 0
    file.seek(13 + 3 * colors)
    while (kind := file.read(1)) not in (b"", b",", b";"):
        yield
        if kind == b"!":
            file.seek(1, 1)
            while (size := file.read(1)) not in (b"", b"\0"):
                yield
                file.seek(size[0], 1)
