import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from timm.models import register_model
from tiny_net import TinyNet
from torch import nn
from training_examples import SETTINGS, Witness, same_state

from listwise.errors import InputError
from listwise.models import RetrievalNet
from listwise.models.storage import read_model
from listwise.training import Trainer, prepare, resume
from listwise.training.forward import Fit
from listwise.training.run import read_metrics

SOAK = bool(os.environ.get("LISTWISE_SOAK"))


def train(data, run, view=None, **given):
    return Trainer(prepare(data, SETTINGS | given), run, view).fit()


@pytest.fixture(scope="module")
def finished(photos, tmp_path_factory):
    """A finished run: its result and what its view has recorded; leave its folder as it is."""
    view = Witness()
    return train(photos, tmp_path_factory.mktemp("finished") / "run", view), view


def test_a_run_leaves_what_it_should(photos, finished):
    result, view = finished
    run = result.model.parent
    metrics = read_metrics(run)
    assert [line["update"] for line in metrics] == list(range(7))
    assert [line["loss"] for line in metrics[1:]] == view.losses
    expected = [1e-3 * (1 - i / 6) for i in range(6)]
    assert [line["learning_rate"] for line in metrics[1:]] == pytest.approx(expected)
    assert {line["update"]: line["validation_map"] for line in metrics[::2]} == view.maps
    assert all("validation_map" not in line for line in metrics[1::2])
    assert metrics[1]["gem_power"] == pytest.approx(3, abs=0.01)
    assert metrics[-1]["forwards"] == 6 * 16 * 2
    assert metrics[-1]["backwards"] == 6 * 16

    plan = prepare(photos, SETTINGS)
    assert yaml.safe_load((run / "config.yaml").read_text()) == plan.config.model_dump()
    about = json.loads((run / "run.json").read_text())
    assert about["data"] == str(photos.resolve())

    assert result.model == run / "model"
    assert result.first_map == view.maps[0]
    assert result.best_map == max(view.maps.values()) == view.maps[result.best_update]
    assert (result.updates, result.counts.updates) == (6, 6)
    config = read_model(run / "model").info.network
    training = config.provenance["training"]
    assert training["validation_map"] == result.best_map
    assert training["settings"]["crops"]["size"] == 32
    assert not list(run.rglob("*.tmp"))
    validated = [what for what, done, total in view.work if done == total == len(plan.validation)]
    assert validated.count("validating") == len(view.maps)

    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    for name in ("loss", "gem_power", "learning_rate", "images_per_second"):
        assert [event.step for event in board.Scalars(name)] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in board.Scalars("validation_map")] == [0, 2, 4, 6]
    assert {event.step for event in board.Images("ranked lists")} == {0, 2, 4, 6}


def test_training_learns(photos, tmp_path):
    view = Witness()
    given = {"updates": 12, "validate_every": 12, "batch_size": 24, "micro_batch": "auto"}
    result = train(photos, tmp_path / "run", view, **given)
    assert np.mean(view.losses[-3:]) < 0.9 * np.mean(view.losses[:3])
    assert result.best_map > result.first_map + 0.05
    choice, *_, size = view.lines
    assert choice.startswith("all 24 images in one pass: ")
    assert size.startswith("photo size chosen on validation: ")


def test_the_best_network_is_kept_and_training_stops_when_patience_ends(photos, tmp_path):
    """Updates that destroy the network: the model is the network before training."""
    view = Witness()
    given = {"backbone": "test_resnet", "learning_rate": 0.3, "patience": 2, "validate_every": 1}
    trainer = Trainer(prepare(photos, SETTINGS | given), tmp_path / "run", view)
    start = trainer.net.fingerprint()
    result = trainer.fit()
    assert max(view.maps[1], view.maps[2]) < view.maps[0] - 0.05
    assert (result.best_update, result.updates) == (0, 2)
    assert result.best_map == result.first_map == view.maps[0]
    assert RetrievalNet.load(result.model).fingerprint() == start != trainer.net.fingerprint()
    assert "better validation mAP than the network before training" in view.lines[-3]
    assert view.lines[-2] == "stopped after update 2: no better mAP in the last 2 validations"


