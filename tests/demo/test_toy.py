import csv
import hashlib
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from listwise.data.catalog.ground_truth import read_ground_truth
from listwise.demo import TOY_LABELS, TOY_PHOTOS, make_toy_landmarks
from listwise.demo.dataset import TOY_GROUND_TRUTH, TOY_PARAMETERS
from listwise.demo.plans import CHOICES, draw_family
from listwise.errors import InputError
from listwise.evaluation import JudgedQueries

pytestmark = pytest.mark.slow  # draws many photos

BUILDINGS, VIEWS = 9, 6  # the fewest that there may be


@pytest.fixture
def truth(toy_landmarks: Path) -> JudgedQueries:
    return read_ground_truth(toy_landmarks / TOY_GROUND_TRUTH)


def labels(folder: Path) -> list[dict[str, str]]:
    with (folder / TOY_LABELS).open(newline="") as file:
        return list(csv.DictReader(file))


def digest(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def building_of(name: str) -> str:
    return name.rpartition("_")[0]


def test_training_labels_hold_whole_buildings(toy_landmarks: Path) -> None:
    rows = labels(toy_landmarks)
    assert all((toy_landmarks / row["path"]).is_file() for row in rows)
    splits = {
        split: {r["label"] for r in rows if r["split"] == split} for split in ("train", "val")
    }
    assert splits["train"]
    assert splits["val"]
    assert not splits["train"] & splits["val"]
    assert set(Counter(row["label"] for row in rows).values()) == {VIEWS}


def test_no_building_of_the_benchmark_is_trained_on(
    toy_landmarks: Path, truth: JudgedQueries
) -> None:
    trained = {row["label"] for row in labels(toy_landmarks)}
    shown = {building_of(name) for name in truth.names + truth.queries}
    assert not trained & shown
    assert len({building_of(name) for name in truth.queries}) + len(trained) == BUILDINGS


def test_judgments_name_the_building_of_the_query_and_miss_none(truth: JudgedQueries) -> None:
    for query, *parts in zip(truth.queries, *truth.grades.values(), strict=True):
        assert all(len(part) > 0 for part in parts)
        judged = {truth.names[index] for part in parts for index in part}
        same = {name for name in truth.names if building_of(name) == building_of(query)}
        assert judged == same


def test_boxes_lie_in_their_photos(toy_landmarks: Path, truth: JudgedQueries) -> None:
    for query, (left, top, right, bottom) in zip(truth.queries, truth.boxes, strict=True):
        with Image.open(toy_landmarks / TOY_PHOTOS / f"{query}.jpg") as photo:
            assert 0 <= left < right <= photo.width
            assert 0 <= top < bottom <= photo.height
            assert (right - left) * (bottom - top) > 0.15 * photo.width * photo.height


def test_complete_folder_is_kept(toy_landmarks: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in toy_landmarks.rglob("*")}
    calls: list[tuple[int, int]] = []
    again = make_toy_landmarks(
        toy_landmarks,
        buildings=BUILDINGS,
        views=VIEWS,
        progress=lambda *numbers: calls.append(numbers),
    )
    assert again == toy_landmarks
    assert not calls
    assert {path: path.stat().st_mtime_ns for path in toy_landmarks.rglob("*")} == before


def test_incomplete_or_different_folder_is_remade(toy_landmarks: Path, tmp_path: Path) -> None:
    """By several workers, which draw the same photos as one."""
    folder = tmp_path / "toy"
    shutil.copytree(toy_landmarks, folder)
    # Of another version, and a photo is gone.
    next((folder / TOY_PHOTOS).iterdir()).unlink()
    parameters = json.loads((folder / TOY_PARAMETERS).read_text())
    (folder / TOY_PARAMETERS).write_text(json.dumps({**parameters, "version": 0}))
    calls: list[tuple[int, int]] = []
    make_toy_landmarks(
        folder, buildings=9, views=6, workers=3, progress=lambda *numbers: calls.append(numbers)
    )
    assert digest(folder) == digest(toy_landmarks)
    photos = len(list((folder / TOY_PHOTOS).iterdir()))
    assert calls[-1] == (photos, photos)
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]


def test_a_break_leaves_no_half_folder(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_toy_landmarks(tmp_path / "toy", buildings=9, views=6, workers=1, progress=stop)
    assert not list(tmp_path.iterdir())


def test_something_else_in_the_way_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    for place in (tmp_path, tmp_path / "notes", tmp_path / "notes" / "toy"):
        with pytest.raises(InputError, match="give another folder"):
            make_toy_landmarks(place, buildings=9, views=6)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("notes", "mine")]


@pytest.mark.parametrize(("buildings", "views"), [(8, 14), (90, 5)])
def test_too_few_are_refused(tmp_path: Path, buildings: int, views: int) -> None:
    with pytest.raises(InputError, match="at least"):
        make_toy_landmarks(tmp_path / "toy", buildings=buildings, views=views)
    assert not (tmp_path / "toy").exists()


@pytest.mark.parametrize("seed", range(20))
def test_look_alikes_share_the_plan_and_differ_in_details(seed: int) -> None:
    first, *others = draw_family(np.random.default_rng(seed), 4)
    assert len({first, *others}) == 4
    for other in others:
        changed = {name for name, value in vars(other).items() if value != getattr(first, name)}
        assert changed <= CHOICES.keys()
        assert 1 <= len(changed) < len(CHOICES) / 2
