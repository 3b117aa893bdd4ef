"""A finished model or descriptor file survives a power failure.

The test records which files the process has synchronized with the disk. Then it empties all others,
as a power failure may do. `tests/crash` does the same with indexes, at calls that change files.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from listwise.data import read_images
from listwise.descriptors import DescriptorFile, Model, extract, load_model
from listwise.models import RetrievalNet

Inode = tuple[int, int]


class Disk:
    """Knows which files and folders were synchronized."""

    def __init__(self) -> None:
        self.synchronized: set[Inode] = set()

    def lose_power(self, root: Path) -> list[str]:
        """Empty the files below a folder that may not be on the disk; their names."""
        lost = []
        for path in sorted(root.rglob("*")):
            if path.is_file() and path.stat().st_size and inode(path) not in self.synchronized:
                path.write_bytes(b"")
                lost.append(str(path.relative_to(root)))
        return lost


def inode(path: Path | int) -> Inode:
    state = os.stat(path)
    return state.st_dev, state.st_ino


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk, fsync = Disk(), os.fsync

    def synchronize(file: int) -> None:
        fsync(file)
        disk.synchronized.add(inode(file))

    monkeypatch.setattr(os, "fsync", synchronize)
    return disk


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "model"
    RetrievalNet("test_resnet.r160_in1k", weights="random").save(folder)
    return load_model(folder, "cpu")


def test_files_and_their_names(disk: Disk, model: Model, photos: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "out" / "descriptors.parquet"
    model.save(folder)
    extract(load_model(folder, "cpu"), read_images(photos / "class0"), out, workers=0)
    rows = DescriptorFile.open(out).read()
    assert disk.lose_power(folder) == disk.lose_power(out.parent) == []
    assert {inode(folder), inode(out.parent)} <= disk.synchronized
    assert load_model(folder, "cpu").fingerprint == model.fingerprint
    np.testing.assert_array_equal(DescriptorFile.open(out).read(), rows)