@register_model
def tiny_dropout(pretrained=False, **options):
    """A network that draws random numbers when it trains."""
    net = TinyNet()
    net.norm2 = nn.Sequential(nn.BatchNorm2d(96), nn.Dropout(0.3))
    return net


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"classes_per_batch": 2, "batch_size": 32, "micro_batch": "auto", "workers": 1},
        pytest.param(
            {
                "loss": "triplet",
                "triplet": {"tuples": 5, "pool": 20, "refresh": 10},
                "workers": 1,
            },
            marks=pytest.mark.thorough,
        ),
        {"loss": "contrastive", "contrastive": {"tuples": 3, "negatives": 2, "refresh": 15}},
        {"ema": 0.5},
        {"backbone": "test_vit", "val_max_side": 32, "lora": 2},
        {"adapter": True},
        {"memory": 12, "memory_warmup": 1},
        {"loss": "proxy-anchor", "matryoshka": [8]},
    ],
    ids=lambda given: ", ".join(given) or "dropout",
)
def test_an_interrupted_run_resumes_to_the_bit(photos, tmp_path, monkeypatch, given):
    data = photos
    uneven = "classes_per_batch" in given
    if uneven:
        data = shutil.copytree(photos, tmp_path / "photos")
        for kind in range(0, 8, 2):
            for i in range(3):
                (data / f"class{kind}" / f"{i}.jpg").unlink()
    plan = prepare(data, SETTINGS | {"backbone": "tiny_dropout"} | given)
    Trainer(plan, tmp_path / "whole").fit()

    run = tmp_path / "broken"
    # The plain run is interrupted before and after each kind of event, the others once.
    first, *stops = (1, 3, 6, None) if not given or SOAK else (5, None)
    trainer = Trainer(plan, run, Witness(stop_at=first))
    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            trainer.fit()
        if (run / "checkpoint.safetensors").exists():
            # Less memory than before must not change the sums any more.
            monkeypatch.setattr(
                "listwise.training.step.images_that_fit", lambda *_: Fit(3, 3, "memory is short")
            )
        torch.manual_seed(12345)
        # An estimate of the time does not change the run.
        trainer = resume(run, Witness(stop_at=stop, wants_estimate=not given))
    assert trainer.progress.update == (6 if not given or SOAK else 5)  # no update is repeated
    trainer.fit()
    assert same_state(tmp_path / "whole", run)
    for a, b in zip(read_metrics(tmp_path / "whole"), read_metrics(run), strict=True):
        a.pop("images_per_second", None)
        b.pop("images_per_second", None)
        assert a == b
    if uneven:
        sizes = np.diff([line.get("backwards", 0) for line in read_metrics(run)])
        assert len(set(sizes)) > 1


class StopInside(Witness):
    """Interrupts the run inside the validation after update 4, or inside the update after it."""

    def __init__(self, validating):
        super().__init__()
        self.validating = validating

    def progress(self, what, done, total):
        if self.validating and len(self.losses) == 4:
            raise KeyboardInterrupt

    def advance(self, updates, seconds_left):
        if not self.validating and 4 < updates < 5:
            raise KeyboardInterrupt


@pytest.mark.parametrize("validating", [False, True])
@pytest.mark.parametrize("given", [{}, {"memory": 12, "memory_warmup": 1}, {"ema": 0.5}])
def test_an_interrupt_inside_an_update_or_a_validation_repeats_no_update(
    photos, tmp_path, given, validating
):
    settings = SETTINGS | {"backbone": "tiny_dropout", "checkpoint_every": 100} | given
    plan = prepare(photos, settings)
    Trainer(plan, tmp_path / "whole").fit()
    run = tmp_path / "broken"
    with pytest.raises(KeyboardInterrupt):
        Trainer(plan, run, StopInside(validating)).fit()

    again = Witness()
    trainer = resume(run, again)
    assert trainer.progress.update == 4
    trainer.fit()

    assert len(again.losses) == 2
    assert same_state(tmp_path / "whole", run)
    for a, b in zip(read_metrics(tmp_path / "whole"), read_metrics(run), strict=True):
        a.pop("images_per_second", None)
        b.pop("images_per_second", None)
        assert a == b


@pytest.mark.parametrize(
    ("loss", "given", "width", "minings", "photos_embedded"),
    [
        ("triplet", {"tuples": 4, "pool": 20, "refresh": 12}, 3, [0, 3], [20, 20]),
        ("contrastive", {"tuples": 3, "negatives": 2, "refresh": 6}, 4, [0, 2, 4], [30, 30, 30]),
    ],
)
def test_mining_comes_on_its_schedule_and_is_counted(
    photos, tmp_path, loss, given, width, minings, photos_embedded
):
    view = Witness()
    train(photos, tmp_path / "run", view, loss=loss, **{loss: given})
    lines = read_metrics(tmp_path / "run")
    batch = given["tuples"] * width
    assert [line["backwards"] for line in lines[1:]] == [batch * i for i in range(1, 7)]
    extra = [line["forwards"] - 2 * line["backwards"] for line in lines[1:]]
    expected = np.zeros(6, dtype=int)
    expected[minings] = photos_embedded
    assert extra == np.cumsum(expected).tolist()
    assert sum(what == "mining" and done == total for what, done, total in view.work) == len(
        minings
    )


