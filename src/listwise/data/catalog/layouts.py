"""Read the files of public data sets as labelled images with their splits.

A file that cannot be read is an error of one line.
"""

import csv
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from listwise.data.images import IMAGE_SUFFIXES
from listwise.data.labelled import Images, LabelledImages
from listwise.errors import InputError
from listwise.files import read_text

LabelledPath = tuple[str, str, str]
"""Path below the folder, class and split of an image."""


def read_layout(layout: str, folder: Path) -> LabelledImages:
    """Read the images of a data set with one of the `LABELLED` layouts."""
    file, below = _ROOTS.get(layout, ("", ("",)))
    root = folder / next((name for name in below if (folder / name / file).exists()), below[0])
    table = list(LABELLED[layout](folder, root))
    if not table:
        raise InputError(
            f"{root} contains no image of the data set: give the folder with its photos"
        )
    ids, labels, splits = (tuple(column) for column in zip(*table, strict=True))
    images = Images(tuple(_absolute(root, name) for name in ids), ids, None)
    return LabelledImages.from_names(images, labels, splits)


# A file or folder in the root of the images, and where that root may be.
_ROOTS = {
    "sop": ("Ebay_train.txt", ("", "Stanford_Online_Products")),
    "cub": ("images.txt", ("", "CUB_200_2011")),
    "inshop": ("img", ("Img", "")),
}


def _sop(folder: Path, root: Path) -> Iterator[LabelledPath]:
    """Stanford Online Products: `Ebay_train.txt` and `Ebay_test.txt` name class and path."""
    for split in ("train", "test"):
        file = root / f"Ebay_{split}.txt"
        for number, line in _lines(file)[1:]:
            _, label, _, path = _words(file, number, line, 4)
            yield path, label, split


def _cub(folder: Path, root: Path) -> Iterator[LabelledPath]:
    """Caltech-UCSD Birds: classes 1 to 100 are for training, 101 to 200 for testing."""
    kinds = dict(_pairs(root / "image_class_labels.txt"))
    for number, path in _pairs(root / "images.txt"):
        if number not in kinds:
            raise InputError(f"{root / 'image_class_labels.txt'}: image {number} has no class")
        split = "train" if int(kinds[number]) <= 100 else "test"
        yield f"images/{path}", path.split("/")[0], split


def _cars(folder: Path, root: Path) -> Iterator[LabelledPath]:
    """Stanford Cars: classes 1 to 98 are for training, 99 to 196 for testing."""
    path = folder / "cars_annos.mat"
    try:
        from scipy.io import loadmat  # type: ignore[import-untyped]
    except ImportError:
        raise InputError(f"{path} is a MATLAB file: pip install scipy to read it") from None
    try:
        annotations = np.ravel(loadmat(path)["annotations"])
        kinds = [int(np.ravel(kind)[0]) for kind in annotations["class"]]
        names = [str(np.ravel(name)[0]) for name in annotations["relative_im_path"]]
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except Exception as error:  # scipy raises many kinds of errors for a damaged MATLAB file
        raise InputError(f"{path}: not the annotations of Stanford Cars ({error!r})") from None
    for name, kind in zip(names, kinds, strict=True):
        yield name, f"{kind:03}", "train" if kind <= 98 else "test"


def _inshop(folder: Path, root: Path) -> Iterator[LabelledPath]:
    """In-shop: `list_eval_partition.txt` names image, item, and train, query or gallery."""
    file = "list_eval_partition.txt"
    path = folder / "Eval" / file if (folder / "Eval" / file).is_file() else folder / file
    for number, line in _lines(path)[2:]:
        image, item, split = _words(path, number, line, 3)
        yield image, item, split


def _landmarks(folder: Path, root: Path) -> Iterator[LabelledPath]:
    """Landmarks-clean: lists of address and class; missing photos are left out."""
    for split in ("train", "val"):
        path = folder / f"annotation_clean_{split}.txt"
        for number, line in _lines(path):
            words = line.split()
            if len(words) < 2:
                raise InputError(f"{path}, line {number}: expected an address and a class")
            file = f"images/{hashlib.md5(words[0].encode()).hexdigest()}.jpg"
            if (folder / file).exists():
                yield file, words[1], split


def _sfm(folder: Path, root: Path) -> Iterator[LabelledPath]:
    """Retrieval-SfM: the class of a photo is the 3-D model it is part of."""
    from listwise.data.pickles import read_pickle_restricted  # with PyTorch

    path = folder / "retrieval-SfM-120k.pkl"
    content = read_pickle_restricted(path)
    for split in ("train", "val"):
        try:
            pairs = list(zip(content[split]["cids"], content[split]["cluster"], strict=True))
        except (KeyError, TypeError, ValueError):
            raise InputError(
                f"{path}: {split!r} must have cids and cluster of the same length"
            ) from None
        for cid, cluster in pairs:
            yield f"ims/{cid[-2:]}/{cid[-4:-2]}/{cid[-6:-4]}/{cid}", f"{cluster}", split


def _gldv2(folder: Path, root: Path) -> Iterator[LabelledPath]:
    """Google Landmarks v2: `train_clean.csv` lists the photos of each landmark."""
    path = folder / "train_clean.csv"
    below = "train/" if (folder / "train").is_dir() else ""
    for row in csv.DictReader(line for _, line in _lines(path)):
        if row.get("landmark_id") is None or row.get("images") is None:
            raise InputError(f"{path}: the columns should be landmark_id and images")
        for image in row["images"].split():
            yield f"{below}{'/'.join(image[:3])}/{image}.jpg", row["landmark_id"], "train"


LABELLED: Final[dict[str, Callable[[Path, Path], Iterator[LabelledPath]]]] = {
    "sop": _sop,
    "cub": _cub,
    "cars": _cars,
    "inshop": _inshop,
    "landmarks": _landmarks,
    "sfm": _sfm,
    "gldv2": _gldv2,
}
"""Readers of the labelled data sets by layout: from the folder and the root of its images."""


def read_distractors(folder: Path) -> Images:
    """Read the photos that `revisitop1m.txt` lists below `jpg/`."""
    ids = [line.strip() for _, line in _lines(folder / "revisitop1m.txt")]
    return Images(tuple(_absolute(folder / "jpg", name) for name in ids), tuple(ids), None)


def find_photos(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the paths of photos in `folder` by names without suffix; `NAME.jpg` if missing."""
    there: dict[str, str] = {}
    if folder.is_dir():
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name, reverse=True):
            stem, suffix = os.path.splitext(entry.name)
            if suffix.lower() in IMAGE_SUFFIXES:
                there[stem] = entry.name
    return [_absolute(folder, there.get(name, f"{name}.jpg")) for name in names]


def _absolute(folder: Path, name: str) -> str:
    return os.path.abspath(os.path.join(folder, name))


def _lines(path: Path) -> list[tuple[int, str]]:
    """Iterate over the numbers and texts of the lines that are not empty."""
    text = read_text(path)
    return [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]


def _words(path: Path, number: int, line: str, count: int) -> list[str]:
    words = line.split()
    if len(words) != count:
        raise InputError(f"{path}, line {number}: expected {count} words, found {len(words)}")
    return words


def _pairs(path: Path) -> list[tuple[Any, ...]]:
    return [tuple(_words(path, number, line, 2)) for number, line in _lines(path)]
