"""What a finished command has written survives a power failure.

The tests record which files the process has synchronized with the disk. Then they empty all
others, as a power failure may do.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from listwise.data import read_images
from listwise.descriptors import DescriptorFile, Model, extract, load_model
from listwise.errors import InputError
from listwise.models import RetrievalNet
from listwise.search import Index, check_index, open_index
from listwise.search.entries import NewEntries
from listwise.search.folder import guards

Inode = tuple[int, int]


class Disk:
    """Knows which files and folders were synchronized."""

    def __init__(self) -> None:
        self.synchronized: set[Inode] = set()

    def keep(self, root: Path) -> None:
        """All files below a folder have been on the disk for long."""
        self.synchronized |= {inode(path) for path in root.rglob("*")}

    def lose_power(self, root: Path, below: str = "") -> list[str]:
        """Empty the files below a folder of `root` that may not be on the disk; their names."""
        lost = []
        for path in sorted((root / below).rglob("*")):
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


@pytest.fixture(scope="module")
def paths(photos: Path) -> list[str]:
    return sorted(map(str, photos.rglob("*.jpg")))[:8]


def test_files_and_their_names(disk: Disk, model: Model, photos: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "out" / "descriptors.parquet"
    model.save(folder)
    extract(load_model(folder, "cpu"), read_images(photos / "class0"), out, workers=0)
    rows = DescriptorFile.open(out).read()
    assert disk.lose_power(folder) == disk.lose_power(out.parent) == []
    assert {inode(folder), inode(out.parent)} <= disk.synchronized
    assert load_model(folder, "cpu").fingerprint == model.fingerprint
    np.testing.assert_array_equal(DescriptorFile.open(out).read(), rows)


def content(folder: Path, model: Model) -> dict[str, bytes]:
    with open_index(folder, model) as index:
        rows = index.store.vectors([entry.key for entry in index])
        thumbnails = [index.store.thumbnail(entry.key) or b"" for entry in index]
        index.search(rows[:1], k=3)
        parts = zip(index, rows, thumbnails, strict=True)
        return {entry.id: row.tobytes() + thumbnail for entry, row, thumbnail in parts}


def test_an_index(disk: Disk, model: Model, paths: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "shop"
    sizes = []
    for change in ("create", "add", "replace", "remove"):
        with open_index(folder, model) as index:
            if change == "add":
                index.add(paths[:4], workers=0)
            elif change == "replace":
                index.add(paths, workers=0)
            elif change == "remove":
                index.remove(paths[:2])
        if change == "create":
            disk.lose_power(folder)
            continue
        expected = content(folder, model)
        lost = disk.lose_power(folder)
        assert any(name.startswith("entries.lance/_transactions") for name in lost)
        assert content(folder, model) == expected
        sizes.append(len(expected))
    assert sizes == [4, 8, 6]


def changed(index: Index) -> NewEntries:
    """The first entry of an index with another attribute."""
    entry = replace(next(iter(index)), attributes={"a": "b"})
    return NewEntries([entry], index.store.vectors([entry.key]), [b""])


@pytest.fixture(scope="module")
def made(
    model: Model, paths: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, bytes]]:
    """The folder of an index of four photos, and its content; leave it as it is."""
    folder = tmp_path_factory.mktemp("made") / "shop"
    with open_index(folder, model) as index:
        index.add(paths[:4], workers=0)
    return folder, content(folder, model)


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ("add", ""),
        ("add", "entries.lance/data"),
        ("replace", ""),
        ("remove", ""),
        ("remove", "entries.lance/_deletions"),
    ],
)
def test_in_the_middle_of_a_change_of_an_index(
    change: str, lost: str, disk: Disk, model: Model, paths, made, tmp_path: Path, monkeypatch
) -> None:
    folder, before = shutil.copytree(made[0], tmp_path / "shop"), made[1]
    disk.keep(folder)

    class PowerFailureError(Exception):
        pass

    def lose_power(folder: Path) -> None:
        raise PowerFailureError

    with monkeypatch.context() as patch, open_index(folder, model) as index:
        # LanceDB has committed the change, and its files are not on the disk yet.
        patch.setattr(guards, "sync", lose_power)
        changes = {
            "add": lambda: index.add(paths, workers=0),
            "replace": lambda: index.store.put(changed(index)),
            "remove": lambda: index.remove(paths[:2]),
        }
        with pytest.raises(PowerFailureError):
            changes[change]()
    assert disk.lose_power(folder, lost)
    with pytest.raises(InputError) as caught:
        content(folder, model)
    assert "\n" not in str(caught.value)
    assert "listwise index check" in str(caught.value)
    assert not check_index(folder, model).ok
    assert check_index(folder, model, repair=True).ok
    assert content(folder, model) == before
    with open_index(folder, model) as index:
        index.add(paths, workers=0)
    assert len(content(folder, model)) == 8
    assert check_index(folder, model).damaged == 0
