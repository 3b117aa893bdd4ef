"""Photos as a GPU gets them; here the CPU decodes in its place, by the same function."""

import io
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from listwise.data import Decoding, ImageError, PhotoFile, image_size, load_image
from listwise.data import gpu_photos as module
from listwise.data.gpu_photos import decode_on_gpu
from listwise.data.kept_photos import KeptPhotos

pytest.importorskip("torchvision")
CPU = torch.device("cpu")
FULL = Decoding()
ORIENTATION = 0x0112


def picture(width=90, height=60, seed=0):
    coarse = np.random.default_rng(seed).integers(0, 255, (7, 9, 3)).astype(np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def exif(orientation):
    tags = Image.Exif()
    tags[ORIENTATION] = orientation
    return tags


def expected(wanted):
    image = load_image(wanted.path, wanted.box)
    return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy())


def decoded_photos(wanted, device, threads, how=FULL):
    with closing(decode_on_gpu(wanted, how, device, threads)) as chunks:
        for chunk in chunks:
            for photo in chunk:
                yield photo if isinstance(photo, ImageError) else photo.pixels


@given(
    kind=st.sampled_from(["RGB", "L", "CMYK"]),
    subsampling=st.sampled_from(["4:4:4", "4:2:2", "4:2:0"]),
    progressive=st.booleans(),
    orientation=st.sampled_from([None, 1, 6]),
    comment=st.booleans(),
    keep_rgb=st.booleans(),
    cut=st.sampled_from([0, 0, 0, 1, 100, 600]),
)
def test_quick_reading_of_headers(
    kind, subsampling, progressive, orientation, comment, keep_rgb, cut
):
    options = {"subsampling": subsampling} if kind == "RGB" and not keep_rgb else {}
    options |= {"keep_rgb": keep_rgb} if kind == "RGB" else {}
    options |= {"exif": exif(orientation)} if orientation else {}
    options |= {"comment": "a comment"} if comment else {}
    file = io.BytesIO()
    picture(61, 45).convert(kind).save(file, "JPEG", progressive=progressive, **options)
    content = file.getvalue()[: len(file.getvalue()) - cut]
    if kind == "CMYK" or progressive or cut or (keep_rgb and kind == "RGB"):
        assert module.usual_jpeg(content) is None
    else:
        assert module.usual_jpeg(content) == ((61, 45), bool(orientation))


def test_orientations_in_other_places():
    file, sideways = io.BytesIO(), io.BytesIO()
    picture().save(file, "JPEG", xmp=b'<x tiff:Orientation="6"/>')
    assert module.usual_jpeg(file.getvalue())[1]
    picture().save(sideways, "JPEG", exif=exif(6))
    content = sideways.getvalue()
    start = content.index(b"\xff\xe1")
    end = start + 2 + int.from_bytes(content[start + 2 : start + 4], "big")
    rest = content[:start] + content[end:]
    scan = rest.index(b"\xff\xda")  # behind the frame
    assert module.usual_jpeg(rest[:scan] + content[start:end] + rest[scan:])[1]
    adobe = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00"
    plain = {kind: rest[:2] + adobe + bytes([kind]) + rest[2:] for kind in (0, 1)}
    assert module.usual_jpeg(plain[1]) == ((90, 60), False)
    assert module.usual_jpeg(plain[0]) is None


@given(place=st.integers(0, 600), value=st.integers(0, 255))
def test_quick_reading_agrees_with_pillow(place, value):
    file = io.BytesIO()
    picture().save(file, "JPEG", comment="a")
    content = bytearray(file.getvalue())
    content[place] = value
    found = module.usual_jpeg(bytes(content))
    try:
        size = image_size(io.BytesIO(content))
    except ImageError:  # a decoder of a GPU refuses it, or shows what is left of it
        return
    assert found is None or found[0] == size


@pytest.fixture
def decoders(monkeypatch):
    """Names of the files that the CPU decoded, and numbers of files decoded together."""
    loaded, together = [], []

    def load(file, how):
        loaded.append(Path(file.path).name)
        return decode_on_cpu(file, how)

    def decode(contents, device):
        together.append(len(contents))
        return original(contents, device)

    original, decode_on_cpu = module.decode_jpegs, module.decode_or_error
    monkeypatch.setattr(module, "decode_or_error", load)
    monkeypatch.setattr(module, "decode_jpegs", decode)
    return loaded, together


def write_kinds(folder):
    """Files of many kinds: those that decoders of JPEG all know, and the others."""
    photo = picture()
    plain = {"444.jpg": 0, "422.jpg": 1, "420.jpg": 2}
    for name, sampling in plain.items():
        photo.save(folder / name, quality=95, subsampling=sampling)
    photo.convert("L").save(folder / "gray.jpg", quality=95)
    for turn in range(1, 9):
        photo.save(folder / f"turned{turn}.jpg", quality=95, exif=exif(turn))
    usual = {path.name for path in folder.iterdir()}
    photo.save(folder / "progressive.jpg", quality=95, progressive=True)
    photo.convert("CMYK").save(folder / "cmyk.jpg", quality=95)
    photo.save(folder / "rgb.jpg", quality=95, keep_rgb=True)
    photo.save(folder / "photo.png")
    photo.save(folder / "photo.tif")
    photo.convert("P").save(folder / "palette.gif")
    content = (folder / "420.jpg").read_bytes()
    (folder / "followed.jpg").write_bytes(content + b"something")
    return usual, {path.name for path in folder.iterdir()} - usual


