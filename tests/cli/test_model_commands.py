"""`listwise whiten`, `tune`, `evaluate` and `export`, and files that other commands read."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_net import TINY_NET

from listwise.data import read_images
from listwise.descriptors import Model, Whitening, extract, load_model
from listwise.models import RetrievalNet

ONNX = Path(__file__).parents[1] / "descriptors" / "version-1.onnx"
FIXED = ("--dim", 10, "--power", 0.25, "--shrinkage", 0)


def described(photos):
    return load_model("model", "cpu").describe(read_images(photos), workers=0).descriptors


def test_a_whitening_becomes_part_of_the_model(run, model, photos, tmp_path):
    plain = described(photos)
    assert "96 -> 10 dimensions, learned from 48" in run("whiten", model, photos, *FIXED)
    expected = Whitening.learn([plain], dim=10).apply(plain)
    np.testing.assert_allclose(described(photos), expected, rtol=0, atol=1e-4)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["model.safetensors"]


def test_a_whitening_from_a_descriptor_file_is_shortened_and_removed(listwise, run, model, photos):
    opened = load_model(model, "cpu")
    file = extract(opened, read_images(photos), "plain.parquet", workers=0)
    answer = run("whiten", model, "plain.parquet", "--power", 0.5, "--json")
    assert (answer["method"], answer["power"], answer["learned_from"]) == ("pca", 0.5, 48)
    expected = Whitening.learn(file.batches(), power=0.5, shrinkage="ledoit-wolf")
    assert answer["shrinkage"] == expected.info.shrinkage
    assert load_model(model).whitening.fingerprint() == expected.fingerprint()
    assert answer["dim"] == expected.dim
    _, out, _ = listwise("whiten", model, "plain.parquet", "--dim", 6)
    assert "note: the whitening is not validated, because there are no labels" in out
    code, _, err = listwise("index", "build", "shop", photos, "--model", model, "--max-side", 40)
    assert (code, err.count("--max-side 40 --scales 1")) == (0, 1)
    assert "keeps the first 5 dimensions" in run("whiten", model, "--dim", 5)
    assert load_model(model).dim == 5
    assert "no longer whitens" in run("whiten", model, "--remove")
    assert load_model(model).fingerprint == opened.fingerprint


def test_an_earlier_whitening_stays_if_none_helps_and_the_message_names_it(
    run, model, photos, copies
):
    out = run("whiten", model, copies)
    assert "no whitening is clearly better than none: model is unchanged\n" in out
    run("whiten", model, photos, *FIXED)
    out = run("whiten", model, copies)
    assert "it keeps its earlier whitening: remove it with --remove" in " ".join(out.split())
    assert load_model(model).dim == 10


def test_tuning_shows_what_was_kept_and_what_it_costs(run, photos):
    torch.manual_seed(1)
    RetrievalNet("test_resnet.r160_in1k", weights="random").save("model")
    shutil.copytree("model", "copy")
    out = run("tune", "model", photos, "--device", "cpu", "--workers", 0)
    lines = [line for line in out.splitlines() if not line.startswith("note: ")]
    assert lines[0].split() == ["setting", "value", "mAP", "gain", "cost"]
    steps = [line.split("  ")[0] for line in lines[1:6]]
    assert steps == ["start", "scales", "GeM power", "whitening", "αQE"]
    settings = load_model("model", "cpu").tuned
    assert "kept" in lines[2]
    assert lines[2].split()[1] == ",".join(f"{scale:g}" for scale in settings.scales)
    assert "(48 photos of 8 classes, each searched in one of 2 parts" in lines[6]
    assert lines[7] == "the settings are stored in model"
    answer = run("extract", "model", photos, "out.parquet", "--json")
    assert answer["settings"]["scales"] == list(settings.scales)
    answer = run("tune", "copy", photos, "--max-cost", 1, "--json")
    assert answer["validation_map"] >= answer["start_map"]
    assert answer["changed"] == any(step["taken"] for step in answer["steps"])
    assert (answer["settings"] is not None) == answer["changed"]


@pytest.fixture
def models(listwise, toy_landmarks):
    """Two models, and toy landmarks to evaluate them on."""
    Path("toy").symlink_to(toy_landmarks)
    for seed in (0, 1):
        torch.manual_seed(seed)
        RetrievalNet(TINY_NET, weights="random").save(f"run{seed}/model")
    return "run0/model", "run1/model"


def test_figures_of_two_models_and_a_report(run, models):
    one, two = models
    command = ("evaluate", two, "toy", "--against", one, "--expand", "--max-side", 64)
    found = run(*command, "--report", "report.html", "--json")
    names = ["run0", "run0 + αQE", "run1", "run1 + αQE"]
    assert list(found["figures"]) == names
    for row in found["figures"].values():
        assert list(row) == ["Easy", "Medium", "Hard"]
        assert all(0 < row[level]["mAP"] <= 1 for level in row)
    page = Path("report.html").read_text().replace("<wbr>", "")
    assert all(name in page for name in names)
    out = run("evaluate", one, "toy/train.csv", "--split", "val", "--report", "own.html")
    assert "mAP@R" in out
    assert "wrote the report to own.html" in out
    assert Path("own.html").exists()


def test_refined_rows_and_their_time(run, models):
    command = ("evaluate", models[0], "toy", "--max-side", 64)
    assert "time per query" not in run(*command)
    command += ("--refine", "superglobal", "--refine", "diffusion")
    out = run(*command)
    assert "run0 + SuperGlobal  Easy" in out
    assert "time per query to rank the database: run0 " in out
    found = run(*command, "--json")
    assert list(found["milliseconds"]) == ["run0", "run0 + SuperGlobal", "run0 + diffusion"]


def test_the_best_quality_has_a_row_and_keeps_its_features(run, models):
    command = ("evaluate", models[0], "toy", "--quality", "best", "--max-side", 64, "--json")
    found = run(*command, "--features", "kept")
    assert list(found["figures"]) == ["run0", "run0 + SP + diffusion"]
    plain, best = (row["Medium"]["mAP"] for row in found["figures"].values())
    assert best > plain
    assert found["milliseconds"]["run0 + SP + diffusion"] > 0
    kept = {path.name: path.stat().st_mtime_ns for path in Path("kept").iterdir()}
    assert set(kept) == {"queries.features", "database.features"}
    assert run(*command, "--features", "kept")["figures"] == found["figures"]
    assert {path.name: path.stat().st_mtime_ns for path in Path("kept").iterdir()} == kept


@pytest.mark.slow
def test_an_exported_model_gives_the_same_descriptors(run, listwise, photos):
    Model(RetrievalNet(TINY_NET, weights="random")).save("model")
    facts = run("export", "model", "model.onnx", "--max-side", "64", "--json")
    size = Path("model.onnx").stat().st_size
    assert (facts["dim"], facts["bytes"], facts["precision"]) == (96, size, "float32")
    assert "mAP" in listwise("evaluate", "model.onnx", photos)[1]
    some = sorted(photos.rglob("*.jpg"))[:4]
    expected = load_model("model").encode(some, max_side=64)
    np.testing.assert_allclose(load_model("model.onnx").encode(some), expected, atol=1e-4)


def test_index_and_search_with_an_onnx_file(run, listwise, photos):
    assert listwise("index", "build", "shop", photos / "class0", "--model", ONNX)[0] == 0
    (hit,) = run("search", "shop", photos / "class0/2.jpg", "-k", "1", "--json")["results"]
    assert hit["id"] == "2.jpg"


def test_a_model_is_calibrated_by_a_command(listwise, run, model, photos, copies):
    code, _, err = listwise("search", "none", photos / "class0" / "0.jpg")
    assert code == 2
    opened = load_model(model)
    assert opened.calibration is None
    out = run("calibrate", model, copies, "--max-side", 48)
    assert "is calibrated: score" in out
    assert "on classes left out of the fit, the first 5 hits have a mean probability of" in out
    again = load_model(model)
    assert again.calibration.source == str(Path(copies).resolve())
    assert again.fingerprint == opened.fingerprint
    answer = run("calibrate", model, copies, "--max-side", 48, "--json")
    assert answer["slope"] == again.calibration.slope
    run("index", "build", "shop", photos, "--model", model)
    hits = run("search", "shop", photos / "class0" / "0.jpg", "--min-probability", 0.5, "--json")[
        "results"
    ]
    assert hits[0]["probability"] >= 0.5
    _, _, err = listwise("calibrate", model, photos / "class0")
    assert "directly in it" in err


def test_each_map_says_what_it_measures(run, model, photos):
    out = " ".join(run("evaluate", model, photos).split())
    assert "each query is searched in the whole database" in out
    out = " ".join(run("whiten", model, photos).split())
    assert "each searched in one of 2 parts; listwise evaluate searches all together" in out
    out = " ".join(run("tune", model, photos).split())
    assert "each searched in one of 2 parts; listwise evaluate searches all together" in out
