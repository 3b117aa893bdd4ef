"""`listwise evaluate` and `listwise study` as a person runs them."""

import json
import subprocess
import sys

import pytest
import torch
from PIL import Image

from listwise.data.toy import make_toy_landmarks
from listwise.models import RetrievalNet


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Toy landmarks and two models."""
    folder = tmp_path_factory.mktemp("place")
    make_toy_landmarks(folder / "toy", buildings=9, views=6, workers=1)
    for seed in (0, 1):
        torch.manual_seed(seed)
        RetrievalNet("resnet10t", weights="random").save(folder / f"run{seed}" / "model")
    return folder


def listwise(place, *arguments):
    command = [sys.executable, "-m", "listwise", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=place)


def test_figures_of_two_models_as_json_and_a_report(place):
    done = listwise(
        place, "evaluate", "run1/model", "toy", "--against", "run0/model", "--qe",
        "--report", "report.html", "--json", "--max-side", 64,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    names = ["run0/model", "run0/model + αQE", "run1/model", "run1/model + αQE"]
    assert list(found["figures"]) == names
    for row in found["figures"].values():
        assert list(row) == ["Easy", "Medium", "Hard"]
        assert all(0 < row[level]["mAP"] <= 1 for level in row)
    page = (place / "report.html").read_text().replace("<wbr>", "")
    assert all(name in page for name in names)
    assert "<h1" in page


def test_a_table_of_labelled_photos(place):
    done = listwise(
        place, "evaluate", "run0/model", "toy/train.csv", "--split", "val", "--report", "own.html"
    )
    assert done.returncode == 0, done.stderr
    assert "mAP@R" in done.stdout
    assert (place / "own.html").exists()


def test_distractors_of_this_model_count(place):
    size = ["--max-side", 64]
    extracted = listwise(place, "extract", "run0/model", "toy/jpg", "more.parquet", *size)
    assert extracted.returncode == 0, extracted.stderr
    options = ["--distractors", "more.parquet", "--json", *size, "--report", "more.html"]
    plain = json.loads(listwise(place, "evaluate", "run0/model", "toy", "--json", *size).stdout)
    more = json.loads(listwise(place, "evaluate", "run0/model", "toy", *options).stdout)
    hard = [found["figures"]["run0/model"]["Hard"]["mAP"] for found in (plain, more)]
    assert hard[1] < hard[0]
    page = (place / "more.html").read_text()
    assert f">{100 * hard[1]:.1f}<" in page
    assert "distractors" in page
    refused = listwise(place, "evaluate", "run1/model", "toy", *options)
    assert refused.returncode == 2
    assert "another model" in refused.stderr


def test_unreadable_photos_are_named(place):
    for kind in ("a", "b"):
        folder = place / "own" / kind
        folder.mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (40, 40), (90 * i, 60, 200 if kind == "a" else 20)).save(
                folder / f"{i}.png"
            )
    (place / "own" / "a" / "broken.jpg").write_bytes(b"no photo")
    done = listwise(place, "evaluate", "run0/model", "own")
    assert done.returncode == 0, done.stderr
    assert "1 photo is unreadable and left out" in done.stdout
    assert "broken.jpg" in done.stdout.replace("\n", "")


def test_poolings_print_a_markdown_table(place):
    done = listwise(
        place, "study", "poolings", "toy", "--whiten-on", "toy/train.csv",
        "--backbone", "resnet10t", "--weights", "random", "--max-side", 64, "--dim", 8,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "| pooling | | Easy | Medium | Hard |"
    assert len(lines) == 2 + 5 * 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["evaluate", "nowhere", "toy"], "no model folder nowhere"),
        (["evaluate", "run0/model", "roxfrod5k"], "did you mean roxford5k"),
        (["evaluate", "run0/model", "roxford5k"], "listwise download roxford5k"),
        (["evaluate", "run0/model", "toy", "--against", "run0/model"], "same model"),
        (["evaluate", "run0/model", "toy", "--scales", "x"], "numbers with commas"),
        (["evaluate", "run0/model", "toy", "--report", "no/where.html"], "no folder no"),
        (["evaluate", "run0/model", "toy", "--distractors", "gone.parquet"], "gone.parquet"),
        (["evaluate", "run0/model", "toy/train.csv", "--qe"], "labelled set"),
        (["evaluate", "run0/model", "toy", "--split", "val"], "--split is for your own"),
        (["study", "poolings", "toy"], "--whiten-on"),
        (["study", "poolings", "toy", "--whiten-on", "gone.csv"], "gone.csv"),
    ],
)
def test_mistakes_are_one_line(place, arguments, says):
    done = listwise(place, *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
