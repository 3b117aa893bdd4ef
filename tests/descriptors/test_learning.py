"""The whitening of a model folder, learned from Python."""

import warnings
from dataclasses import replace

import numpy as np
import pytest

from listwise.data import read_images, read_labelled
from listwise.descriptors import (
    Whitening,
    extract,
    learn_whitening,
    load_model,
    remove_whitening,
)
from listwise.errors import InputError, ListwiseWarning


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
    notes = []
    options = {"device": "cpu", "on_note": notes.append}
    learned, choice, _ = learn_whitening(folder, photos, **options)
    assert (choice.queries, choice.classes, notes) == (48, 8, [])
    assert (learned is not None) == (choice.gain.value > 2 * choice.gain.error)
    # Whoever gives a dimension wants it; the rest is chosen.
    learned, choice, _ = learn_whitening(folder, photos, dim=24, **options)
    best = choice.best
    assert (best.dim, learned.dim, learned.info.power) == (24, 24, best.power)
    assert learned.info.learned_from == 48
    assert bool(learned.info.shrinkage) == (best.shrinkage == "ledoit-wolf")
    assert load_model(folder, "cpu").whitening.fingerprint() == learned.fingerprint()


def test_without_labels_the_variances_are_shrunk(folder, photos, tmp_path):
    notes = []
    plain = load_model(folder, "cpu")
    rows = plain.describe(read_images(photos), workers=0).descriptors
    options = {"device": "cpu", "on_note": notes.append}
    learned = learn_whitening(folder, read_images(photos), **options).whitening
    expected = Whitening.learn([rows], shrinkage="ledoit-wolf")
    assert 0 < expected.info.shrinkage < 1
    np.testing.assert_allclose(learned.apply(rows), expected.apply(rows), rtol=0, atol=1e-3)
    assert learned.info.shrinkage == pytest.approx(expected.info.shrinkage, rel=1e-4)
    validated, size = notes
    assert "not validated, because there are no labels" in validated
    assert "is used with photos of up to 512 pixels at the scale 1 from now on" in size
    assert load_model(folder, "cpu").tuned.max_side == 512


def test_a_table_with_a_split_is_learned_without_it(folder, photos, tmp_path):
    splits = ["train"] * 4 + ["val"] * 3 + ["test"]
    lines = [
        f"{photos}/class{kind}/{i}.jpg,{kind},{splits[kind]}" for kind in range(8) for i in range(6)
    ]
    table = tmp_path / "photos.csv"
    table.write_text("path,label,split\n" + "\n".join(lines) + "\n")
    done = []
    options = {"dim": 4, "device": "cpu", "on_progress": done.append}
    learned, choice, _ = learn_whitening(folder, table, **options)
    assert (choice.queries, choice.classes) == (18, 3)
    assert learned.info.learned_from == 24
    assert sum(done) == 42


def test_a_whitening_is_not_used_at_another_size_or_scale_without_a_warning(
    folder, photos, tmp_path
):
    learn_whitening(folder, read_images(photos), dim=8, max_side=40, device="cpu")
    model = load_model(folder, "cpu")
    images = read_images(photos).subset([0, 1])
    assert model.tuned.max_side == 40
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.encode(images, workers=0)
        extract(model, images, tmp_path / "same.parquet", workers=0)
    with pytest.warns(ListwiseWarning, match="up to 40 pixels .* used with .* up to 64 pixels"):
        extract(model, images, tmp_path / "other.parquet", max_side=64, workers=0)
    learn = rf"learn it again with listwise whiten {folder} PHOTOS --max-side 40 --scales 1,0.5"
    with pytest.warns(ListwiseWarning, match=rf"at the scales 1, 0.5: use the same, or {learn}"):
        model.encode(images, scales=(1.0, 0.5), workers=0)
    # `tune` has validated other scales and kept the whitening: both are used without a warning.
    tuned = replace(model, tuned=model.tuned.model_copy(update={"scales": (1.0, 0.5)}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned.encode(images, workers=0)
        tuned.encode(images, scales=(1.0,), workers=0)
        tuned.truncate(4).encode(images, max_side=40, scales=(1.0,), workers=0)
    learn_whitening(folder, read_images(photos), dim=8, scales=(1.0, 0.5), device="cpu")
    info = load_model(folder, "cpu").whitening.info
    assert (info.max_side, info.scales) == (40, (1.0, 0.5))
