"""`listwise study` as a person runs it."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
from tiny_net import TINY_NET

import listwise.demo
from listwise.studies.definitions import STUDIES
from listwise.training import Trainer

TINY = [
    "--backbone", TINY_NET, "--weights", "random", "--crops-size", 32,
    "--learning-rate", 1e-3, "--workers", 0, "--device", "cpu",
]  # fmt: skip
OWN = ["--val-fraction", 0.25, "--val-max-side", 48, "--images", 24, "--validations", 1]


@pytest.fixture
def small_toy(toy_landmarks, monkeypatch):
    """Toy landmarks of three buildings for each part."""

    def make(folder, **_):
        return Path(shutil.copytree(toy_landmarks, folder, dirs_exist_ok=True))

    monkeypatch.setattr(listwise.demo, "make_toy_landmarks", make)


def test_a_study_is_made_once_and_goes_on_after_an_interruption(
    listwise, run, photos, tmp_path, monkeypatch
):
    command = ["study", "bins", photos, "--out", "out", *TINY, *OWN, "--batch-size", 12]
    command += ["--variants", "5, 20", "--seeds", 1]

    def interrupted(trainer):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "fit", interrupted)
        code, _, err = listwise(*command)
    assert code == 130
    assert err.strip() == "listwise: stopped; run the same command again to resume"
    out = run(*command)
    assert "run 2 of 2: bins-20, seed 0" in out
    assert re.search(r"the training of 2 runs takes about \d+ (s|min)", out)
    assert re.search(r"the training of 1 run takes about \d+ (s|min)", out)
    assert "| bins M | seeds | validation mAP |" in out
    assert "wrote results.csv, table.md and plot.svg to out" in out
    _, out, err = listwise(*command, "--json")
    assert err.count("already finished") == 2
    rows = [json.loads(line) for line in out.splitlines()]
    with (tmp_path / "out" / "results.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [(row["study"], row["variant"], row["value"]) for row in rows] == [
        ("bins", "bins-5", 5), ("bins", "bins-20", 20),
    ]  # fmt: skip
    for row, line in zip(rows, written, strict=True):
        assert float(line["validation_map"]) == row["validation_map"]
    assert "listwise study bins" in (tmp_path / "out" / "table.md").read_text()
    assert (tmp_path / "out" / "plot.svg").read_text().startswith("<svg")


def test_toy_landmarks_in_the_small_preset_with_their_benchmark(run, small_toy, tmp_path):
    run(
        "study", "ties", "toy", "--preset", "small", "--out", "out", *TINY, "--seeds", 1,
        "--images", 36, "--batch-size", 18, "--benchmark", "toy", "--max-side", 48, "--dim", 8,
    )  # fmt: skip
    text = (tmp_path / "out" / "table.md").read_text()
    assert "| Easy plain | Medium plain | Hard plain | Easy whitened |" in text
    assert "| ap − tie-aware | 1 |" in text
    assert (tmp_path / "out" / "toy-landmarks" / "train.csv").exists()


def test_the_guide_has_every_study():
    guide = (Path(__file__).parents[2] / "docs" / "studies.md").read_text(encoding="utf-8")
    named = re.findall(r"^listwise study (\S+)", guide, re.MULTILINE)
    assert set(named) == {*STUDIES, "poolings"}


def test_poolings_are_written(run, small_toy, tmp_path):
    out = run(
        "study", "poolings", "toy", "--whiten-on", "toy", "--out", "out",
        "--backbone", TINY_NET, "--weights", "random", "--max-side", 48,
        "--dim", 4, "--device", "cpu",
    )  # fmt: skip
    with (tmp_path / "out" / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 15
    table = (tmp_path / "out" / "table.md").read_text()
    for row in rows:
        shown = " | ".join(
            f"{100 * float(row[f'{p}_map']):.1f}" for p in ("easy", "medium", "hard")
        )
        assert f"| {row['pooling']} | {row['variant']} | {shown} |" in table
        assert shown in out
    assert (tmp_path / "out" / "plot.svg").read_text().count('class="mean"') == 3 * 15
