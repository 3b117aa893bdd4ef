import struct
import sys
import zlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, features

from listwise.data import (
    ImageError,
    image_size,
    list_images,
    load_image,
    read_images,
    read_labelled,
)
from listwise.data.images import TooManyPixelsError, decoding_pixels
from listwise.errors import InputError, ListwiseWarning

WIDTH, HEIGHT = 24, 16
# Formats that not every Pillow reads, or that another package reads.
AVIF = ["a.avif"] * features.check("avif")
HEIC = ["a.heic"] * (find_spec("pillow_heif") is not None)


def save(image: Image.Image, path: Path, **options: object) -> None:
    """Save an image; a HEIC file too."""
    if path.suffix == ".heic":
        import pillow_heif

        file = pillow_heif.from_bytes(image.mode, image.size, image.tobytes())
        if "turned" in options:  # its orientation is stored twice: as EXIF data and as its own
            file.info["exif"] = options.pop("turned").tobytes()  # type: ignore[attr-defined]
        file.save(path, **{"quality": -1, "chroma": 444, **options})
    else:
        if path.suffix == ".avif":
            options = {"quality": 100, "subsampling": "4:4:4", **options}
        image.save(path, **options)


def stored_mode(path: Path) -> str:
    with Image.open(path) as image:
        return image.mode


def tiff_tag(path: Path, tag: int) -> object:
    with Image.open(path) as image:
        return image.tag_v2[tag]  # type: ignore[attr-defined]


def smooth_rgb(width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    """A picture without symmetry, smooth so that lossy formats keep it."""
    y, x = np.mgrid[0:height, 0:width]
    red = 20 + 200 * x / width
    green = 30 + 180 * y / height
    blue = 40 + 80 * (x + y) / (width + height)
    return np.stack([red, green, blue], axis=2).round().astype(np.uint8)


def pixels(path: Path, **options: object) -> np.ndarray:
    image = load_image(path, **options)  # type: ignore[arg-type]
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


def png_bytes(width: int, height: int, depth: int, color_type: int, rows: bytes) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("name", "options", "tolerance"),
    [
        ("cmyk.jpg", {"quality": 98}, 6),
        ("cmyk.tif", {}, 0),
        ("a.png", {}, 0),
        ("a.tif", {}, 0),
        ("lzw.tiff", {"compression": "tiff_lzw"}, 0),
        ("a.webp", {"lossless": True}, 0),
        ("lossy.webp", {"quality": 95}, 12),
        ("a.jpg", {"quality": 95, "subsampling": 0}, 4),
        ("A.JPEG", {"quality": 95, "subsampling": 0, "progressive": True}, 4),
        ("a.bmp", {}, 0),
        *((name, {}, 4) for name in AVIF + HEIC),
    ],
)
def test_rgb_files(tmp_path, name, options, tolerance):
    rgb, mode = smooth_rgb(), "CMYK" if name.startswith("cmyk") else "RGB"
    save(Image.fromarray(rgb).convert(mode), tmp_path / name, **options)
    assert name in HEIC or stored_mode(tmp_path / name) == mode
    assert np.abs(pixels(tmp_path / name) - rgb).max() <= tolerance
    assert image_size(tmp_path / name) == (WIDTH, HEIGHT)


@pytest.mark.parametrize(
    ("suffix", "bits"), [("png", 8), ("tif", 8), ("gif", 8), ("png", 1), ("tif", 1)]
)
def test_gray(tmp_path, suffix, bits):
    gray = smooth_rgb()[:, :, 0] if bits == 8 else smooth_rgb()[:, :, 0] > 120
    Image.fromarray(gray).save(tmp_path / f"a.{suffix}")
    expected = np.repeat(gray[:, :, None] * (1 if bits == 8 else 255), 3, 2)
    assert np.array_equal(pixels(tmp_path / f"a.{suffix}"), expected)


