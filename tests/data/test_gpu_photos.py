"""Photos as a GPU gets them; here the CPU decodes in its place, by the same function."""

import io
import threading
import warnings
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from listwise.data import Decoding, ImageError, PhotoFile, load_image
from listwise.data import gpu_photos as module
from listwise.data.gpu_photos import decode_on_gpu, gpu_decodes

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

    original, decode_on_cpu = module.decode_jpegs, module._decode_on_cpu
    monkeypatch.setattr(module, "_decode_on_cpu", load)
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


def test_a_trial_shows_which_decoder_applies_the_orientation(jpeg_decoder, request):
    assert jpeg_decoder.turns is ("torchvision" not in request.node.name)


def test_without_a_decoder_the_gpu_decodes_nothing(monkeypatch):
    monkeypatch.setattr(module, "_load_torchcodec", None)
    monkeypatch.setattr(module, "_load_torchvision", None)
    module._jpeg_decoder.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="neither torchcodec nor torchvision"):
            module.decode_jpegs([torch.zeros(10, dtype=torch.uint8)], CPU)
    finally:
        module._jpeg_decoder.cache_clear()


def test_the_deprecation_of_torchvisions_decoder_does_not_reach_the_user(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_load_torchcodec", None)
    module._jpeg_decoder.cache_clear()
    picture().save(tmp_path / "photo.jpg")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(decoded_photos([PhotoFile(str(tmp_path / "photo.jpg"))], CPU, 1))
    module._jpeg_decoder.cache_clear()
    assert not caught


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


def test_a_file_that_the_decoder_refuses_costs_only_itself(tmp_path, decoders, monkeypatch):
    wanted = []
    for i in range(5):
        wanted.append(PhotoFile(str(tmp_path / f"{i}.jpg")))
        picture(seed=i).save(wanted[-1].path, quality=95)
    refused = module._to_tensor(Path(wanted[2].path).read_bytes())
    original = module.decode_jpegs

    def decode(contents, device):
        photos = original(contents, device)
        if any(torch.equal(content, refused) for content in contents):
            raise RuntimeError("Error while decoding JPEG images: 3")
        return photos

    monkeypatch.setattr(module, "decode_jpegs", decode)
    for each, photo in zip(wanted, decoded_photos(wanted, CPU, 2), strict=True):
        assert (photo.int() - expected(each).int()).abs().max() <= 3
    assert decoders[0] == ["2.jpg"]


@pytest.mark.parametrize(("photos", "pixels"), [(3, 10**9), (100, 2 * 90 * 60), (100, 10)])
def test_any_chunks_give_the_same_photos_in_order(tmp_path, decoders, monkeypatch, photos, pixels):
    monkeypatch.setattr(module, "CHUNK", photos)
    monkeypatch.setattr(module, "CHUNK_PIXELS", pixels)
    monkeypatch.setattr(module, "GROUP", 2)
    monkeypatch.setattr(module, "GROUPS_AHEAD", 2)
    wanted = []
    for i in range(11):
        wanted.append(PhotoFile(str(tmp_path / (f"{i}.png" if i % 4 == 1 else f"{i}.jpg"))))
        picture(seed=i).save(wanted[-1].path)
    for each, photo in zip(wanted, decoded_photos(wanted, CPU, 2), strict=True):
        assert (photo.int() - expected(each).int()).abs().max() <= 3
    loaded, together = decoders
    if pixels == 10:  # each is too large for the GPU
        assert len(loaded) == 11
    else:
        assert len(loaded) == 3
        assert max(together) <= min(photos, max(1, pixels // 5400))


def test_huge_photos_are_decoded_as_small_as_they_may_be(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_PIXELS", 1000)
    path = str(tmp_path / "a.jpg")
    picture(400, 300).save(path)
    (photo,) = decoded_photos([PhotoFile(path)], CPU, 1, Decoding(min_side=70))
    assert photo.shape == (3, 75, 100)


def test_it_reads_only_a_little_ahead_and_stops_when_told(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 2)
    monkeypatch.setattr(module, "GROUP", 2)
    monkeypatch.setattr(module, "GROUPS_AHEAD", 2)
    path = str(tmp_path / "a.jpg")
    picture().save(path)
    taken = []

    def endless():
        while True:
            taken.append(path)
            yield PhotoFile(path)

    threads = threading.active_count()
    photos = decoded_photos(endless(), CPU, 2)
    next(photos)
    assert len(taken) <= 12
    photos.close()
    assert threading.active_count() == threads


def test_no_gpu_decodes_here_without_one():
    assert not gpu_decodes(CPU)
    if not torch.cuda.is_available():
        assert not gpu_decodes(torch.device("cuda"))


def test_the_thread_prepares_the_gpu_of_its_caller(monkeypatch):
    """The current GPU belongs to a thread: with several processes, each has its own."""
    found, done = [], threading.Event()
    monkeypatch.setattr(
        module, "_load_libraries", lambda device: found.append(device) or done.set()
    )
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for given, chosen in (("cuda", "cuda:3"), ("cuda:1", "cuda:1")):
        done.clear()
        module.prepare_gpu(given)
        assert done.wait(10)
        assert found.pop() == chosen
    module.prepare_gpu("cpu")
    assert not found


def test_a_gpu_starts_in_a_thread_where_there_is_one_to_start(monkeypatch):
    started = []
    monkeypatch.setattr(module, "_start", lambda device: started.append(str(device)))
    monkeypatch.delenv("RANK", raising=False)
    for device in ("auto", "cuda:1", "cpu", "nonsense"):
        module.start_gpu(device)
    monkeypatch.setenv("RANK", "1")  # a process of torchrun
    module.start_gpu("auto")
    for thread in threading.enumerate():
        if thread.name == "start":
            thread.join()
    assert sorted(started) == ["cuda", "cuda:1"]


def without_color_details(image):
    """The RGB values of an image, each block of 2 × 2 pixels with its mean color: [H, W, 3]."""
    # Rows: brightness, blue and red difference.
    matrix = np.array([[0.299, 0.587, 0.114], [-0.1687, -0.3313, 0.5], [0.5, -0.4187, -0.0813]])
    values = np.asarray(image, dtype=float) @ matrix.T
    height, width, _ = values.shape
    colors = values[..., 1:].reshape(height // 2, 2, width // 2, 2, 2).mean(axis=(1, 3))
    values[..., 1:] = colors.repeat(2, axis=0).repeat(2, axis=1)
    return (values @ np.linalg.inv(matrix).T).clip(0, 255)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_repeats_the_colors_that_a_cpu_interpolates(tmp_path):
    image, device = picture(64, 48), torch.device("cuda")
    for name, subsampling in (("all.jpg", 0), ("half.jpg", 2)):
        image.save(tmp_path / name, quality=95, subsampling=subsampling)
    wanted = [PhotoFile(str(tmp_path / name)) for name in ("all.jpg", "half.jpg")]
    on_gpu = [photo.cpu().float() for photo in decoded_photos(wanted, device, 1)]
    on_cpu = [expected(each).float() for each in wanted]
    # Everything else is the same.
    assert (on_gpu[0] - on_cpu[0]).abs().max() <= 1
    repeated = torch.from_numpy(without_color_details(image)).permute(2, 0, 1).float()
    from_repeated = (on_gpu[1] - repeated).abs().mean()
    assert from_repeated < 0.5 * (on_gpu[1] - on_cpu[1]).abs().mean()
