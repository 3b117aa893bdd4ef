import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_net import TINY_NET
from torch import nn

from listwise.errors import InputError
from listwise.evaluation import mean_average_precision
from listwise.models import RetrievalNet
from listwise.models.embed import embed_photos
from listwise.models.folding import make_folded_copy
from listwise.settings import make_config
from listwise.training import Trainer, forward, prepare, resume
from listwise.training import trainer as trainer_module
from listwise.training.memory import Fit
from listwise.training.run.record import read_metrics
from listwise.training.run.view import TrainView
from listwise.training.sampling import draw_batch
from listwise.training.trainer import smallest_batch, worth_compiling

SOAK = bool(os.environ.get("LISTWISE_SOAK"))
SETTINGS = {
    "backbone": TINY_NET,
    "weights": "random",
    "val_fraction": 0.4,
    "val_max_side": 48,
    "batch_size": 16,
    "micro_batch": 8,
    "crops": {"size": 32},
    "updates": 6,
    "learning_rate": 1e-3,
    "warmup": 0,
    "patience": None,
    "validate_every": 2,
    "checkpoint_every": 3,
    "device": "cpu",
    "workers": 0,
}


class Witness(TrainView):
    """Records all events, and stops the run at `stop_at`."""

    def __init__(self, stop_at=None, wants_estimate=False):
        self.wants_estimate = wants_estimate
        self.lines, self.maps, self.losses, self.work = [], {}, [], []
        self.fingerprints = {}
        self.trainer = None
        self.stop_at = stop_at

    def message(self, line):
        self.lines.append(line)

    def progress(self, what, done, total):
        self.work.append((what, done, total))

    def update(self, report):
        self.losses.append(report.loss)
        if report.update == self.stop_at:
            raise KeyboardInterrupt

    def validation(self, report):
        self.maps[report.update] = report.mean_average_precision
        if self.trainer is not None:
            self.fingerprints[report.update] = self.trainer.net.fingerprint()


def train(data, run, view=None, **given):
    return Trainer(prepare(data, SETTINGS | given), run, view).fit()


def same_state(a, b):
    """Whether two runs left the same networks, moments and random state, to the bit."""
    for name in ("checkpoint.safetensors", "model/model.safetensors"):
        first, second = load_file(a / name), load_file(b / name)
        assert first.keys() == second.keys()
        for key in first:
            assert torch.equal(first[key], second[key]), (name, key)
    return True


@pytest.fixture(scope="module")
def finished(photos, tmp_path_factory):
    """A finished run: its result and what its view has recorded; leave its folder as it is."""
    view = Witness()
    return train(photos, tmp_path_factory.mktemp("finished") / "run", view), view


def test_training_is_never_worse_than_the_start(photos, tmp_path):
    """Updates that destroy the network: the model is the network before training."""
    view = Witness()
    given = {"backbone": "test_resnet", "learning_rate": 0.3, "updates": 2, "validate_every": 1}
    result = train(photos, tmp_path / "run", view, **given)
    assert max(view.maps[1], view.maps[2]) < view.maps[0] - 0.05
    assert (result.best_update, result.best_map) == (0, result.first_map)
    assert (
        sum("better validation mAP than the network before training" in x for x in view.lines) == 1
    )
    torch.manual_seed(prepare(photos, SETTINGS).config.seed)
    start = RetrievalNet("test_resnet", weights="random")
    kept = RetrievalNet.load(tmp_path / "run" / "model")
    assert kept.fingerprint() == start.fingerprint()


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
    config = json.loads((run / "model" / "config.json").read_text())
    training = config["provenance"]["training"]
    assert training["validation_map"] == result.best_map
    assert training["settings"]["crops"]["size"] == 32
    assert not list(run.rglob("*.tmp"))
    assert view.work[-1] == ("validating", len(plan.validation), len(plan.validation))

    board = EventAccumulator(str(run / "tensorboard"))
    board.Reload()
    for name in ("loss", "gem_power", "learning_rate", "images_per_second"):
        assert [event.step for event in board.Scalars(name)] == [1, 2, 3, 4, 5, 6]
    assert [event.step for event in board.Scalars("validation_map")] == [0, 2, 4, 6]
    assert {event.step for event in board.Images("ranked lists")} == {0, 2, 4, 6}


