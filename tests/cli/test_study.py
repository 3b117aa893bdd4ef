"""`listwise study` as a person runs it."""

import csv
import json
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml
from tiny_net import TINY_NET

from listwise.data import toy
from listwise.settings import make_config
from listwise.studies.definitions import SCHEDULE, STUDIES
from listwise.training import Trainer

HELP: dict[str, str] = {}  # by the name of a study
GUIDE = Path(__file__).parents[2] / "docs" / "studies.md"
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

    monkeypatch.setattr(toy, "make_toy_landmarks", make)


def test_a_study_is_made_once_and_goes_on_after_an_interruption(
    listwise, photos, tmp_path, monkeypatch
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
    code, out, _ = listwise(*command)
    assert code == 0
    assert "run 2 of 2: bins-20, seed 0" in out
    assert "| bins M | seeds | validation mAP |" in out
    assert "wrote results.csv, table.md and plot.svg to out" in out
    code, out, err = listwise(*command, "--json")
    assert code == 0
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


def test_toy_landmarks_in_the_small_preset_with_their_benchmark(listwise, small_toy, tmp_path):
    code, _, err = listwise(
        "study", "ties", "toy", "--preset", "small", "--out", "out", *TINY, "--seeds", 1,
        "--images", 36, "--batch-size", 18, "--benchmark", "toy", "--max-side", 48, "--dim", 8,
    )  # fmt: skip
    assert code == 0, err
    text = (tmp_path / "out" / "table.md").read_text()
    assert "| Easy plain | Medium plain | Hard plain | Easy whitened |" in text
    assert "| ap − tie-aware | 1 |" in text
    assert (tmp_path / "out" / "toy-landmarks" / "train.csv").exists()


@pytest.fixture
def help_of(listwise):
    """The help of a study; each is rendered once."""

    def get(name):
        if name not in HELP:
            code, HELP[name], _ = listwise("study", name, "--help")
            assert code == 0
        return HELP[name]

    return get


def test_flags_that_a_study_sets_itself_are_not_offered(help_of):
    for name, study in STUDIES.items():
        out = help_of(name)
        assert f"listwise study {name} toy --preset small" in out
        offered = set(re.findall(r"--[a-z][a-z-]*", out))
        names = [flag.replace(".", "-").replace("_", "-") for flag in (*SCHEDULE, *study.varies)]
        own = {f"--{flag}" for flag in names}
        assert not offered & own
        assert {"--backbone", "--crops-size", "--variants", "--seeds"} <= offered


def test_the_guide_names_flags_that_exist(help_of):
    text = GUIDE.read_text(encoding="utf-8")
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    shared = re.search(r'GIVEN="(.*)"', blocks).group(1)
    commands = re.findall(r"^listwise study (\S+) (.*)$", blocks, re.MULTILINE)
    assert {name for name, _ in commands} == {*STUDIES, "poolings", "peers"}
    for name, options in commands:
        offered = help_of(name)
        named = set(re.findall(r"--[a-z][a-z-]*", options.replace("$GIVEN", shared)))
        assert named <= set(re.findall(r"--[a-z][a-z-]*", offered)), name
    offered = set(re.findall(r"--[a-z][a-z-]*", help_of("classes") + help_of("peers")))
    assert set(re.findall(r"`(--[a-z][a-z-]*)[ `]", text)) <= offered
    for block in re.findall(r"^```yaml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        make_config(yaml.safe_load(block), GUIDE.name)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["losses", "PHOTOS"], "--out"),
        (["losses", "PHOTOS", "--updates", "3", "--out", "o"], "No such option: --updates"),
        (["losses", "nowhere", "--out", "o"], "nowhere"),
        (["losses", "PHOTOS", "--preset", "x", "--out", "o"], "auto, paper or small"),
        (["losses", "PHOTOS", "--dim", "4", "--out", "o"], "need a --benchmark"),
        (["losses", "PHOTOS", "--variants", "best", "--out", "o"], "no variant 'best'"),
        (["losses", "PHOTOS", "--benchmark", "roxfrod5k", "--out", "o"], "did you mean roxford5k"),
        (["bins", "PHOTOS", "--rates", "fast", "--out", "o"], "numbers separated by commas"),
        (
            ["bins", "PHOTOS", "--variants", "1", "--out", "o"],
            "--variants contains '1': bins must be greater than or equal to 2, not 1",
        ),
        (["bins", "PHOTOS", "--config", "gone.yaml", "--out", "o"], "gone.yaml"),
        (["classes", "PHOTOS", "--variants", "8", "--out", "o"], "or all"),
        (["poolings", "toy", "--whiten-on", "toy"], "give a folder with --out, into which"),
        (["peers", "PHOTOS", "--losses", "best", "--out", "o"], "--losses contains 'best'"),
        (["peers", "PHOTOS", "--rates", "fast", "--out", "o"], "numbers separated by commas"),
    ],
)
def test_mistakes_are_one_line(listwise, photos, arguments, says):
    arguments = [photos if word == "PHOTOS" else word for word in arguments]
    code, _, err = listwise("study", *arguments)
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1


def test_poolings_are_written(listwise, small_toy, tmp_path):
    code, out, err = listwise(
        "study", "poolings", "toy", "--whiten-on", "toy", "--out", "out",
        "--backbone", TINY_NET, "--weights", "random", "--max-side", 48,
        "--dim", 4, "--device", "cpu",
    )  # fmt: skip
    assert code == 0, err
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


def test_peers_on_toy_landmarks(listwise, tmp_path, monkeypatch):
    make = partial(toy.make_toy_landmarks, buildings=12, views=6, workers=1)
    monkeypatch.setattr(toy, "make_toy_landmarks", make)
    (tmp_path / "quick.yaml").write_text("updates: 2\nbatch_size: 12\ncrops: {size: 32}\n")
    command = [
        "study", "peers", "toy", "--out", "out", "--config", "quick.yaml", "--seeds", 1,
        "--backbone", TINY_NET, "--weights", "random", "--projection", 8,
        "--epochs", 1, "--batch", 12, "--crop", 32, "--device", "cpu", "--workers", 0,
    ]  # fmt: skip
    code, out, err = listwise(*command)
    assert code == 0, err
    assert "| recipe | seeds | Recall@1 | mAP@R | time | updates | images |" in out
    assert "run 3 of 3: proxy-anchor, seed 0" in out
    assert "Listwise is " in out
    code, out, err = listwise(*command, "--json")
    assert code == 0
    assert err.count("already finished") == 3
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["method"] for row in rows] == ["listwise", "multi-similarity", "proxy-anchor"]
    assert "listwise study peers toy" in (tmp_path / "out" / "table.md").read_text()


def test_peers_without_pytorch_metric_learning(listwise, photos, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning", None)
    code, _, err = listwise("study", "peers", photos, "--out", "out")
    assert code == 2
    assert err.strip() == (
        "listwise: the study peers needs pytorch-metric-learning: pip install 'listwise[compare]'"
    )
