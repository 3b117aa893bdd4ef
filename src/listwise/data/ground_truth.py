"""The judgements of the revisited benchmarks, in the public `gnd_*.pkl` files."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from listwise.data.images import Box
from listwise.data.pickles import read_pickle_restricted
from listwise.errors import InputError
from listwise.evaluation import JudgedQueries

Indices = NDArray[np.int64]


def read_ground_truth(path: str | Path) -> JudgedQueries:
    """Read a `gnd_*.pkl` file: a dict of imlist, qimlist and gnd (bbx, easy, hard, junk)."""
    content = read_pickle_restricted(path)
    names = [str(name) for name in _field(content, "imlist", str(path))]
    queries = [str(name) for name in _field(content, "qimlist", str(path))]
    judgements = _field(content, "gnd", str(path))
    if len(judgements) != len(queries):
        raise InputError(
            f"{path}: {len(queries)} queries but {len(judgements)} judgements; give one for each"
        )
    boxes: list[Box] = []
    grades: dict[str, list[Indices]] = {"easy": [], "hard": [], "junk": []}
    for query, judgement in zip(queries, judgements, strict=True):
        where = f"{path}, query {query}"
        boxes.append(_box(_field(judgement, "bbx", where), where))
        for key, lists in grades.items():
            lists.append(_indices(_field(judgement, key, where), key, len(names), where))
        everything = np.concatenate([lists[-1] for lists in grades.values()])
        if len(np.unique(everything)) != len(everything):
            raise InputError(f"{where}: an image is judged twice; easy, hard and junk must differ")
    return JudgedQueries.revisited(names, queries, boxes, **grades)


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
        raise InputError(f"{where}: 'bbx' should be four numbers") from None
    if not (left < right and top < bottom):
        raise InputError(
            f"{where}: 'bbx' should be left, top, right, bottom in that order, "
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