def test_the_saved_network_has_the_reported_validation_map(photos, finished):
    result, _ = finished
    assert result.best_update > 0
    validation = prepare(photos, SETTINGS).validation
    found = embed_photos(RetrievalNet.load(result.model), validation, max_side=48)
    value = mean_average_precision(found.descriptors.numpy(), validation.labels)
    assert value == pytest.approx(result.best_map)


def test_training_learns(photos, tmp_path):
    view = Witness()
    given = {"updates": 12, "validate_every": 12, "batch_size": 24, "micro_batch": "auto"}
    result = train(photos, tmp_path / "run", view, **given)
    assert np.mean(view.losses[-3:]) < 0.9 * np.mean(view.losses[:3])
    assert result.best_map > result.first_map + 0.05
    (choice,) = view.lines
    assert choice.startswith("all 24 images in one pass: ")


def test_the_best_network_is_kept_and_training_stops_when_patience_ends(photos, tmp_path):
    view = Witness()
    given = {"learning_rate": 0.5, "patience": 2, "updates": 40, "validate_every": 1}
    given |= {"backbone": "test_resnet"}  # which such a rate destroys
    trainer = Trainer(prepare(photos, SETTINGS | given), tmp_path / "run", view)
    view.trainer = trainer
    result = trainer.fit()
    best = max(view.maps, key=lambda update: view.maps[update])  # the first of equals
    assert result.best_update == best
    assert result.best_map == view.maps[best]
    assert result.updates == best + 2 < 40
    kept = RetrievalNet.load(result.model)
    assert kept.fingerprint() == view.fingerprints[best]
    assert kept.fingerprint() != view.fingerprints[result.updates]
    assert view.maps[result.updates] < result.best_map
    assert view.lines[-1].startswith(
        f"stopped after update {result.updates}: no better mAP in the last 2 validations"
    )


def test_a_warm_up_rises_first(photos, tmp_path):
    plan = prepare(photos, SETTINGS | {"warmup": 2, "updates": 4})
    trainer = Trainer(plan, tmp_path / "run")
    rates = [trainer._set_learning_rate(update) for update in range(4)]
    assert rates == pytest.approx([1e-3 * r for r in (1 / 3, 0.75 * 2 / 3, 0.5, 0.25)])


def with_dropout(*arguments, **options):
    """A network that draws random numbers when it trains."""
    net = RetrievalNet(*arguments, **options)
    net.projection = nn.Sequential(nn.Dropout(0.3), nn.Linear(net.dim, 16))
    net.dim = 16
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
    ],
    ids=["dropout", "batches that differ in size", "mined triplets", "mined tuples", "average"],
)
def test_an_interrupted_run_resumes_to_the_bit(photos, tmp_path, monkeypatch, given):
    data = photos
    uneven = "classes_per_batch" in given
    if uneven:
        data = shutil.copytree(photos, tmp_path / "photos")
        for kind in range(0, 8, 2):
            for i in range(3):
                (data / f"class{kind}" / f"{i}.jpg").unlink()
    monkeypatch.setattr("listwise.training.trainer.RetrievalNet", with_dropout)
    plan = prepare(data, SETTINGS | given)
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
    assert trainer.progress.update in (3, 4)  # there is a checkpoint at 3, and at 4 if it is best
    trainer.fit()
    assert same_state(tmp_path / "whole", run)
    for a, b in zip(read_metrics(tmp_path / "whole"), read_metrics(run), strict=True):
        a.pop("images_per_second", None)
        b.pop("images_per_second", None)
        assert a == b
    if uneven:
        sizes = np.diff([line.get("backwards", 0) for line in read_metrics(run)])
        assert len(set(sizes)) > 1


def test_validations_do_not_outdate_the_copy_that_trains(photos, tmp_path, monkeypatch):
    copies = []

    def counted(*arguments):
        copies.append(make_folded_copy(*arguments))
        return copies[-1]

    monkeypatch.setattr(forward, "make_folded_copy", counted)
    plan = prepare(photos, SETTINGS | {"updates": 4, "validate_every": 1})
    trainer = Trainer(plan, tmp_path / "run", Witness(wants_estimate=True))
    trainer.fit()
    assert trainer.step.fallback == ""
    assert len(copies) < 5  # for five validations and four updates
    assert all(copy is not None and copy.folds for copy in copies)


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


