"""Photos in every format that is read, and random damage to files."""

import io
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image, features

FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"] + ["AVIF"] * features.check("avif")
FORMATS += ["HEIF"] * (find_spec("pillow_heif") is not None)
SUFFIXES = [".jpg", ".png", ".webp", ".gif", ".tiff", ".bmp", ".avif", ".heic"]
LARGE = [0x7FFFFFFF, 0xFFFF, 0x10000, 20_000, 7_000, 0]


def encoded_photos(seed: int) -> list[bytes]:
    """A small photo in each format, some with an alpha channel, a palette or 16 bits."""
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 256, (int(generator.integers(8, 48)), 32, 3), dtype=np.uint8)
    photo = Image.fromarray(pixels).resize((40, 40))
    variants = [(photo, kind) for kind in FORMATS]
    variants += [(photo.convert("RGBA"), "PNG"), (photo.convert("P"), "PNG")]
    variants += [(photo.convert("CMYK"), "JPEG"), (photo.convert("I;16"), "PNG")]
    files = []
    for image, kind in variants:
        buffer = io.BytesIO()
        if kind == "HEIF":
            from pillow_heif import from_pillow

            from_pillow(image).save(buffer)
        else:
            image.save(buffer, kind)
        files.append(buffer.getvalue())
    return files


def mutate(data: bytes, generator: np.random.Generator) -> bytes:
    """A file with one to four random damages."""
    content = bytearray(data)
    for _ in range(int(generator.integers(1, 5))):
        start = int(generator.integers(0, len(content)))
        length = int(generator.integers(1, 32))
        match int(generator.integers(0, 6)):
            case 0:
                content[start] ^= 1 << int(generator.integers(0, 8))
            case 1:
                content[start : start + length] = generator.bytes(length)
            case 2 if len(content) > 2 * length:
                del content[start : start + length]
            case 3:
                content[start:start] = content[:length]
            case 4:
                del content[max(start, 1) :]
            case _:
                # Sizes stand near the start of a file.
                start = int(generator.integers(0, min(64, len(content))))
                order = "big" if generator.random() < 0.5 else "little"
                content[start : start + 4] = int(generator.choice(LARGE)).to_bytes(4, order)
    return bytes(content)


def write_mutated(folder: Path, count: int, seed: int = 0) -> Iterator[Path]:
    """Write `count` damaged photos into a folder, under names with any suffix of a photo."""
    generator = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        if number % 100 == 0:
            originals = encoded_photos(seed + number)
        original = originals[int(generator.integers(len(originals)))]
        suffix = str(generator.choice(SUFFIXES))
        path = folder / f"{number:06}{suffix}"
        path.write_bytes(mutate(original, generator))
        yield path
