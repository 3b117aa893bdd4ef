import pickle
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from listwise.data import ImageError, image_size, list_images, load_image
from listwise.errors import InputError

WIDTH, HEIGHT = 24, 16


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
        ("a.png", {}, 0),
        ("a.tif", {}, 0),
        ("lzw.tiff", {"compression": "tiff_lzw"}, 0),
        ("a.webp", {"lossless": True}, 0),
        ("lossy.webp", {"quality": 95}, 12),
        ("a.jpg", {"quality": 95, "subsampling": 0}, 4),
        ("A.JPEG", {"quality": 95, "subsampling": 0, "progressive": True}, 4),
    ],
)
def test_rgb_files(tmp_path, name, options, tolerance):
    rgb = smooth_rgb()
    Image.fromarray(rgb).save(tmp_path / name, **options)
    assert np.abs(pixels(tmp_path / name) - rgb).max() <= tolerance
    assert image_size(tmp_path / name) == (WIDTH, HEIGHT)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_black_and_white(tmp_path, suffix):
    bits = smooth_rgb()[:, :, 0] > 120
    Image.fromarray(bits).save(tmp_path / f"a.{suffix}")
    assert stored_mode(tmp_path / f"a.{suffix}") == "1"
    assert np.array_equal(pixels(tmp_path / f"a.{suffix}"), np.repeat(bits[:, :, None] * 255, 3, 2))


@pytest.mark.parametrize("suffix", ["png", "tif", "gif"])
def test_gray(tmp_path, suffix):
    gray = smooth_rgb()[:, :, 0]
    Image.fromarray(gray).save(tmp_path / f"a.{suffix}")
    assert np.array_equal(pixels(tmp_path / f"a.{suffix}"), np.repeat(gray[:, :, None], 3, 2))


def test_alpha_is_laid_on_white(tmp_path):
    rgb = smooth_rgb()
    alpha = np.linspace(0, 255, WIDTH * HEIGHT).round().astype(np.uint8).reshape(HEIGHT, WIDTH)
    share = alpha[:, :, None] / 255.0
    expected = rgb * share + 255.0 * (1.0 - share)
    rgba = Image.fromarray(np.dstack([rgb, alpha]))
    for name in ("a.png", "a.tif", "a.webp"):
        rgba.save(tmp_path / name, **({"lossless": True, "exact": True} if "webp" in name else {}))
        assert np.abs(pixels(tmp_path / name) - expected).max() <= 1.0

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


def test_cmyk_jpeg_and_tiff(tmp_path):
    rgb = smooth_rgb()
    cmyk = Image.fromarray(rgb).convert("CMYK")
    for name, tolerance in (("a.jpg", 6), ("a.tif", 0)):
        cmyk.save(tmp_path / name, **({"quality": 98} if name == "a.jpg" else {}))
        assert stored_mode(tmp_path / name) == "CMYK"
        assert np.abs(pixels(tmp_path / name) - rgb).max() <= tolerance


def test_cmyk_jpeg_of_adobe_is_not_read_as_a_negative(tmp_path):
    # Adobe's programs, and Pillow after them, store 255 minus the ink.
    Image.new("CMYK", (16, 16), (200, 30, 30, 0)).save(tmp_path / "a.jpg", quality=98)
    assert b"Adobe" in (tmp_path / "a.jpg").read_bytes()
    assert np.abs(pixels(tmp_path / "a.jpg") - [55, 225, 225]).max() <= 6


SHADES = np.array([[0, 256, 257, 4096], [32768, 40000, 65534, 65535]], dtype=np.uint16)
SHADES_8_BIT = np.array([[0, 1, 1, 16], [128, 156, 255, 255]])


@pytest.mark.parametrize("name", ["a.png", "a.tif", "big_endian.tif"])
def test_16_bit_gray_is_scaled(tmp_path, name):
    if name == "big_endian.tif":
        image = Image.frombytes("I;16B", (4, 2), SHADES.astype(">u2").tobytes())
    else:
        image = Image.fromarray(SHADES)
    image.save(tmp_path / name)
    assert np.array_equal(pixels(tmp_path / name), np.repeat(SHADES_8_BIT[:, :, None], 3, 2))


def test_16_bit_gray_where_zero_is_white(tmp_path):
    Image.fromarray(SHADES).save(tmp_path / "a.tif")
    data = (tmp_path / "a.tif").read_bytes()
    black_is_zero, white_is_zero = (struct.pack("<HHIHH", 262, 3, 1, n, 0) for n in (1, 0))
    (tmp_path / "a.tif").write_bytes(data.replace(black_is_zero, white_is_zero))
    assert tiff_tag(tmp_path / "a.tif", 262) == 0
    found = pixels(tmp_path / "a.tif")[:, :, 0]
    assert np.abs(found - (255 - SHADES / 257.0)).max() <= 1.0


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