def test_tuples_are_split_over_processes(photos, tmp_path, monkeypatch):
    given = {"loss": "triplet", "triplet": {"tuples": 2}}
    monkeypatch.setattr(trainer_module, "world", lambda: (0, 7))
    with pytest.raises(InputError, match=r"only 6 images.*increase `triplet\.tuples`"):
        Trainer(prepare(photos, SETTINGS | given), tmp_path / "run")


def test_the_checkpoint_keeps_up_with_the_network_kept(photos, tmp_path):
    given = {"checkpoint_every": 100, "validate_every": 1, "updates": 6, "learning_rate": 1e-2}
    trainer = Trainer(prepare(photos, SETTINGS | given), tmp_path, Witness(stop_at=5))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    kept = json.loads((tmp_path / "model" / "config.json").read_text())["provenance"]["training"]
    assert kept["update"] > 1
    again = resume(tmp_path).progress
    assert (again.best_update, again.best_map) == (kept["update"], kept["validation_map"])


def test_resuming_a_finished_run_returns_its_result_again(finished, tmp_path):
    result, _ = finished
    run = shutil.copytree(result.model.parent, tmp_path / "run")
    left = [run / name for name in ("checkpoint.tmp", ".tmpPcGaIv", "model/.tmpQ0a7")]
    for path in left:
        path.write_bytes(b"of a killed process")
    assert resume(run).fit() == replace(result, model=run / "model")
    assert not any(path.exists() for path in left)


def test_another_seed_is_another_run(photos, finished, tmp_path):
    _, first = finished
    same, other = Witness(), Witness()
    train(photos, tmp_path / "same", same, updates=1)
    train(photos, tmp_path / "other", other, updates=1, seed=1)
    assert same.losses[0] == first.losses[0] != other.losses[0]


def test_data_that_changed_since_is_refused(photos, tmp_path):
    data = shutil.copytree(photos, tmp_path / "photos")
    Trainer(prepare(data, SETTINGS), tmp_path / "run")
    (data / "class0" / "0.jpg").unlink()
    with pytest.raises(InputError, match="other photos or labels"):
        resume(tmp_path / "run")


def test_folders_that_cannot_be_used_are_refused(photos, tmp_path):
    plan = prepare(photos, SETTINGS)
    Trainer(plan, tmp_path / "run")
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


@pytest.mark.parametrize(
    ("given", "images"), [({"batch_size": 4}, 4), ({"classes_per_batch": 2}, 12)]
)
def test_a_batch_must_have_an_image_for_every_process(photos, tmp_path, monkeypatch, given, images):
    plan = prepare(photos, SETTINGS | given)
    monkeypatch.setattr(trainer_module, "world", lambda: (0, images + 1))
    with pytest.raises(InputError, match=f"only {images} images, too few for {images + 1} proc"):
        Trainer(plan, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(trainer_module, "world", lambda: (0, images))
    Trainer(plan, tmp_path / "run")


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    batch_size=st.integers(2, 12),
    classes=st.none() | st.integers(2, 5),
)
def test_the_smallest_batch_is_the_smallest_that_is_drawn(sizes, batch_size, classes):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    drawn = [len(draw_batch(labels, batch_size, 0, update, classes)) for update in range(150)]
    assert smallest_batch(np.array(sizes), batch_size, classes) == min(drawn)


def test_a_network_that_cannot_be_made_leaves_no_run(photos, tmp_path):
    with pytest.raises(InputError, match="resnet10x"):
        train(photos, tmp_path / "run", backbone="resnet10x")
    assert not (tmp_path / "run").exists()


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


@pytest.mark.parametrize(
    ("given", "device", "compiled"),
    [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"updates": 60, "batch_size": 1024, "crops": {"size": 192}}, "cuda", False),
        ({"updates": 1, "compile": "yes"}, "cpu", True),
        ({"compile": "no"}, "cuda", False),
    ],
)
def test_the_network_is_compiled_where_that_pays(given, device, compiled):
    config = make_config(given, "the settings")
    assert worth_compiling(config, torch.device(device)) is compiled
