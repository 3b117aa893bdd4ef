"""Settings chosen on validation photos, kept in the model and used where none are given."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_net import TINY_NET

import listwise
from listwise.data import load_image, read_images, read_labelled
from listwise.descriptors import Model, Whitening, extract, load_model
from listwise.errors import InputError
from listwise.evaluation import evaluate_labelled, mean_average_precision
from listwise.models import RetrievalNet
from listwise.models.storage import ModelSettings
from listwise.results import tune
from listwise.results.scaling import describe_at_scales
from listwise.search import alpha_query_expansion, database_augmentation, open_index
from listwise.settings import Expansion


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(1)
    return RetrievalNet(TINY_NET, weights="random").eval()


@pytest.fixture
def table(photos, tmp_path):
    """Four classes to learn a whitening from, and four to validate on."""
    lines = [
        f"{photos}/class{kind}/{i}.jpg,{kind},{'val' if kind % 2 else 'train'}"
        for kind in range(8)
        for i in range(6)
    ]
    (tmp_path / "photos.csv").write_text("path,label,split\n" + "\n".join(lines) + "\n")
    return tmp_path / "photos.csv"


def validation(table):
    return read_labelled(table, "val")


def tuned_model(net, photos, **changes):
    """A model with every setting that tuning may choose."""
    rows = Model(net).describe(read_images(photos), scales=(1, 1.5), workers=0).descriptors
    settings = ModelSettings(
        max_side=60,
        scales=(1.0, 1.5),
        expansion=Expansion(k=3, alpha=1.0),
    )
    return Model(net, Whitening.learn([rows], 12), tuned=settings.model_copy(update=changes))


def test_one_pass_gives_the_descriptors_of_every_setting(net, photos, monkeypatch):
    images = read_images(photos)
    model = Model(net)
    settings = model.settings(max_side=60)
    found = describe_at_scales(model, images, settings, [0.5, 1.0, 1.5], [3.0, 4.5], 0)
    assert found.rows.shape == (48, 3, 2, net.dim)
    other = RetrievalNet(TINY_NET, weights="random").eval()
    other.load_state_dict(net.state_dict())
    other.pooling.p.data.fill_(4.5)
    for scales in ((1.0,), (0.5,), (1.0, 1.5), (1.5, 0.5, 1.0)):
        for power, network in ((3.0, net), (4.5, other)):
            expected = Model(network).describe(images, max_side=60, scales=scales, workers=0)
            rows = found.combine(scales, power, 3.0)
            np.testing.assert_allclose(rows, expected.descriptors, rtol=0, atol=1e-5)
    assert found.seconds((1.0, 1.5)) == found.times[1] + found.times[2] > 0


def test_what_is_kept_is_clearly_better_and_measured_as_the_model_is_used(net, table, tmp_path):
    net.save(tmp_path / "model")
    found = tune(tmp_path / "model", table, device="cpu", workers=0, progress=False)
    assert [step.setting for step in found.steps] == ["scales", "GeM power", "whitening", "αQE"]
    assert [step.taken for step in found.steps] == [step.gain.clear for step in found.steps]
    assert (found.queries, found.classes) == (24, 4)
    images = validation(table)
    before = Model(net).describe(images, workers=0).descriptors
    assert found.start_map == pytest.approx(mean_average_precision(before, images.labels), abs=1e-6)
    assert found.validation_map >= found.start_map
    gains = sum(step.gain.value for step in found.steps if step.taken)
    assert found.validation_map == pytest.approx(found.start_map + gains, abs=1e-6)
    loaded = load_model(tmp_path / "model", "cpu")
    assert found.validation_map == pytest.approx(map_in_use(loaded, images), abs=1e-5)
    assert found.changed == (loaded.tuned is not None)
    assert (loaded.calibration is not None) == found.changed
    for step in found.steps:
        assert step.best in found.table()


def map_in_use(model, images):
    """mAP of a model in the usual way of use: each photo is searched among the others."""
    rows, labels = (
        model.encode([file.path for file in images.files()], progress=False),
        images.labels,
    )
    expansion = None if model.tuned is None else model.tuned.expansion
    if expansion is None:
        return mean_average_precision(rows, labels)
    found = []
    for number, query in enumerate(database_augmentation(rows, expansion.k, expansion.alpha)):
        others = np.arange(len(rows)) != number
        own = labels[number : number + 1]
        found.append(evaluate_labelled(query[None], own, rows[others], labels[others]).mAP)
    return float(np.mean(found))


def test_a_model_that_nothing_improves_stays_as_it_is(net, copies, tmp_path):
    net.save(tmp_path / "model")
    files = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    found = tune(tmp_path / "model", copies, device="cpu", workers=0)
    assert (found.start_map, found.validation_map, found.changed) == (1.0, 1.0, False)
    assert all(not step.taken and step.gain.value <= 0 for step in found.steps)
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    assert found.table().count("not clearly better: stays") == len(found.steps)


def test_a_gem_power_and_a_whitening_become_part_of_the_model(photos, tmp_path):
    torch.manual_seed(2)
    net = RetrievalNet("test_resnet", weights="random").eval()
    net.pooling.p.data.fill_(1.0)
    net.save(tmp_path / "model")
    before = load_model(tmp_path / "model", "cpu")
    notes = []
    found = tune(
        tmp_path / "model", photos, max_cost=1, device="cpu", workers=0, on_note=notes.append
    )
    assert {step.setting: step.taken for step in found.steps} == {
        "GeM power": True,
        "whitening": True,
        "αQE": False,
    }
    loaded = load_model(tmp_path / "model", "cpu")
    assert loaded.fingerprint != before.fingerprint
    assert loaded.net.fingerprint() != before.net.fingerprint()
    assert loaded.tuned == found.model.tuned
    assert loaded.net.config.provenance["learned_gem_power"] == 1.0
    power = float(found.steps[0].best)
    assert float(loaded.net.pooling.p.detach()) == power > 1
    # The whitening is learned from all photos, pooled with the new power.
    net.pooling.p.data.fill_(power)
    rows = Model(net).describe(read_images(photos), workers=0).descriptors
    info = loaded.whitening.info
    expected = Whitening.learn([rows], loaded.dim, info.power, info.shrinkage or 0.0)
    scores = expected.apply(rows) @ expected.apply(rows).T
    encoded = loaded.encode(photos, progress=False)
    np.testing.assert_allclose(encoded @ encoded.T, scores, rtol=0, atol=1e-3)
    # Probabilities fitted on the photos that the whitening knows would be wrong.
    assert loaded.calibration is None
    assert "the model is not calibrated" in notes[-1]


def test_a_tuned_model_is_compared_with_its_own_expansion(net, table, photos):
    model = tuned_model(net, photos, max_side=None, scales=(1.0,))
    found = tune(model, table, max_cost=1, workers=0)
    assert found.start_map == pytest.approx(map_in_use(model, validation(table)), abs=1e-5)
    assert found.validation_map >= found.start_map
    assert found.steps[-1].before == "k 3, α 1"
    end = map_in_use(found.model, validation(table))
    assert found.validation_map == pytest.approx(end, abs=1e-5)


def test_scales_with_more_pixels_than_the_maximum_are_not_tried(net, photos):
    notes = []
    model = Model(net)
    found = tune(model, photos, max_cost=1.0, workers=0, on_note=notes.append)
    assert "scales" not in [step.setting for step in found.steps]
    assert found.model.folder is None
    with pytest.raises(InputError, match="at least 4 classes"):
        tune(model, read_labelled(photos).subset(range(12)), workers=0)


def test_an_index_describes_queries_as_its_entries_whatever_the_model_is_tuned_to(
    net, photos, tmp_path
):
    model = tuned_model(net, photos)
    model.save(tmp_path / "model")
    with open_index(tmp_path / "index", tmp_path / "model", device="cpu") as index:
        index.add(photos, workers=0, thumbnails=False, progress=False)
        assert index.header.settings.scales == (1.0, 1.5)
        assert index.header.settings.max_side == 60
        assert index.header.expansion == Expansion(k=3, alpha=1.0)
    photo = photos / "class3" / "1.jpg"
    again = model.tuned.model_copy(update={"scales": (0.5,), "max_side": None, "expansion": None})
    for settings in (model.tuned, again):
        replace(model, tuned=settings).save(tmp_path / "model")
        with open_index(tmp_path / "index", device="cpu") as index:
            first = index.search(photo, k=1, expand=False)[0]
            assert first.id == "class3/1.jpg"
            assert first.score == pytest.approx(1, abs=1e-5)
            rows = index.store.vectors(np.array([entry.key for entry in index]))
            query = index.describe([load_image(photo)])
            expanded = alpha_query_expansion(query, rows, 1.0, 3)[0]
            expected = np.sort(rows @ expanded)[::-1][:5]
            for found in (index.search(photo, k=5), index.search(photo, k=5, expand=True)):
                assert [hit.score for hit in found] == pytest.approx(expected, abs=1e-5)


def test_the_settings_of_a_model_apply_where_none_are_given(net, table, photos, tmp_path):
    model, images = tuned_model(net, photos), validation(table)
    model.save(tmp_path / "model")
    loaded = load_model(tmp_path / "model", "cpu")
    assert loaded.tuned == model.tuned
    expected = model.describe(images, max_side=60, scales=(1.0, 1.5), workers=0).descriptors
    file = extract(loaded, images, tmp_path / "tuned.parquet", workers=0)
    assert (file.settings.scales, file.settings.max_side) == ((1.0, 1.5), 60)
    np.testing.assert_allclose(file.read(), expected, rtol=0, atol=1e-6)
    found = listwise.evaluate(loaded, images, on_progress=lambda count: None)
    accuracy = mean_average_precision(expected, images.labels)
    assert found.figures["Labels"]["mAP"] == pytest.approx(accuracy, abs=1e-6)
    # What a user gives comes first; 0 stands for the original size.
    plain = extract(loaded, images, tmp_path / "a.parquet", max_side=0, scales=(1,), workers=0)
    assert plain.settings == loaded.settings(0, (1.0,))
    assert (plain.settings.max_side, plain.settings.scales) == (None, (1.0,))
    again = loaded.describe(images, **plain.settings.arguments(), workers=0).descriptors
    np.testing.assert_allclose(again, plain.read(), rtol=0, atol=1e-6)
    assert np.abs(expected - plain.read()).max() > 0.01


def test_a_harmful_expansion_is_turned_off(table, photos, monkeypatch):
    monkeypatch.setattr("listwise.results.tuning.EXPANSIONS", ())
    torch.manual_seed(0)
    net = RetrievalNet("test_resnet", weights="random").eval()
    harmful = {"scales": (1.0,), "expansion": Expansion(k=20, alpha=0.0)}
    found = tune(tuned_model(net, photos, max_side=None, **harmful), table, max_cost=1, workers=0)
    last = found.steps[-1]
    assert (last.before, last.best, last.taken) == ("k 20, α 0", "off", True)
    assert found.model.tuned.expansion is None