def test_alpha_is_laid_on_white(tmp_path):
    rgb = smooth_rgb()
    alpha = np.linspace(0, 255, WIDTH * HEIGHT).round().astype(np.uint8).reshape(HEIGHT, WIDTH)
    share = alpha[:, :, None] / 255.0
    expected = rgb * share + 255.0 * (1.0 - share)
    rgba = Image.fromarray(np.dstack([rgb, alpha]))
    for name in ("a.png", "a.tif", "a.webp", *AVIF, *HEIC):
        options = {"lossless": True, "exact": True} if "webp" in name else {}
        save(rgba, tmp_path / name, **options)
        tolerance = 4.0 if name in AVIF + HEIC else 1.0
        assert np.abs(pixels(tmp_path / name) - expected).max() <= tolerance

    gray = rgb[:, :, 0]
    Image.merge("LA", [Image.fromarray(gray), Image.fromarray(alpha)]).save(tmp_path / "la.png")
    assert stored_mode(tmp_path / "la.png") == "LA"
    expected = gray[:, :, None] * share + 255.0 * (1.0 - share)
    assert np.abs(pixels(tmp_path / "la.png") - expected).max() <= 1.0


@pytest.mark.parametrize(
    ("suffix", "transparency"), [("png", 1), ("png", bytes([255, 0, 128])), ("gif", 1)]
)
def test_palette_with_transparency(tmp_path, suffix, transparency):
    colors = np.array([[200, 10, 20], [10, 210, 30], [40, 50, 220]])
    indices = (np.arange(WIDTH * HEIGHT) % 3).astype(np.uint8).reshape(HEIGHT, WIDTH)
    image = Image.fromarray(indices)
    image.putpalette(colors.astype(np.uint8).tobytes())
    image.save(tmp_path / f"a.{suffix}", transparency=transparency)

    expected = colors.astype(float)
    expected[1] = 255.0
    if isinstance(transparency, bytes):
        expected[2] = expected[2] * 128 / 255 + 255 * (1 - 128 / 255)
    assert np.abs(pixels(tmp_path / f"a.{suffix}") - expected[indices]).max() <= 1.0


@pytest.mark.parametrize(("mode", "key"), [("RGB", (200, 10, 20)), ("L", 77), ("1", 0)])
def test_one_transparent_color(tmp_path, mode, key):
    image = Image.new(mode, (4, 2), key)
    image.paste(255 if mode != "RGB" else (1, 2, 3), (0, 0, 1, 2))
    image.save(tmp_path / "a.png", transparency=key)
    found = pixels(tmp_path / "a.png")
    assert (found[:, 1:] == 255).all()
    assert (found[:, 0] == ((1, 2, 3) if mode == "RGB" else 255)).all()


SHADES = np.array([[0, 256, 257, 4096], [32768, 40000, 65534, 65535]], dtype=np.uint16)
SHADES_8_BIT = np.array([[0, 1, 1, 16], [128, 156, 255, 255]])


@pytest.mark.parametrize("name", ["a.png", "a.tif", "big_endian.tif", "white_is_zero.tif"])
def test_16_bit_gray_is_scaled(tmp_path, name):
    path, expected = tmp_path / name, SHADES_8_BIT
    if name == "big_endian.tif":
        Image.frombytes("I;16B", (4, 2), SHADES.astype(">u2").tobytes()).save(path)
    else:
        Image.fromarray(SHADES).save(path)
    if name == "white_is_zero.tif":
        black, white = (struct.pack("<HHIHH", 262, 3, 1, n, 0) for n in (1, 0))
        path.write_bytes(path.read_bytes().replace(black, white))
        assert tiff_tag(path, 262) == 0
        expected = 255 - SHADES / 257.0
    found = pixels(path)
    assert np.abs(found - expected[:, :, None]).max() <= (name == "white_is_zero.tif")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (SHADES.astype(np.int32), SHADES_8_BIT),
        (np.array([[0, 100, 200, 255]], np.int32), np.array([[0, 100, 200, 255]])),
        (np.array([[-100, 0, 100, 300]], np.int32), np.array([[0, 64, 128, 255]])),
        (np.array([[0, 1 << 30, 1 << 29]], np.int32), np.array([[0, 255, 128]])),
        (np.array([[0.0, 0.25, 0.5, 1.0]], np.float32), np.array([[0, 64, 128, 255]])),
        (np.array([[0.0, 100.0, 255.0]], np.float32), np.array([[0, 100, 255]])),
        (np.array([[0.0, 32768.0, 65535.0]], np.float32), np.array([[0, 128, 255]])),
        (np.array([[-1.0, 0.0, 1.0, np.nan]], np.float32), np.array([[0, 128, 255, 128]])),
        (np.array([[5e9, 5e9]], np.float32), np.array([[0, 0]])),
    ],
)
def test_32_bit_gray_is_scaled(tmp_path, values, expected):
    Image.fromarray(values).save(tmp_path / "a.tif")
    assert np.array_equal(pixels(tmp_path / "a.tif")[:, :, 0], expected)


