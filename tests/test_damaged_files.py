"""One wrong byte in a file that Listwise wrote is refused, or changes no result."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from listwise.data import read_images
from listwise.descriptors import DescriptorFile, Model, Whitening, extract, load_model
from listwise.errors import InputError
from listwise.local.delf import Delf, DelfConfig
from listwise.local.extract import HessianAffine, extract_features
from listwise.local.storage import FeatureFile
from listwise.models import RetrievalNet

FLIPS = 16  # bytes of each file, the first and the last among them
PHOTO = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)


def flips(content: bytes) -> list[bytes]:
    """Copies of a file's content, each with one bit of one byte changed, drawn by a fixed seed."""
    generator = np.random.default_rng(len(content))
    places = [0, len(content) - 1, *generator.integers(0, len(content), FLIPS - 2)]
    copies = []
    for place in places:
        changed = bytearray(content)
        changed[place] ^= 1 << int(generator.integers(8))
        copies.append(bytes(changed))
    return copies


def assert_damage_is_found(root: Path, use: Callable[[], bytes], refused: int) -> None:
    """Change bytes of every file below `root`, and use the files; so many are refused at least."""
    right = use()
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    assert files
    for path in files:
        content = path.read_bytes()
        errors = []
        for changed in flips(content):
            path.unlink()  # a mapped file stays as it was
            path.write_bytes(changed)
            try:
                assert use() == right, path
            except InputError as error:
                errors.append(str(error))
        path.unlink()
        path.write_bytes(content)
        assert len(errors) >= refused, path
        assert not any("\n" in error for error in errors)
    assert use() == right


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    net = RetrievalNet("test_resnet.r160_in1k", weights="random")
    rows = np.random.default_rng(0).normal(size=(300, net.dim))
    return Model(net, Whitening.learn([rows], dim=8))


def test_model_folder(model: Model, tmp_path: Path) -> None:
    model.save(tmp_path)
    assert_damage_is_found(
        tmp_path, lambda: load_model(tmp_path, "cpu").encode(PHOTO).tobytes(), refused=FLIPS
    )


def test_folder_of_local_features(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = DelfConfig(
        backbone="test_resnet.r160_in1k", hidden=8, dim=8, mean=(0.5,) * 3, std=(0.2,) * 3
    )
    Delf(config).save(tmp_path)
    image = torch.from_numpy(PHOTO).permute(2, 0, 1)[None] / 255

    @torch.no_grad()
    def use() -> bytes:
        net = Delf.load(tmp_path)
        features = net.features(image)
        return bytes(net.scores(features).numpy().tobytes())

    assert_damage_is_found(tmp_path, use, refused=FLIPS)


def test_descriptor_file(model: Model, photos: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    extract(model, read_images(photos), path, workers=0)

    def use() -> bytes:
        file = DescriptorFile.open(path)
        content = (file.header, file.dim, len(file), file.ids, file.sizes.tolist())
        return repr(content).encode() + file.read().tobytes()

    assert_damage_is_found(tmp_path, use, refused=10)


def test_file_of_local_features(tmp_path: Path) -> None:
    folder, out = tmp_path / "photos", tmp_path / "out" / "a.features"
    folder.mkdir()
    out.parent.mkdir()
    for seed in range(3):
        pixels = np.random.default_rng(seed).integers(0, 256, (20, 30, 3), np.uint8)
        Image.fromarray(pixels).resize((120, 80)).save(folder / f"{seed}.png")
    extract_features(read_images(folder), out, HessianAffine(20), workers=0)

    def use() -> bytes:
        file = FeatureFile.open(out)
        content = (file.header, file.ids, file.sizes.tolist(), file.counts.tolist())
        arrays = [array for each in file for array in vars(each).values()]
        assert sum(array.size for array in arrays) > 1000
        return repr(content).encode() + b"".join(array.tobytes() for array in arrays)

    # SQLite leaves gaps in its pages, where nothing is read.
    assert_damage_is_found(out.parent, use, refused=5)
