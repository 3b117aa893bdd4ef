"""Shorter descriptors, descriptors in fewer bits, and labels with levels."""

import json
import shutil

import numpy as np
import pytest
import torch
from tiny_net import TINY_NET
from typer.testing import CliRunner

from listwise.cli.main import app
from listwise.data import LabelledImages, read_labelled
from listwise.data.catalog import Benchmark
from listwise.data.labelled import Images
from listwise.descriptors import Model, Whitening, load_model
from listwise.errors import InputError
from listwise.evaluation import evaluate_hierarchical, evaluate_labelled
from listwise.models import RetrievalNet
from listwise.results import evaluate
from listwise.results.describe import BenchmarkDescriptors
from listwise.results.sizes import evaluate_sizes, format_sizes

LABELS = np.repeat(np.arange(6), 4)


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture
def described():
    generator = np.random.default_rng(0)
    centers = generator.normal(size=(6, 16))
    rows = unit(centers[LABELS] + generator.normal(size=(24, 16)) + 3).astype(np.float32)
    names = tuple(map(str, range(24)))
    labelled = LabelledImages.from_names(Images(names, names, None), LABELS.astype(str), None)
    return BenchmarkDescriptors(Benchmark.of_labels("six", labelled), rows, rows)


def test_each_length_is_evaluated_in_each_format(described):
    rows = described.database
    sizes = evaluate_sizes(described, [16, 5])
    assert [(size.dim, size.stored_as, size.bytes) for size in sizes] == [
        *((16, "float32", 64), (16, "int8", 16), (16, "bits", 2)),
        *((5, "float32", 20), (5, "int8", 5), (5, "bits", 1)),
    ]
    short = unit(rows[:, :5])
    mean = short.mean(axis=0)
    bits = np.where(unit(short - mean) > 0, 1, -1)
    largest = np.abs(short).max(axis=1, keepdims=True)
    expected = [(rows, rows), None, None, (short, short)]
    expected += [(short, unit(np.round(short / largest * 127))), (unit(short - mean), bits)]
    for size, pair in zip(sizes, expected, strict=True):
        if pair is not None:
            scores = pair[0] @ pair[1].T
            np.fill_diagonal(scores, -np.inf)
            ranked = LABELS[np.argsort(-scores, axis=1, kind="stable")[:, :-1]]
            found = ranked == LABELS[:, None]
            places = np.arange(1, 24)
            ap = ((found.cumsum(axis=1) / places) * found).sum(axis=1) / 3
            assert size.maps["Labels"] == pytest.approx(ap.mean(), abs=1e-6)
    lines = format_sizes(sizes).splitlines()
    assert lines[0].split() == ["dimensions", "stored", "as", "bytes", "mAP", "Labels"]
    assert lines[2].split() == ["16", "float32", "64", f"{100 * sizes[0].maps['Labels']:.1f}"]
    for dims in ([0], [17]):
        with pytest.raises(InputError, match="`dims` must be from 1 to 16"):
            evaluate_sizes(described, dims)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    Model(RetrievalNet(TINY_NET, weights="random")).save(folder)
    return folder


def run(*arguments):
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_model_keeps_the_first_dimensions(folder, photos, tmp_path):
    model = load_model(folder)
    photo = photos / "class0" / "0.jpg"
    whole = model.encode(photo)
    short = model.truncate(8)
    assert short.dim == 8
    assert short.fingerprint != model.fingerprint
    np.testing.assert_allclose(short.encode(photo), unit(whole[None, :8])[0], atol=1e-6)
    short.save(tmp_path / "short")
    again = load_model(tmp_path / "short")
    assert again.fingerprint == short.fingerprint
    assert again.truncate(3).dim == 3
    with pytest.raises(InputError, match="`dim` must be from 1 to 8, not 9"):
        again.truncate(9)
    with pytest.raises(InputError, match="`dim` must be from 1 to 8, not 'a'"):
        again.truncate("a")
    whitened = Whitening.learn([np.random.default_rng(0).normal(size=(50, model.dim))])
    cut = Model(model.net, whitened).truncate(4)
    expected = unit(whitened.apply(whole[None])[:, :4])
    np.testing.assert_allclose(cut.encode(photo)[None], expected, atol=1e-6)


def test_the_command_compares_lengths(folder, photos):
    found = json.loads(run("evaluate", folder, photos, "--dims", "96,4", "--json"))
    assert [size["bytes"] for size in found["sizes"]] == [384, 96, 12, 16, 4, 1]
    assert found["sizes"][0]["maps"]["Labels"] == pytest.approx(
        next(iter(found["figures"].values()))["Labels"]["mAP"]
    )


def test_labels_with_levels_have_metrics_of_all_levels(folder, photos, tmp_path):
    rows = ["path,label1,label2"]
    for kind in range(4):
        group = f"{'ab'[kind // 2]},class{kind}"
        rows += [f"{photos}/class{kind}/{number}.jpg,{group}" for number in range(3)]
    (tmp_path / "table.csv").write_text("\n".join(rows))
    images = read_labelled(tmp_path / "table.csv")
    assert images.class_names == ("a/class0", "a/class1", "b/class2", "b/class3")
    model = load_model(folder)
    assert evaluate(model, images).levels is None  # they take long, and "/" may be a part of a name
    result = evaluate(model, images, levels=True)
    levels = np.stack([images.labels // 2, images.labels], axis=1)
    descriptors = model.encode([str(path) for path in images.paths])
    expected = evaluate_hierarchical(descriptors, levels)
    assert result.levels.figures == pytest.approx(expected.figures, abs=1e-6)
    assert result.levels.maps[1] == pytest.approx(
        evaluate_labelled(descriptors, images.labels).mAP, abs=1e-6
    )
    assert "all levels of the labels: H-AP" in result.table()
    for kind in range(4):  # the same classes as nested folders
        nested = tmp_path / "nested" / "ab"[kind // 2] / f"class{kind}"
        nested.mkdir(parents=True)
        for number in range(3):
            shutil.copy(photos / f"class{kind}/{number}.jpg", nested)
    shown = json.loads(run("evaluate", folder, tmp_path / "nested", "--levels", "--json"))
    assert shown["levels"] == pytest.approx(expected.figures, abs=1e-6)
    (tmp_path / "nested/b/c.jpg").symlink_to(photos / "class0/0.jpg")
    with pytest.raises(InputError, match="levels: 'b' has 1, 'a/class0' has 2"):
        evaluate(model, tmp_path / "nested", levels=True)
    with pytest.raises(InputError, match=r"have no levels: .* or leave out `levels`"):
        evaluate(model, photos, levels=True)
    (tmp_path / "both.csv").write_text("path,label,label1\na.jpg,x,y\n")
    with pytest.raises(InputError, match="has a column label and label1"):
        read_labelled(tmp_path / "both.csv")
    (tmp_path / "gap.csv").write_text("path,label1,label3\na.jpg,x,y\n")
    with pytest.raises(InputError, match="label1, label3, with a gap"):
        read_labelled(tmp_path / "gap.csv")
