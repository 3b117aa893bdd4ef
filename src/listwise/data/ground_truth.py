"""The judgements of the revisited benchmarks, in the public `gnd_*.pkl` files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from listwise.data.images import Box
from listwise.data.pickles import read_pickle_restricted
from listwise.errors import InputError

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class GroundTruth:
    """What is to be found, and how hard it is to find, for every query of a benchmark.

    Shapes: `names` lists the N database images (no folder, no extension); `queries`, `boxes`
    (left, top, right, bottom in pixels), `easy`, `hard` and `junk` have one entry for each of the
    Q queries, the last three holding positions in `names`.
    """

    names: list[str]
    queries: list[str]
    boxes: list[Box]
    easy: list[Indices]
    hard: list[Indices]
    junk: list[Indices]


def read_ground_truth(path: str | Path) -> GroundTruth:
    """Read a `gnd_*.pkl` file: a dict of imlist, qimlist and gnd (bbx, easy, hard, junk)."""
    content = read_pickle_restricted(path)
    names = [str(name) for name in _field(content, "imlist", str(path))]
    queries = [str(name) for name in _field(content, "qimlist", str(path))]
    judgements = _field(content, "gnd", str(path))
    if len(judgements) != len(queries):
        raise InputError(
            f"{path}: {len(queries)} queries but {len(judgements)} judgements; give one for each"
        )
    truth = GroundTruth(names, queries, [], [], [], [])
    for query, judgement in zip(queries, judgements, strict=True):
        where = f"{path}, query {query}"
        truth.boxes.append(_box(_field(judgement, "bbx", where), where))
        found = [
            _indices(_field(judgement, key, where), key, len(names), where)
            for key in ("easy", "hard", "junk")
        ]
        everything = np.concatenate(found)
        if len(np.unique(everything)) != len(everything):
            raise InputError(f"{where}: an image is judged twice; easy, hard and junk must differ")
        truth.easy.append(found[0])
        truth.hard.append(found[1])
        truth.junk.append(found[2])
    return truth


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
