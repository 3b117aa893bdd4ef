"""Write the folder of toy landmarks: photos, training labels, and a benchmark."""

import csv
import json
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from listwise.data.workers import map_in_processes
from listwise.demo.facade import build
from listwise.demo.photo import draw_viewpoint, take_photo
from listwise.demo.plans import FAMILY, Plan, draw_family
from listwise.demo.scene import Box
from listwise.errors import InputError
from listwise.machine import core_count

TOY_PHOTOS = "jpg"
TOY_LABELS = "train.csv"
TOY_GROUND_TRUTH = "gnd_toylandmarks.pkl"
TOY_PARAMETERS = "toy.json"

_VERSION = 1
_QUALITY = 88
_QUERIES = 2  # of each building of the benchmark
_JUNK = 2


@dataclass(frozen=True)
class _Task:
    """Photos of one building, or of streets, by their kinds."""

    part: str  # "train", "val", "benchmark" or "distractor"
    label: str
    plan: Plan | None
    kinds: list[str]
    seed: list[int]

    @property
    def photos(self) -> list[tuple[str, str]]:
        return [(f"{self.label}_{view:02d}", kind) for view, kind in enumerate(self.kinds)]


def make_toy_landmarks(
    folder: str | Path,
    *,
    buildings: int = 90,
    views: int = 14,
    seed: int = 0,
    workers: int | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Path:
    """Draw the toy landmarks into `folder`, unless it contains them already.

    Writes `jpg/*.jpg`, `train.csv` (path, label, split: train or val) and, for the buildings that
    are in neither split, `gnd_toylandmarks.pkl` in the layout of the revisited benchmarks. The
    photos depend only on `buildings`, `views` and `seed`. `progress` is called with the number of
    photos drawn so far and the total number.
    """
    if buildings < 3 * FAMILY or views < _QUERIES + _JUNK + 2:
        raise InputError(
            f"toy landmarks need at least {3 * FAMILY} buildings with {_QUERIES + _JUNK + 2} views "
            f"each, not {buildings} with {views}"
        )
    folder = Path(folder).absolute()
    parameters = {"version": _VERSION, "buildings": buildings, "views": views, "seed": seed}
    tasks = list(_tasks(buildings, views, seed))
    total = sum(len(task.photos) for task in tasks)
    if _is_complete(folder, parameters, total):
        return folder
    try:
        _check_place(folder)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as workshop:
            made = Path(workshop) / "new"
            (made / TOY_PHOTOS).mkdir(parents=True)
            boxes: dict[str, Box] = {}
            draw, count = partial(_run, made / TOY_PHOTOS), workers or core_count()
            with closing(map_in_processes(draw, tasks, count)) as drawn:
                for found in drawn:
                    boxes |= found
                    progress(len(boxes), total)
            _write_labels(made / TOY_LABELS, tasks)
            _write_ground_truth(made / TOY_GROUND_TRUTH, tasks, boxes)
            (made / TOY_PARAMETERS).write_text(json.dumps(parameters, indent=2) + "\n")
            if folder.exists():
                folder.rename(Path(workshop) / "old")
            made.rename(folder)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"cannot create {folder} ({reason}): give another folder") from None
    return folder


def _check_place(folder: Path) -> None:
    """Raise an error unless the folder is empty, missing, or contains toy landmarks."""
    empty = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not empty and not (folder / TOY_PARAMETERS).exists():
        raise InputError(f"{folder} exists and does not contain toy landmarks: give another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)


def _is_complete(folder: Path, parameters: dict[str, int], photos: int) -> bool:
    try:
        found = json.loads((folder / TOY_PARAMETERS).read_text())
    except (OSError, ValueError):
        return False
    files = [TOY_LABELS, TOY_GROUND_TRUTH]
    drawn = len(list((folder / TOY_PHOTOS).glob("*.jpg")))
    return found == parameters and drawn == photos and all((folder / f).is_file() for f in files)


def _tasks(buildings: int, views: int, seed: int) -> Iterator[_Task]:
    """Return the photos to take; all look-alikes of a building are in one part."""
    families = -(-buildings // FAMILY)
    benchmark, val = max(1, round(families / 3)), max(1, round(families / 10))
    plain = ["easy" if view % 2 else "hard" for view in range(views)]
    judged = ["query"] * _QUERIES + ["junk"] * _JUNK + plain[: views - _QUERIES - _JUNK]
    for family in range(families):
        part = "benchmark" if family < benchmark else "train"
        if benchmark <= family < benchmark + val:
            part = "val"
        members = draw_family(np.random.default_rng([seed, 0, family]), FAMILY + 1)
        for member in range(min(FAMILY, buildings - family * FAMILY)):
            number = family * FAMILY + member
            kinds = judged if part == "benchmark" else plain
            label = f"building{number:03d}"
            yield _Task(part, label, members[member], kinds, [seed, 1, number])
        if part == "benchmark":
            label, kinds = f"lookalike{family:03d}", plain[: views // 2]
            yield _Task("distractor", label, members[-1], kinds, [seed, 2, family])
    for block in range(benchmark):
        kinds = ["easy"] * (views // 2)
        yield _Task("distractor", f"street{block:03d}", None, kinds, [seed, 3, block])


def _run(folder: Path, task: _Task) -> dict[str, Box]:
    """Draw and save the photos of one task; each depends only on its own seed."""
    model = None
    if task.plan is not None:
        model = build(task.plan, np.random.default_rng(task.seed))
    boxes: dict[str, Box] = {}
    for view, (name, kind) in enumerate(task.photos):
        rng = np.random.default_rng([*task.seed, view])
        photo, boxes[name] = take_photo(model, draw_viewpoint(kind, rng), rng)
        photo.save(folder / f"{name}.jpg", quality=_QUALITY)
    return boxes


def _write_labels(path: Path, tasks: list[_Task]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "split"])
        for task in tasks:
            if task.part in ("train", "val"):
                for name, _ in task.photos:
                    writer.writerow([f"{TOY_PHOTOS}/{name}.jpg", task.label, task.part])


def _write_ground_truth(path: Path, tasks: list[_Task], boxes: dict[str, Box]) -> None:
    shown = [task for task in tasks if task.part in ("benchmark", "distractor")]
    names = [name for task in shown for name, kind in task.photos if kind != "query"]
    place = {name: index for index, name in enumerate(names)}
    queries: list[str] = []
    judgments: list[dict[str, Any]] = []
    for task in shown:
        found = {
            level: [place[name] for name, kind in task.photos if kind == level]
            for level in ("easy", "hard", "junk")
        }
        for name, kind in task.photos:
            if kind == "query":
                queries.append(name)
                judgments.append({"bbx": list(boxes[name]), **found})
    content = {"imlist": names, "qimlist": queries, "gnd": judgments}
    path.write_bytes(pickle.dumps(content, protocol=2))
