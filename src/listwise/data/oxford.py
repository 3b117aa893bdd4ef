"""The judgements of the original Oxford5k and Paris6k benchmarks, read from their text files."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from listwise.data.images import Box
from listwise.errors import InputError
from listwise.evaluation import JudgedQueries

_QUERY = "_query.txt"
_PREFIX = "oxc1_"  # in Oxford's query files only


def read_oxford_ground_truth(folder: str | Path, names: Sequence[str]) -> JudgedQueries:
    """Read the `gt_files`: NAME_query.txt, NAME_good.txt, NAME_ok.txt and NAME_junk.txt a query.

    Args:
        folder: where the files are.
        names: the database images (no folder, no extension), which the files do not list. Junk
            that is not among them is left out, as it would have no effect.
    """
    folder = Path(folder)
    files = sorted(folder.glob(f"*{_QUERY}"))
    if not files:
        raise InputError(f"{folder}: no file ends in {_QUERY}; give the folder of the gt_files")
    positions = {name: position for position, name in enumerate(names)}
    queries: list[str] = []
    boxes: list[Box] = []
    grades: dict[str, list[NDArray[np.int64]]] = {"good": [], "ok": [], "junk": []}
    for file in files:
        query, box = _query(file)
        stem = file.name.removesuffix(_QUERY)
        good, ok, junk = (_read(folder / f"{stem}_{grade}.txt").split() for grade in grades)
        everything = good + ok + junk
        if len(set(everything)) != len(everything):
            raise InputError(f"{file}: an image is judged twice; good, ok and junk must differ")
        missing = [name for name in good + ok if name not in positions]
        if missing:
            raise InputError(
                f"{file}: {missing[0]} is to be found, but is not among the {len(names)} database "
                "images; add it or take its name out of the ground truth"
            )
        queries.append(query)
        boxes.append(box)
        for lists, images in zip(grades.values(), (good, ok, junk), strict=True):
            found = [positions[name] for name in images if name in positions]
            lists.append(np.array(found, dtype=np.int64))
    return JudgedQueries.oxford(list(names), queries, boxes, **grades)


def _query(file: Path) -> tuple[str, Box]:
    words = _read(file).split()
    try:
        name, (left, top, right, bottom) = words[0], (float(word) for word in words[1:])
    except (IndexError, ValueError):
        raise InputError(f"{file}: expected a name and four numbers, the box") from None
    if not (left < right and top < bottom):
        raise InputError(f"{file}: the box should be left, top, right, bottom in that order")
    return name.removeprefix(_PREFIX), (left, top, right, bottom)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError(f"{file}: not a text file") from None