@pytest.mark.parametrize("color_type", [2, 4, 6])
def test_16_bit_color_and_alpha_png(tmp_path, color_type):
    bands = {2: 3, 4: 2, 6: 4}[color_type]
    samples = np.zeros((2, 3, bands), dtype=">u2")
    samples[..., 0] = [[0, 32768, 65535], [256, 40000, 4096]]
    samples[..., -1] = 65535 if bands != 3 else 20000
    rows = b"".join(b"\0" + row.tobytes() for row in samples)
    (tmp_path / "a.png").write_bytes(png_bytes(3, 2, 16, color_type, rows))
    found = pixels(tmp_path / "a.png")
    assert np.abs(found[:, :, 0] - samples[..., 0] / 257.0).max() <= 1.0
    assert np.abs(found[:, :, 1] - (found[:, :, 0] if bands == 2 else 0)).max() == 0


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.png", "a.tif", "stereo.jpg", *AVIF])
def test_the_first_frame_is_taken(tmp_path, name):
    frames = [Image.new("RGB", (WIDTH, HEIGHT), color) for color in ("red", "blue")]
    form = {"stereo.jpg": "MPO"}.get(name)
    extra = {"lossless": True} if name == "a.webp" else {}
    frames[0].save(tmp_path / name, form, save_all=True, append_images=frames[1:], **extra)
    with Image.open(tmp_path / name) as saved:
        assert saved.n_frames == 2  # type: ignore[attr-defined]
    assert np.abs(pixels(tmp_path / name) - [255, 0, 0]).max() <= 2


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tif", "lzw.tif", *AVIF, *HEIC])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path, name, orientation):
    # Where the EXIF standard says row 0 and column 0 of the stored image belong.
    stored = smooth_rgb()
    upright = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.transpose(1, 0, 2),
        6: stored[::-1].transpose(1, 0, 2),
        7: stored[::-1, ::-1].transpose(1, 0, 2),
        8: stored[:, ::-1].transpose(1, 0, 2),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {
        "a.jpg": {"quality": 95, "subsampling": 0},
        "a.webp": {"lossless": True},
        "lzw.tif": {"compression": "tiff_lzw"},
    }.get(name, {})
    if name.endswith("tif"):
        options = {**options, "tiffinfo": {0x0112: orientation}}
    else:
        options = {**options, ("turned" if name in HEIC else "exif"): exif}
    save(Image.fromarray(stored), tmp_path / name, **options)
    if name in HEIC and orientation > 1:
        content = (tmp_path / name).read_bytes()
        assert exif.tobytes() in content
        assert b"irot" in content or b"imir" in content
    found = pixels(tmp_path / name)
    assert found.shape == upright.shape
    assert np.abs(found - upright).max() <= (4 if name in ["a.jpg", *AVIF, *HEIC] else 0)
    assert image_size(tmp_path / name) == (upright.shape[1], upright.shape[0])

    box = (2, 3, 11, 9)
    assert np.array_equal(pixels(tmp_path / name, box=box), found[3:9, 2:11])
    assert image_size(tmp_path / name, box) == (9, 6)


