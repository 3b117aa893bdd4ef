"""Photos from their files to batches: each file is opened once and decoded once."""

import io
import os
import sys
from collections import Counter
from itertools import repeat

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps
from tiny_net import TINY_NET

from listwise.data import (
    DecodedPhoto,
    Decoding,
    ImageError,
    PhotoFile,
    decode_photos,
    load_image,
    pipeline,
    read_images,
    whole_image,
)
from listwise.data.photos import photo_digest
from listwise.data.pipeline import batch_by_shape
from listwise.descriptors import Model, extract
from listwise.models import RetrievalNet
from listwise.search import add_photos, create_store, header_of

ORIENTATION = 0x0112
log: int | None = None


def write_opened(event, arguments):
    if log is not None and event == "open" and isinstance(arguments[0], str):
        os.write(log, f"open {arguments[0]}\n".encode())


sys.addaudithook(write_opened)  # it stays, in worker processes too, and is silent without a log


@pytest.fixture
def counts(tmp_path, monkeypatch):
    """Opens of each file and decodes by Pillow since the last call, in workers too."""
    global log
    path = tmp_path / "log"
    get_decoder = Image._getdecoder

    def decoder(*arguments):
        os.write(log, b"decode\n")
        return get_decoder(*arguments)

    def count(files):
        lines = Counter(path.read_text().splitlines())
        os.truncate(path, 0)
        return {lines[f"open {file.path}"] for file in files}, lines["decode"]

    monkeypatch.setattr(Image, "_getdecoder", decoder)
    monkeypatch.setattr(pipeline, "START_BYTES", 1)  # start workers for small files too
    log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    yield count
    os.close(log)
    log = None


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    made = Model(RetrievalNet(TINY_NET, weights="random").eval())
    made.save(tmp_path_factory.mktemp("model"))
    return made


@pytest.mark.parametrize("workers", [0, 2])
def test_indexing_opens_and_decodes_each_photo_once(photos, model, tmp_path, counts, workers):
    images = read_images(photos)
    with create_store(tmp_path / "index", header_of(model)) as index:
        counts(images.files())
        assert len(add_photos(index, model, images, workers=workers).added) == 48
        assert counts(images.files()) == ({1}, 48)
        assert all(index.thumbnail(entry.key) for entry in index)
        counts(images.files())
        assert len(add_photos(index, model, images, workers=workers).unchanged) == 48
        assert counts(images.files()) == ({1}, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_extraction_opens_and_decodes_each_photo_once(photos, model, tmp_path, counts, workers):
    images = read_images(photos)
    assert len(extract(model, images, tmp_path / "d.parquet", workers=workers)) == 48
    assert counts(images.files()) == ({1}, 48)


def write_turned(path, turn):
    """A photo of 60 × 40 pixels that stands upright when it is turned."""
    cells = np.random.default_rng(turn).integers(0, 255, (4, 6, 3)).astype(np.uint8)
    exif = Image.Exif()
    exif[ORIENTATION] = turn
    Image.fromarray(cells).resize((60, 40)).save(path, exif=exif, quality=95)


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("box", [None, (5.4, -3.0, 30.0, 35.0)])
def test_everything_that_a_file_gives(tmp_path, turn, box):
    path = tmp_path / "a.jpg"
    write_turned(path, turn)
    upright = ImageOps.exif_transpose(Image.open(path))
    file = PhotoFile(str(path), box).read()
    path.unlink()  # all comes from what was read
    assert file.size() == upright.size
    expected = upright if box is None else upright.crop((5, 0, 30, 35))
    photo = file.decode(Decoding(max_side=20, thumbnail=True))
    assert (photo.size, photo.whole) == (expected.size, upright.size)
    assert photo.corner == ((0, 0) if box is None else (5, 0))
    assert torch.equal(photo.pixels, whole_image(expected, 20))
    assert Image.open(io.BytesIO(photo.thumbnail)).size == expected.size
    whole = file.decode()
    assert np.array_equal(whole.pixels.permute(1, 2, 0), np.asarray(expected))
    assert whole.thumbnail == b""
    assert file.digest() == photo_digest(file.content, box)


def test_few_large_files_are_held_in_memory(photos, monkeypatch):
    content = (photos / "class0" / "0.jpg").read_bytes()
    large = content + bytes(2**20)
    monkeypatch.setattr(pipeline, "SAMPLE_BYTES", 2 * len(large))
    monkeypatch.setattr(pipeline, "WEIGHT_BYTES", 2**18)
    given, most = [], 0

    def files():
        for number in range(12):
            given.append(number)
            yield PhotoFile("a.jpg", None, large)

    for taken, photo in enumerate(decode_photos(files(), Decoding(32), workers=2)):
        assert isinstance(photo, DecodedPhoto)
        most = max(most, len(given) - taken)
    assert most <= 3


def test_a_large_file_of_another_kind_is_not_read(tmp_path):
    path = tmp_path / "video.jpg"
    with open(path, "wb") as file:
        file.write(b"no photo at all")
        file.truncate(2**40)
    with pytest.raises(ImageError, match="not a JPEG"):
        PhotoFile(str(path)).read()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_photos_come_in_order_with_their_errors(photos, workers, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "START_BYTES", 1)
    files = [*read_images(photos).files()[:11], PhotoFile(str(tmp_path / "no.jpg"))]
    files[4] = files[4]._replace(box=(500.0, 500.0, 600.0, 600.0))
    files[7] = files[7].read()
    found = list(decode_photos(iter(files), Decoding(max_side=48, thumbnail=True), workers))
    assert len(found) == 12
    for file, photo in zip(files, found, strict=True):
        if isinstance(photo, ImageError):
            with pytest.raises(ImageError) as caught:
                load_image(file.path, file.box)
            assert str(photo) == str(caught.value)
        else:
            assert torch.equal(photo.pixels, whole_image(load_image(file.path), 48))
            assert photo.thumbnail
    assert [i for i, photo in enumerate(found) if isinstance(photo, ImageError)] == [4, 11]


def test_files_are_taken_only_a_little_ahead(photos):
    taken = []

    def endless():
        for file in repeat(read_images(photos).file(0)):
            taken.append(file)
            yield file

    decoded = decode_photos(endless(), workers=2)
    next(decoded)
    assert len(taken) < 100
    decoded.close()


def plain(width, height):
    return DecodedPhoto(torch.zeros(3, height, width, dtype=torch.uint8), (1, 1), (1, 1))


def batch_by_canvas(photos, pixels):
    return batch_by_shape(photos, lambda width, height: max(1, pixels // (width * height)), True)


@given(sides=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), max_size=40))
def test_every_photo_is_in_one_batch_of_canvases_that_it_fits(sides):
    batches = list(batch_by_canvas([plain(*shape) for shape in sides], 2**17))
    found = sorted(position for batch in batches for position in batch.positions)
    assert found == list(range(len(sides)))
    for batch in batches:
        count, _, height, width = batch.pixels.shape
        assert count == 1 or count * height * width <= 2**17
        sizes = [(sides[position][1], sides[position][0]) for position in batch.positions]
        assert batch.sizes == sizes
        assert all(high <= height and wide <= width for high, wide in sizes)
