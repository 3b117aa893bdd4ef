"""The judgments of public benchmarks, read from the files that their makers publish.

Revisited Oxford and Paris have one `gnd_*.pkl`, the original Oxford5k and Paris6k text files.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from listwise.data.images import Box
from listwise.errors import InputError
from listwise.evaluation import JudgedQueries
from listwise.files import read_text

Indices = NDArray[np.int64]

_QUERY = "_query.txt"
_PREFIX = "oxc1_"  # of photo names in the query files of Oxford


def read_ground_truth(path: str | Path) -> JudgedQueries:
    """Read a `gnd_*.pkl` file: a dict of imlist, qimlist and gnd (bbx, easy, hard, junk)."""
    from listwise.data.pickles import read_pickle_restricted  # with PyTorch

    content = read_pickle_restricted(path)
    names = [str(name) for name in _field(content, "imlist", str(path))]
    queries = [str(name) for name in _field(content, "qimlist", str(path))]
    judgments = _field(content, "gnd", str(path))
    if len(judgments) != len(queries):
        raise InputError(
            f"{path}: {len(queries)} queries but {len(judgments)} judgments; give one for each"
        )
    boxes: list[Box] = []
    grades: dict[str, list[Indices]] = {"easy": [], "hard": [], "junk": []}
    for query, judgment in zip(queries, judgments, strict=True):
        where = f"{path}, query {query}"
        boxes.append(_box(_field(judgment, "bbx", where), f"{where}: 'bbx'"))
        for key, lists in grades.items():
            lists.append(_indices(_field(judgment, key, where), key, len(names), where))
        everything = np.concatenate([lists[-1] for lists in grades.values()])
        if len(np.unique(everything)) != len(everything):
            raise InputError(f"{where}: an image is judged twice; easy, hard and junk must differ")
    return JudgedQueries.revisited(names, queries, boxes, **grades)


def read_oxford_ground_truth(folder: str | Path, names: Sequence[str]) -> JudgedQueries:
    """Read the `gt_files`: NAME_query.txt, NAME_good.txt, NAME_ok.txt and NAME_junk.txt per query.

    `names` are the database images (no folder, no extension), which the files do not list. Junk
    that is not among them is left out, as it would have no effect.
    """
    folder = Path(folder)
    files = sorted(folder.glob(f"*{_QUERY}"))
    if not files:
        raise InputError(f"{folder}: no file ends in {_QUERY}; give the folder of the gt_files")
    positions = {name: position for position, name in enumerate(names)}
    queries: list[str] = []
    boxes: list[Box] = []
    grades: dict[str, list[Indices]] = {"good": [], "ok": [], "junk": []}
    for file in files:
        query, box = _query(file)
        stem = file.name.removesuffix(_QUERY)
        good, ok, junk = (read_text(folder / f"{stem}_{grade}.txt").split() for grade in grades)
        everything = good + ok + junk
        if len(set(everything)) != len(everything):
            raise InputError(f"{file}: an image is judged twice; good, ok and junk must differ")
        missing = [name for name in good + ok if name not in positions]
        if missing:
            raise InputError(
                f"{file}: the positive {missing[0]} is not among the {len(names)} database "
                "images; add it, or remove its name from the ground truth"
            )
        queries.append(query)
        boxes.append(box)
        for lists, images in zip(grades.values(), (good, ok, junk), strict=True):
            found = [positions[name] for name in images if name in positions]
            lists.append(np.array(found, dtype=np.int64))
    return JudgedQueries.oxford(list(names), queries, boxes, **grades)


def _query(file: Path) -> tuple[str, Box]:
    name, *numbers = read_text(file).split() or [""]
    return name.removeprefix(_PREFIX), _box(numbers, f"{file}, after the name: the box")


def _field(content: Any, key: str, where: str) -> Any:
    if not isinstance(content, dict):
        raise InputError(f"{where}: expected a dict with '{key}', found {type(content).__name__}")
    if key not in content:
        raise InputError(f"{where}: the key '{key}' is missing from the ground truth")
    value = content[key]
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise InputError(f"{where}: '{key}' should be a list, found {type(value).__name__}")
    return value


def _box(value: Any, where: str) -> Box:
    try:
        left, top, right, bottom = (float(number) for number in value)
    except (TypeError, ValueError):
        raise InputError(f"{where} should be four numbers") from None
    if not (left < right and top < bottom):
        raise InputError(
            f"{where} should be left, top, right, bottom in that order, "
            f"found {left:g}, {top:g}, {right:g}, {bottom:g}"
        )
    return left, top, right, bottom


def _indices(value: Any, key: str, count: int, where: str) -> Indices:
    found = np.asarray(value)
    if found.size == 0:
        return np.zeros(0, np.int64)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise InputError(f"{where}: '{key}' should be a flat list of whole numbers")
    if found.min() < 0 or found.max() >= count:
        outside = int(found.min() if found.min() < 0 else found.max())
        raise InputError(f"{where}: '{key}' names image {outside}, but imlist has {count} images")
    return found.astype(np.int64)