@pytest.mark.parametrize("name", HEIC)
def test_only_its_own_orientation_turns_a_heic_file(tmp_path, name):
    exif = Image.Exif()
    exif[0x0112] = 6
    save(Image.fromarray(smooth_rgb()), tmp_path / name, exif=exif)
    assert np.abs(pixels(tmp_path / name) - smooth_rgb()).max() <= 4
    assert image_size(tmp_path / name) == (WIDTH, HEIGHT)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_broken_exif_does_not_lose_the_photo(tmp_path):
    Image.fromarray(smooth_rgb()).save(tmp_path / "a.jpg", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert load_image(tmp_path / "a.jpg").size == (WIDTH, HEIGHT)
    assert image_size(tmp_path / "a.jpg") == (WIDTH, HEIGHT)


def test_min_side_reduces_jpeg_only_as_far_as_allowed(tmp_path):
    Image.fromarray(smooth_rgb(640, 400)).save(tmp_path / "a.jpg")
    Image.fromarray(smooth_rgb(640, 400)).save(tmp_path / "a.png")
    assert load_image(tmp_path / "a.jpg", min_side=50).size == (80, 50)
    assert load_image(tmp_path / "a.jpg", min_side=51).size == (160, 100)
    assert load_image(tmp_path / "a.jpg", min_side=201).size == (640, 400)
    assert load_image(tmp_path / "a.jpg", min_side=5000).size == (640, 400)
    assert load_image(tmp_path / "a.png", min_side=50).size == (640, 400)
    # Boxes are in pixels of the full image.
    assert load_image(tmp_path / "a.jpg", (100, 200, 400, 300), min_side=50).size == (300, 100)


def test_box_is_clipped_to_the_image(tmp_path):
    rgb = smooth_rgb()
    Image.fromarray(rgb).save(tmp_path / "a.png")
    assert np.array_equal(pixels(tmp_path / "a.png", box=(-5, 4, 99, 99)), rgb[4:])
    assert np.array_equal(pixels(tmp_path / "a.png", box=(1.6, 2.4, 7.7, 8.2)), rgb[2:8, 2:8])


@pytest.mark.parametrize(
    "box",
    [(5, 5, 5, 9), (9, 2, 3, 8), (24, 0, 30, 9), (0, -9, 9, 0), (0, 0, float("nan"), 9)],
)
def test_empty_box_is_an_error(tmp_path, box):
    Image.fromarray(smooth_rgb()).save(tmp_path / "a.png")
    for read in (load_image, image_size):
        with pytest.raises(ImageError, match=r"box .* 24 × 16"):
            read(tmp_path / "a.png", box)


def failure(path: Path) -> ImageError:
    with pytest.raises(ImageError) as caught:
        load_image(path)
    error = caught.value
    assert isinstance(error, InputError)
    assert error.path == str(path)
    assert str(error) == f"{path}: {error.reason}"
    assert "\n" not in str(error)
    return error


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize(
    "name", ["a.jpg", "a.png", "a.webp", "a.tif", "lzw.tif", "a.gif", "a.bmp", *AVIF, *HEIC]
)
def test_truncated_files(tmp_path, name):
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8))
    save(noise, tmp_path / name, **({"compression": "tiff_lzw"} if name == "lzw.tif" else {}))
    whole = (tmp_path / name).read_bytes()
    for kept in (len(whole) // 2, 20):
        (tmp_path / name).write_bytes(whole[:kept])
        assert "broken" in failure(tmp_path / name).reason


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no such file"),
        (b"", "empty"),
        (b"this is no picture, whatever its name says", "not a JPEG"),
        (b"P6 2 1 255\n123456", "not a JPEG"),
        (b"\0\0\0\x18ftypisom\0\0\0\0isommp42" + b"\0" * 99, "not a JPEG"),
    ],
)
def test_missing_empty_and_other_files(tmp_path, content, reason):
    if content is not None:
        (tmp_path / "a.jpg").write_bytes(content)
    assert reason in failure(tmp_path / "a.jpg").reason
    assert "folder" in failure(tmp_path).reason


@pytest.mark.parametrize("side", [16_001, 100_000])
def test_bomb_is_refused_by_its_header(tmp_path, side):
    (tmp_path / "bomb.png").write_bytes(png_bytes(side, side, 8, 2, b"\0" * 100))
    assert f"{side} × {side}" in failure(tmp_path / "bomb.png").reason
    with pytest.raises(TooManyPixelsError, match="128 million allowed: reduce the photo"):
        image_size(tmp_path / "bomb.png")