@pytest.mark.parametrize(
    "loss",
    [
        *("tie-aware", "triplet", "contrastive", "proxy-anchor", "hierarchical-ap"),
        *(
            pytest.param(loss, marks=pytest.mark.thorough)
            for loss in (
                *("fastap", "smoothap", "infonce", "roadmap"),
                *("recall-at-k", "multi-similarity"),
            )
        ),
    ],
)
def test_one_line_of_config_is_another_loss(photos, tmp_path, loss):
    if loss in ("fastap", "multi-similarity"):
        pytest.importorskip("pytorch_metric_learning")
    view = Witness()
    updates = 12 if loss == "triplet" else 9
    given = {"updates": updates, "validate_every": 12, "micro_batch": 16}
    if loss == "triplet":
        given["triplet"] = {"tuples": 8}
    train(photos, tmp_path / "run", view, **given, loss=loss)
    assert len(view.losses) == updates
    third = updates // 3
    assert np.mean(view.losses[-third:]) < np.mean(view.losses[:third])


def test_the_checkpoint_keeps_up_with_the_network_kept(photos, tmp_path):
    given = {"checkpoint_every": 100, "validate_every": 1, "updates": 6, "learning_rate": 1e-2}
    trainer = Trainer(prepare(photos, SETTINGS | given), tmp_path, Witness(stop_at=5))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    kept = read_model(tmp_path / "model").info.network.provenance["training"]
    assert kept["update"] > 1
    again = resume(tmp_path).progress
    assert (again.best_update, again.best_map) == (kept["update"], kept["validation_map"])


def test_resuming_a_finished_run_returns_its_result_again(finished, tmp_path):
    result, _ = finished
    run = shutil.copytree(result.model.parent, tmp_path / "run")
    left = [run / name for name in ("checkpoint.safetensors.tmp", "model/model.safetensors.tmp")]
    for path in left:
        path.write_bytes(b"of a killed process")
    assert resume(run).fit() == replace(result, model=run / "model")
    assert not any(path.exists() for path in left)


def test_folders_that_cannot_be_used_are_refused(photos, tmp_path):
    data = shutil.copytree(photos, tmp_path / "photos")
    plan = prepare(data, SETTINGS)
    Trainer(plan, tmp_path / "run")
    (data / "class0" / "0.jpg").unlink()
    with pytest.raises(InputError, match="other photos or labels"):
        resume(tmp_path / "run")
    with pytest.raises(InputError, match="contains a run already: resume it with `resume="):
        Trainer(plan, tmp_path / "run")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot create the run folder"):
        Trainer(plan, tmp_path / "file" / "run")
    with pytest.raises(InputError, match=r"is not a training run: expected run\.json"):
        resume(tmp_path)
    for content in ("[]", "{", '{"data": "x"}'):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(InputError, match="not written by listwise train"):
            resume(tmp_path)


def test_a_batch_must_have_an_image_for_every_process(photos, tmp_path):
    trainer = Trainer(prepare(photos, SETTINGS | {"classes_per_batch": 2}), tmp_path / "run")
    batches = trainer.parts.batches
    batches.session.processes = 12
    assert len(batches.draw(0)) == 1
    batches.session.processes = 13
    with pytest.raises(InputError, match="only 12 images, too few for 13 processes"):
        next(batches.load(3))


def test_photos_that_break_later_are_named_once_or_stop_a_strict_run(photos, tmp_path):
    data = shutil.copytree(photos, tmp_path / "photos")
    for photo in ("class0/0.jpg", "class1/0.jpg", "class2/0.jpg", "class6/0.jpg", "class7/0.jpg"):
        (data / photo).write_bytes((data / photo).read_bytes()[:-600])
    view = Witness()
    train(data, tmp_path / "run", view, batch_size=30, updates=1)
    named = [line for line in view.lines if "0.jpg" in line]
    assert len(named) == 5
    assert sum("another photo of its class is used instead" in line for line in named) >= 1
    assert sum("validation leaves it out" in line for line in named) >= 1
    with pytest.raises(InputError, match=r"0\.jpg"):
        train(data, tmp_path / "strict", batch_size=30, strict=True)


def test_a_diverged_run_is_one_line(photos, tmp_path):
    with pytest.raises(InputError) as caught:
        train(photos, tmp_path / "run", learning_rate=1e30)
    assert "\n" not in str(caught.value)