def test_16_bit_rgb_tiff(tmp_path):
    samples = np.array([[[0, 32768, 65535], [4096, 256, 40000]]], dtype="<u2")
    tags = [
        (256, 3, 1, 2),
        (257, 3, 1, 1),
        (258, 3, 3, 200),
        (259, 3, 1, 1),
        (262, 3, 1, 2),
        (273, 4, 1, 220),
        (277, 3, 1, 3),
        (278, 3, 1, 1),
        (279, 4, 1, samples.nbytes),
    ]
    data = b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(tags))
    data += b"".join(struct.pack("<HHII", *tag) for tag in tags) + struct.pack("<I", 0)
    data = data.ljust(200, b"\0") + struct.pack("<3H", 16, 16, 16)
    data = data.ljust(220, b"\0") + samples.tobytes()
    (tmp_path / "a.tif").write_bytes(data)
    assert np.abs(pixels(tmp_path / "a.tif") - samples / 257.0).max() <= 1.0


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.png", "a.tif", "stereo.jpg"])
def test_the_first_frame_is_taken(tmp_path, name):
    frames = [Image.new("RGB", (WIDTH, HEIGHT), color) for color in ("red", "blue")]
    form = {"stereo.jpg": "MPO"}.get(name)
    extra = {"lossless": True} if name == "a.webp" else {}
    frames[0].save(tmp_path / name, form, save_all=True, append_images=frames[1:], **extra)
    with Image.open(tmp_path / name) as saved:
        assert saved.n_frames == 2  # type: ignore[attr-defined]
    assert np.abs(pixels(tmp_path / name) - [255, 0, 0]).max() <= 2


@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tif", "lzw.tif"])
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
        options = {**options, "exif": exif}
    Image.fromarray(stored).save(tmp_path / name, **options)
    found = pixels(tmp_path / name)
    assert found.shape == upright.shape
    assert np.abs(found - upright).max() <= (4 if name == "a.jpg" else 0)
    assert image_size(tmp_path / name) == (upright.shape[1], upright.shape[0])

    box = (2, 3, 11, 9)
    assert np.array_equal(pixels(tmp_path / name, box=box), found[3:9, 2:11])
    assert image_size(tmp_path / name, box) == (9, 6)


def test_orientation_agrees_with_pillow_for_a_small_decoding(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(smooth_rgb(640, 400)).save(tmp_path / "a.jpg", exif=exif, quality=95)
    small = load_image(tmp_path / "a.jpg", min_side=100)
    assert small.size == (100, 160)
    with Image.open(tmp_path / "a.jpg") as image:
        reference = ImageOps.exif_transpose(image).resize((100, 160))
    assert np.abs(np.asarray(small).astype(int) - np.asarray(reference)).max() <= 6


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
@pytest.mark.parametrize("name", ["a.jpg", "a.png", "a.webp", "a.tif", "lzw.tif", "a.gif"])
def test_truncated_files(tmp_path, name):
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8))
    noise.save(tmp_path / name, **({"compression": "tiff_lzw"} if name == "lzw.tif" else {}))
    whole = (tmp_path / name).read_bytes()
    for kept in (len(whole) // 2, 20):
        (tmp_path / name).write_bytes(whole[:kept])
        assert "broken" in failure(tmp_path / name).reason


def test_missing_empty_and_other_files(tmp_path):
    assert failure(tmp_path / "a.jpg").reason == "no such file"
    (tmp_path / "a.jpg").write_bytes(b"")
    assert "empty" in failure(tmp_path / "a.jpg").reason
    (tmp_path / "a.jpg").write_text("this is no picture, whatever its name says")
    assert "not a JPEG" in failure(tmp_path / "a.jpg").reason
    assert "folder" in failure(tmp_path).reason
    Image.new("RGB", (4, 4)).save(tmp_path / "b.jpg", "BMP")
    assert "not a JPEG" in failure(tmp_path / "b.jpg").reason


def test_the_content_decides_not_the_name(tmp_path):
    Image.fromarray(smooth_rgb()).save(tmp_path / "a.jpg", "PNG")
    assert np.array_equal(pixels(tmp_path / "a.jpg"), smooth_rgb())


@pytest.mark.parametrize("side", [16_001, 100_000])
def test_bomb_is_refused_by_its_header(tmp_path, side):
    (tmp_path / "bomb.png").write_bytes(png_bytes(side, side, 8, 2, b"\0" * 100))
    assert f"{side} × {side}" in failure(tmp_path / "bomb.png").reason
    with pytest.raises(ImageError, match="256 million"):
        image_size(tmp_path / "bomb.png")


def test_sizes_that_phones_make_are_read_without_warning(tmp_path):
    # 108 megapixels, above the size at which Pillow itself would warn.
    Image.new("L", (12_000, 9_000), 128).save(tmp_path / "a.jpg")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert image_size(tmp_path / "a.jpg") == (12_000, 9_000)
        assert load_image(tmp_path / "a.jpg", min_side=1000).size == (1_500, 1_125)


def test_error_survives_pickling():
    error = pickle.loads(pickle.dumps(ImageError("x/y.jpg", "no such file")))
    assert (error.path, error.reason, str(error)) == (
        "x/y.jpg",
        "no such file",
        "x/y.jpg: no such file",
    )


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