@pytest.mark.parametrize(
    ("name", "mode", "counted"),
    [
        ("a.png", "RGB", 1),
        ("a.tif", "RGBA", 1),
        ("a.bmp", "RGB", 1),
        ("a.gif", "P", 1),
        ("a.webp", "RGB", 2),
        *((name, "RGB", 2) for name in AVIF + HEIC),
        ("a.jpg", "RGB", 1),
        ("a.jpg", "L", 1),
    ],
)
def test_the_limit_counts_pixels_as_their_decoder_takes_memory(tmp_path, name, mode, counted):
    save(Image.new(mode, (60, 40)), tmp_path / name)
    expected = 2400 * counted
    assert decoding_pixels(tmp_path / name) == expected
    assert load_image(tmp_path / name, max_pixels=expected).size == (60, 40)
    with pytest.raises(TooManyPixelsError, match=r"60 × 40 .* 0 million allowed: reduce the photo"):
        load_image(tmp_path / name, max_pixels=expected - 1)


@pytest.mark.parametrize(("mode", "bands"), [("L", 1), ("RGB", 3), ("CMYK", 4)])
def test_a_jpeg_file_counts_as_it_is_decoded(tmp_path, mode, bands):
    Image.new(mode, (8192, 32)).save(tmp_path / "a.jpg")
    whole = 8192 * 32
    least = whole * bands // 6
    assert decoding_pixels(tmp_path / "a.jpg") == whole
    assert decoding_pixels(tmp_path / "a.jpg", max_side=2048) == max(whole // 4, least)
    assert decoding_pixels(tmp_path / "a.jpg", max_side=100) == max(whole // 64, least)
    assert decoding_pixels(tmp_path / "a.jpg", (0, 0, 2048, 9), 2048) == whole
    assert load_image(tmp_path / "a.jpg", max_side=100, max_pixels=least).size == (100, 1)
    with pytest.raises(TooManyPixelsError, match="or give a maximum size"):
        load_image(tmp_path / "a.jpg", max_pixels=whole - 1)
    with pytest.raises(TooManyPixelsError, match=r"allowed: reduce the photo$"):
        load_image(tmp_path / "a.jpg", max_side=100, max_pixels=least - 1)


def test_list_images(tmp_path):
    for name in ("b/2.PNG", "b/10.jpg", "a.webp", "c/d/e.tiff", ".hidden.jpg", ".git/x.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "folder.jpg").mkdir()
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "f.gif").touch()
    (tmp_path / "link").symlink_to(outside)
    (tmp_path / "c" / "loop").symlink_to(tmp_path)
    found = [path.relative_to(tmp_path).as_posix() for path in list_images(tmp_path)]
    assert found == ["a.webp", "b/10.jpg", "b/2.PNG", "c/d/e.tiff", "link/f.gif"]
    with pytest.raises(InputError, match="no such folder"):
        list_images(tmp_path / "nothing")


def write_ignored(folder: Path) -> None:
    for name in ("a/1.jpg", "b/2.png", "a/x.CR2", "b/y.cr2", "z.mov", ".hidden.mov", "README"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()


@pytest.mark.parametrize("read", [read_images, read_labelled])
def test_ignored_files_are_counted_by_kind(tmp_path, read):
    write_ignored(tmp_path)
    with pytest.warns(ListwiseWarning) as warned:
        images = read(tmp_path)
    said = f"{tmp_path}: ignored 4 files: 2 .cr2, 1 without an ending, 1 .mov"
    assert [str(each.message) for each in warned] == [said]
    assert images.ignored == {".cr2": 2, ".mov": 1, "": 1}
    assert images.subset([0]).ignored == images.ignored


@pytest.mark.skipif(not HEIC, reason="needs pillow-heif")
def test_without_pillow_heif_its_extra_is_named(tmp_path, monkeypatch):
    for name in ("a.heic", "b.png"):
        save(Image.new("RGB", (64, 64)), tmp_path / name)
    assert len(read_images(tmp_path)) == 2
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    hint = r"pip install 'listwise\[heic\]'"
    with pytest.warns(ListwiseWarning, match=rf"ignored 1 file: 1 .heic; {hint} reads .heic"):
        assert len(read_images(tmp_path)) == 1
    with pytest.raises(ImageError, match=rf"a.heic: a HEIC photo needs pillow-heif: {hint}"):
        load_image(tmp_path / "a.heic")


def test_pillow_is_not_changed(tmp_path):
    for name in HEIC:
        save(Image.new("RGB", (64, 64)), tmp_path / name)
        load_image(tmp_path / name)
        with pytest.raises(OSError, match="cannot identify"):
            Image.open(tmp_path / name)