def decode_upright(contents, device):
    """Decode with Pillow, and apply the orientation, as torchcodec does."""
    files = [io.BytesIO(content.numpy().tobytes()) for content in contents]
    photos = [ImageOps.exif_transpose(Image.open(file)).convert("RGB") for file in files]
    return [torch.from_numpy(np.asarray(photo).transpose(2, 0, 1).copy()) for photo in photos]


@pytest.fixture(params=["torchcodec", "torchvision", "one that applies the orientation"])
def jpeg_decoder(request, monkeypatch):
    """One of the decoders; the trial chooses it because no other one loads."""
    if request.param == "torchcodec":
        pytest.importorskip("torchcodec", minversion="0.16")
        monkeypatch.setattr(module, "_load_torchvision", None)
    elif request.param == "torchvision":
        monkeypatch.setattr(module, "_load_torchcodec", None)
    else:
        monkeypatch.setattr(module, "_load_torchcodec", lambda: decode_upright)
    module._jpeg_decoder.cache_clear()
    yield module._jpeg_decoder(CPU)
    module._jpeg_decoder.cache_clear()


@pytest.mark.usefixtures("jpeg_decoder")
def test_every_kind_is_what_load_image_makes_of_it(tmp_path, decoders):
    usual, others = write_kinds(tmp_path)
    wanted = [PhotoFile(str(tmp_path / name)) for name in sorted(usual | others)]
    found = list(decoded_photos(wanted, CPU, 2))
    assert len(found) == len(wanted)
    for each, photo in zip(wanted, found, strict=True):
        assert photo.dtype == torch.uint8
        difference = (photo.int() - expected(each).int()).abs()
        assert difference.max() <= 3, each.path
    loaded, together = decoders
    assert set(loaded) == others
    assert sum(together) == len(usual)


@pytest.mark.usefixtures("jpeg_decoder")
def test_boxes_are_cut_out_after_turning(tmp_path):
    for turn in (1, 6, 8):
        path = str(tmp_path / f"{turn}.jpg")
        picture().save(path, exif=exif(turn))
        for box in ((10.0, 5.0, 40.0, 50.0), (-5.0, 20.0, 1000.0, 31.0)):
            (photo,) = decoded_photos([PhotoFile(path, box)], CPU, 1)
            assert (photo.int() - expected(PhotoFile(path, box)).int()).abs().max() <= 3


def test_errors_are_those_of_load_image_and_spare_the_others(tmp_path):
    good = tmp_path / "good.jpg"
    picture().save(good, quality=95)
    content = good.read_bytes()
    (tmp_path / "cut.jpg").write_bytes(content[: len(content) // 2])
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "text.jpg").write_bytes(b"no photo at all, but long enough")
    (tmp_path / "folder.jpg").mkdir()
    wanted = [
        PhotoFile(str(tmp_path / "cut.jpg")),
        PhotoFile(str(good)),
        PhotoFile(str(tmp_path / "empty.jpg")),
        PhotoFile(str(good), (500.0, 500.0, 600.0, 600.0)),
        PhotoFile(str(tmp_path / "text.jpg")),
        PhotoFile(str(tmp_path / "missing.jpg")),
        PhotoFile(str(good)),
        PhotoFile(str(tmp_path / "folder.jpg")),
    ]
    found = list(decoded_photos(wanted, CPU, 3))
    for each, photo in zip(wanted, found, strict=True):
        if each == PhotoFile(str(good)):
            assert torch.equal(photo, found[1])
        else:
            with pytest.raises(ImageError) as caught:
                load_image(each.path, each.box)
            assert str(photo) == str(caught.value)


def photo(width, height, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("on_device", [True, False])
def test_photos_come_back_unchanged(on_device):
    kept = KeptPhotos(5, CPU, 10_000, on_device)
    photos = {3: photo(20, 10), 0: photo(7, 31, 1), 4: photo(40, 30, 2)[:, 5:25, 3:24]}
    for number, pixels in photos.items():
        assert kept.add(number, pixels)
    assert kept.has(np.arange(5)).tolist() == [True, False, False, True, True]
    assert len(kept) == 3
    for number, pixels in photos.items():
        assert torch.equal(kept.photo(number), pixels)
    widths, heights = kept.sizes(np.array([4, 0]))
    assert (widths.tolist(), heights.tolist()) == ([21, 7], [20, 31])


def test_a_validation_may_add_photos_before_training_does():
    kept = KeptPhotos(2, CPU, 10_000, on_device=True)
    with torch.inference_mode():
        assert kept.add(0, photo(10, 10))
    assert kept.add(1, photo(10, 10, 1))
    assert torch.equal(kept.photo(1), photo(10, 10, 1))
