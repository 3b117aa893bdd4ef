"""The whitening of a model folder, learned from Python."""

import numpy as np
import pytest
import torch
from tiny_net import TINY_NET

from listwise.data import read_images, read_labelled
from listwise.descriptors import (
    DescriptorFile,
    Whitening,
    extract,
    learn_whitening,
    load_model,
    remove_whitening,
)
from listwise.errors import InputError
from listwise.models import RetrievalNet


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    RetrievalNet(TINY_NET, weights="random").save(tmp_path / "model")
    return tmp_path / "model"


def test_photos_and_their_descriptors_teach_the_same(folder, photos, tmp_path):
    done = []
    fixed = {"dim": 8, "power": 0.25, "shrinkage": 0.0, "device": "cpu"}
    learned = learn_whitening(folder, photos, **fixed, on_progress=done.append)
    assert sum(done) == 48
    remove_whitening(folder)
    plain = load_model(folder, "cpu")
    assert plain.whitening is None
    file = extract(plain, read_images(photos), tmp_path / "plain.parquet", workers=0)
    expected = Whitening.learn([file.read()], dim=8)
    again = learn_whitening(folder, file, **fixed)
    for found in (learned, again, load_model(folder, "cpu").whitening):
        np.testing.assert_allclose(found.projection, expected.projection, rtol=0, atol=1e-4)


def test_the_folder_of_a_run_stands_for_its_model(folder, photos):
    learn_whitening(folder.parent, photos, dim=4, device="cpu")
    assert load_model(folder, "cpu").dim == 4
    remove_whitening(folder.parent)
    assert load_model(folder, "cpu").whitening is None


def test_an_argument_that_does_not_fit_is_named(folder, photos):
    for name in ("power", "shrinkage"):
        with pytest.raises(InputError, match=f"`{name}` is for PCA: leave it out with `superv"):
            learn_whitening(folder, read_labelled(photos), **{name: 0.5}, supervised=True)
    with pytest.raises(InputError, match="`supervised` needs labels"):
        learn_whitening(folder, read_images(photos), supervised=True, device="cpu")
    with pytest.raises(InputError, match="has no whitening to remove"):
        remove_whitening(folder)
    assert not (folder / "whitening.parquet").exists()


def test_labels_choose_the_whitening(folder, photos):
    choices, notes = [], []
    options = {"device": "cpu", "on_choice": choices.append, "on_note": notes.append}
    learned = learn_whitening(folder, photos, **options)
    (choice,) = choices
    assert (choice.queries, choice.classes, notes) == (48, 8, [])
    assert (learned is not None) == choice.helps == (choice.gain.value > 2 * choice.gain.error)
    # Whoever gives a dimension wants it; the rest is chosen.
    learned = learn_whitening(folder, photos, dim=24, **options)
    best = choices[1].best
    assert (best.dim, learned.dim, learned.info.power) == (24, 24, best.power)
    assert learned.info.learned_from == 48
    assert bool(learned.info.shrinkage) == (best.shrinkage == "ledoit-wolf")
    assert load_model(folder, "cpu").whitening.fingerprint() == learned.fingerprint()


def test_a_whitening_that_does_not_help_is_not_kept(folder, photos, tmp_path):
    """Photos of a class are copies of one another, so every list is perfect without it."""
    for kind in range(8):
        (tmp_path / "copies" / f"class{kind}").mkdir(parents=True)
        content = (photos / f"class{kind}" / "0.jpg").read_bytes()
        for i in range(3):
            (tmp_path / "copies" / f"class{kind}" / f"{i}.jpg").write_bytes(content)
    choices = []
    found = learn_whitening(folder, tmp_path / "copies", device="cpu", on_choice=choices.append)
    assert found is None
    assert not choices[0].helps
    assert load_model(folder, "cpu").whitening is None
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_without_labels_the_variances_are_shrunk(folder, photos, tmp_path):
    notes = []
    plain = load_model(folder, "cpu")
    rows = plain.describe(read_images(photos), workers=0).descriptors
    learned = learn_whitening(folder, read_images(photos), device="cpu", on_note=notes.append)
    expected = Whitening.learn([rows], shrinkage="ledoit-wolf")
    assert 0 < expected.info.shrinkage < 1
    np.testing.assert_allclose(learned.apply(rows), expected.apply(rows), rtol=0, atol=1e-3)
    assert learned.info.shrinkage == pytest.approx(expected.info.shrinkage, rel=1e-4)
    (note,) = notes
    assert "not validated, because the photos have no labels" in note


def test_a_table_with_a_split_is_learned_without_it(folder, photos, tmp_path):
    splits = ["train"] * 4 + ["val"] * 3 + ["test"]
    lines = [
        f"{photos}/class{kind}/{i}.jpg,{kind},{splits[kind]}" for kind in range(8) for i in range(6)
    ]
    table = tmp_path / "photos.csv"
    table.write_text("path,label,split\n" + "\n".join(lines) + "\n")
    choices, done = [], []
    learned = learn_whitening(
        folder, table, dim=4, device="cpu", on_choice=choices.append, on_progress=done.append
    )
    assert (choices[0].queries, choices[0].classes) == (18, 3)
    assert learned.info.learned_from == 24
    assert sum(done) == 42


def test_labelled_descriptors_are_read_in_batches(folder, photos, monkeypatch):
    choices = []
    learned = learn_whitening(folder, photos, dim=8, device="cpu", on_choice=choices.append)

    def fail(file):
        raise AssertionError("all descriptors are in memory")

    batches = DescriptorFile.batches
    monkeypatch.setattr(DescriptorFile, "read", fail)
    monkeypatch.setattr(DescriptorFile, "batches", lambda file: batches(file, rows=5))
    again = learn_whitening(folder, photos, dim=8, device="cpu", on_choice=choices.append)
    assert choices[0].candidates == choices[1].candidates
    np.testing.assert_allclose(again.projection, learned.projection, rtol=0, atol=1e-4)
