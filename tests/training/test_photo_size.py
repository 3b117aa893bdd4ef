"""The photo size that is chosen on the validation photos after training, and stored."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from training_examples import SETTINGS as SMALL
from training_examples import Witness

from listwise.calibration import fit_calibration
from listwise.descriptors import load_model
from listwise.evaluation import mean_average_precision
from listwise.models.storage import read_model
from listwise.settings import make_config
from listwise.training import Trainer, choices, plan, prepare, resume, trainer
from listwise.training.choices import Sizes, sizes_to_try
from listwise.training.duration import TimeLeft

SETTINGS = SMALL | {
    "val_fraction": 0.5,
    "val_max_side": 96,
    "batch_size": 8,
    "crops": {"size": 64},
    "updates": 2,
    "learning_rate": 0.3,
    "validate_every": 1,
}


@pytest.fixture(scope="module")
def stripes(tmp_path_factory) -> Path:
    """Classes that differ in stripes a few pixels wide, which are gray in smaller photos."""
    root, generator = tmp_path_factory.mktemp("stripes"), np.random.default_rng(0)
    x, y = np.meshgrid(np.arange(256), np.arange(192))
    for kind in range(8):
        (root / f"class{kind}").mkdir()
        angle, period = np.pi * (kind % 4) / 4, 3.4 if kind < 4 else 5.3
        for i in range(5):
            waves = (x * np.cos(angle) + y * np.sin(angle)) / period + generator.uniform()
            light = 128 + generator.uniform(50, 90) * np.sin(2 * np.pi * waves)
            tinted = light[..., None] + generator.uniform(-25, 25, 3)
            photo = Image.fromarray(np.clip(tinted, 0, 255).astype(np.uint8))
            photo.save(root / f"class{kind}" / f"{i}.png")
    return root


def train(data, run, view=None, preset="auto", **given):
    return Trainer(prepare(data, SETTINGS | given, preset), run, view).fit()


@pytest.fixture(scope="module")
def finished(stripes, tmp_path_factory):
    """A finished run; leave its folder as it is."""
    view = Witness()
    return train(stripes, tmp_path_factory.mktemp("finished") / "run", view), view


def stored(folder):
    """The settings in a model."""
    return read_model(folder).info.tuned.model_dump()


def describe(result, data, max_side, **given):
    """Descriptors and labels of the validation photos of a run, by its model at a size."""
    images = prepare(data, SETTINGS | given).validation
    found = load_model(result.model, "cpu").describe(images, max_side=max_side)
    return found.descriptors, images.labels


@pytest.mark.parametrize("adapter", [False, True])
def test_the_best_size_is_stored(stripes, finished, tmp_path, adapter):
    result, view = finished
    if adapter:
        view = Witness()
        result = train(stripes, tmp_path / "run", view, adapter=True)
    assert result.best_update < 2  # so that the last network is another one
    found = stored(result.model)
    assert result.max_side == found["max_side"] == 256
    assert found["photos"] == 20
    assert found["start_map"] == result.best_map < found["validation_map"] - 0.2
    for size, value in ((96, result.best_map), (None, found["validation_map"])):
        descriptors, labels = describe(result, stripes, size, adapter=adapter)
        assert mean_average_precision(descriptors, labels) == pytest.approx(value, abs=2e-3)
    expected = fit_calibration(descriptors, labels)
    assert load_model(result.model, "cpu").calibration.slope == pytest.approx(
        expected.slope, rel=0.05
    )
    about = json.loads((result.model.parent / "run.json").read_text())
    tried = {int(size): value for size, value in about["max_side_maps"].items()}
    assert [*tried] == [96, 128, 192, 256]
    assert (tried[96], tried[256]) == (result.best_map, found["validation_map"])
    values = ", ".join(f"{100 * value:.1f} at {size}" for size, value in tried.items())
    assert view.lines[-1] == f"photo size chosen on validation: 256 (mAP {values})"
    assert view.advanced[-1][1] == 0.0


def test_a_choice_that_was_interrupted_is_made_again(stripes, finished, tmp_path, monkeypatch):
    result, _ = finished
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(stripes, run, Witness(stop_in="validating at 128 pixels"))
    found = stored(run / "model")  # until the end, it is the size of the validations
    assert found["max_side"] == 96
    assert found["validation_map"] == found["start_map"] > 0
    with monkeypatch.context() as patch:  # the size is stored, but not recorded as chosen
        patch.setattr(trainer, "add_to_run", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            resume(run).fit()
    again = resume(run).fit()
    assert replace(again, seconds=0, model=result.model) == replace(result, seconds=0)
    for name in ("tuned", "calibration"):
        now, before = (read_model(each).info for each in (run / "model", result.model))
        assert getattr(now, name) == getattr(before, name)
    view = Witness()  # it has ended
    assert resume(run, view).fit() == again
    assert view.done == []


def test_no_size_is_larger_than_the_photos(photos, tmp_path):
    view = Witness()
    result = train(photos, tmp_path / "run", view, val_max_side=160, crops={"size": 72})
    assert result.max_side == stored(result.model)["max_side"] == 72
    assert view.lines[-1] == "photos are used with long sides of up to 72 pixels, as in validation"
    # The validation photos are too few for probabilities of this network.
    assert load_model(result.model, "cpu").calibration is None
    assert view.lines[-2].startswith("the model is not calibrated: the probabilities of validation")


@pytest.mark.parametrize(
    ("preset", "given"), [("paper", {"val_max_side": None}), ("auto", {"val_max_side": 0})]
)
def test_the_original_size_is_stored_as_0(stripes, tmp_path, preset, given):
    view = Witness()
    result = train(stripes, tmp_path / "run", view, preset, updates=1, **given)
    assert result.max_side == stored(result.model)["max_side"] == 0
    assert not any(" at " in what for what in view.done)
    assert "original size; the validation photos have long sides of up to 256" in view.lines[-1]
    descriptors, labels = describe(result, stripes, 0)
    assert mean_average_precision(descriptors, labels) == pytest.approx(result.best_map)


def test_a_cpu_validates_photos_at_a_size_that_it_can_use(stripes, tmp_path, monkeypatch):
    monkeypatch.setattr(choices, "ORIGINAL_SIDE", 128)
    monkeypatch.setattr(plan, "ORIGINAL_SIDE", 128)
    view = Witness()
    result = train(stripes, tmp_path / "run", view, "paper", updates=1, val_max_side=0)
    assert result.max_side == stored(result.model)["max_side"] == 128
    prepared = prepare(stripes, SETTINGS | {"val_max_side": 0})
    assert "a CPU validates photos with long sides of up to 128 pixels" in prepared.notes
    descriptors, labels = describe(result, stripes, None)
    assert mean_average_precision(descriptors, labels) == pytest.approx(result.best_map)


def test_without_time_the_size_of_the_validations_is_kept(stripes, tmp_path, monkeypatch):
    view = Witness()
    monkeypatch.setattr(TimeLeft, "of_size", lambda left, pixels: 1e6)
    result = train(stripes, tmp_path / "run", view, minutes=5)
    assert result.max_side == stored(result.model)["max_side"] == 96
    assert not any(" at " in what for what in view.done)


@pytest.mark.parametrize(
    ("backbone", "crop", "start", "sides", "expected"),
    [
        ("resnet18", 128, 256, (400, 1600), Sizes(256, [352, 400], [192, 128])),
        ("resnet18", 128, 256, (200, 220), Sizes(220, [], [128])),
        ("resnet18", 800, 1600, (1024, 1024), Sizes(1024, [], [800])),
        ("vit_small_patch14_dinov2", 224, 448, (900, 1000), Sizes(448, [630, 896], [322, 224])),
    ],
)
def test_the_sizes_to_try(backbone, crop, start, sides, expected):
    given = {"backbone": backbone, "crops": {"size": crop}, "val_max_side": start}
    assert sizes_to_try(make_config(given), sides) == expected


@pytest.mark.parametrize(
    ("maps", "chosen", "measured"),
    [
        ({64: 5, 96: 6, 128: 7, 192: 6.5, 256: 9}, 128, [96, 128, 192]),
        ({64: 5, 96: 4, 45: 6, 32: 7}, 32, [96, 45, 32]),
        ({64: 5, 96: 5, 45: 5}, 64, [96, 45]),  # equal is not better
    ],
)
def test_the_search_goes_uphill(maps, chosen, measured):
    asked = []

    def measure(size):
        asked.append(size)
        return maps[size]

    sizes = Sizes(64, sorted(size for size in maps if size > 64), [45, 32])
    assert sizes.best(measure) == chosen
    assert [size for size in dict.fromkeys(asked) if size != 64] == measured
