"""`listwise evaluate` and `listwise study` as a person runs them."""

import json

import pytest
import torch
from PIL import Image
from tiny_net import TINY_NET

from listwise.models import RetrievalNet


@pytest.fixture(scope="module")
def place(toy_landmarks, tmp_path_factory):
    """Toy landmarks and two models."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "toy").symlink_to(toy_landmarks)
    for seed in (0, 1):
        torch.manual_seed(seed)
        RetrievalNet(TINY_NET, weights="random").save(folder / f"run{seed}" / "model")
    return folder


@pytest.fixture
def there(listwise, place, monkeypatch):
    """Run `listwise` at the place; gives exit code, stdout and stderr."""
    monkeypatch.chdir(place)
    return listwise


def test_figures_of_two_models_as_json_and_a_report(there, place):
    command = ["evaluate", "run1/model", "toy", "--against", "run0/model", "--qe"]
    code, out, err = there(*command, "--report", "report.html", "--json", "--max-side", "64")
    assert code == 0, err
    found = json.loads(out)
    names = ["run0", "run0 + αQE", "run1", "run1 + αQE"]
    assert list(found["figures"]) == names
    for row in found["figures"].values():
        assert list(row) == ["Easy", "Medium", "Hard"]
        assert all(0 < row[level]["mAP"] <= 1 for level in row)
    page = (place / "report.html").read_text().replace("<wbr>", "")
    assert all(name in page for name in names)
    assert "<h1" in page


def test_refined_rows_and_their_time(there):
    size = ["--max-side", 64]
    options = ["--refine", "superglobal", "--refine", "diffusion"]
    code, out, err = there("evaluate", "run0/model", "toy", *options, *size)
    assert code == 0, err
    assert "run0 + SuperGlobal  Easy" in out
    assert "run0 + diffusion" in out
    assert "time per query to rank the database: run0 " in out
    found = json.loads(there("evaluate", "run0/model", "toy", *options, *size, "--json")[1])
    assert list(found["milliseconds"]) == ["run0", "run0 + SuperGlobal", "run0 + diffusion"]
    assert "time per query" not in there("evaluate", "run0/model", "toy", *size)[1]
    code, _, err = there("evaluate", "run0/model", "toy", "--refine", "qe", *size)
    assert code == 2
    assert "--refine must be superglobal or diffusion, not 'qe'" in err
    code, _, err = there("evaluate", "run0/model", "toy/train.csv", *options)
    assert code == 2
    assert "--refine" in err


def test_the_best_quality_has_a_row_and_keeps_its_features(there, place):
    options = ["toy", "--quality", "best", "--max-side", 64, "--json"]
    code, out, err = there("evaluate", "run0/model", *options, "--features", "kept")
    assert code == 0, err
    found = json.loads(out)
    assert list(found["figures"]) == ["run0", "run0 + SP + diffusion"]
    plain, best = (row["Medium"]["mAP"] for row in found["figures"].values())
    assert best > plain
    assert found["milliseconds"]["run0 + SP + diffusion"] > 0
    kept = {path.name: path.stat().st_mtime_ns for path in (place / "kept").iterdir()}
    assert set(kept) == {"queries.arrow", "database.arrow"}
    again = json.loads(there("evaluate", "run0/model", *options, "--features", "kept")[1])
    assert again["figures"] == found["figures"]
    assert {path.name: path.stat().st_mtime_ns for path in (place / "kept").iterdir()} == kept
    for wrong in (["toy/train.csv", "--quality", "best"], ["toy", "--quality", "good"]):
        code, _, err = there("evaluate", "run0/model", *wrong)
        assert code == 2
        assert "--quality" in err


def test_a_table_of_labelled_photos(there, place):
    code, out, err = there(
        "evaluate", "run0/model", "toy/train.csv", "--split", "val", "--report", "own.html"
    )
    assert code == 0, err
    assert "mAP@R" in out
    assert (place / "own.html").exists()


def test_distractors_of_this_model_count(there, place):
    size = ["--max-side", 64]
    code, _, err = there("extract", "run0/model", "toy/jpg", "more.parquet", *size)
    assert code == 0, err
    options = ["--distractors", "more.parquet", "--json", *size, "--report", "more.html"]
    plain = json.loads(there("evaluate", "run0/model", "toy", "--json", *size)[1])
    more = json.loads(there("evaluate", "run0/model", "toy", *options)[1])
    hard = [found["figures"]["run0"]["Hard"]["mAP"] for found in (plain, more)]
    assert hard[1] < hard[0]
    page = (place / "more.html").read_text()
    assert f">{100 * hard[1]:.1f}<" in page
    assert "distractors" in page
    code, _, err = there("evaluate", "run1/model", "toy", *options)
    assert code == 2
    assert "another model" in err


def test_unreadable_photos_are_named(there, place):
    for kind in ("a", "b"):
        folder = place / "own" / kind
        folder.mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (40, 40), (90 * i, 60, 200 if kind == "a" else 20)).save(
                folder / f"{i}.png"
            )
    (place / "own" / "a" / "broken.jpg").write_bytes(b"no photo")
    code, out, err = there("evaluate", "run0/model", "own")
    assert code == 0, err
    assert "skipped 1 photo that cannot be read" in out
    assert "broken.jpg" in out.replace("\n", "")


def test_poolings_print_a_markdown_table(there):
    code, out, err = there(
        "study", "poolings", "toy", "--whiten-on", "toy/train.csv",
        "--backbone", TINY_NET, "--weights", "random", "--max-side", 64, "--dim", 8,
    )  # fmt: skip
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0] == "| pooling | | Easy | Medium | Hard |"
    assert len(lines) == 2 + 5 * 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["evaluate", "nowhere", "toy"], "no model folder nowhere"),
        (["evaluate", "run0/model", "roxfrod5k"], "did you mean roxford5k"),
        (["evaluate", "run0/model", "roxford5k"], "listwise download roxford5k"),
        (["evaluate", "run0/model", "toy", "--against", "run0/model"], "same model"),
        (["evaluate", "run0/model", "toy", "--scales", "x"], "numbers separated by commas"),
        (
            ["evaluate", "run0/model", "toy", "--report", "no/where.html"],
            "the folder no does not exist",
        ),
        (["evaluate", "run0/model", "toy", "--distractors", "gone.parquet"], "gone.parquet"),
        (["evaluate", "run0/model", "toy/train.csv", "--qe"], "labelled set"),
        (["evaluate", "run0/model", "toy", "--split", "val"], "--split is for your own"),
        (["study", "poolings", "toy"], "--whiten-on"),
        (["study", "poolings", "toy", "--whiten-on", "gone.csv"], "gone.csv"),
    ],
)
def test_mistakes_are_one_line(there, arguments, says):
    code, _, err = there(*arguments)
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1
