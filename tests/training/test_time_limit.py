"""The estimate of a run's duration, and runs with a maximum duration."""

import time

import pytest
import yaml
from safetensors.torch import load_file
from tiny_net import TINY_NET

from listwise.errors import InputError
from listwise.training import Trainer, prepare, resume, time_limit
from listwise.training.duration import Speed, Trial
from listwise.training.run.record import read_metrics
from listwise.training.run.view import TrainView

SETTINGS = {
    "backbone": TINY_NET,
    "weights": "random",
    "val_fraction": 0.4,
    "device": "cpu",
    "workers": 0,
}
SMALL = SETTINGS | {
    "val_max_side": 48,
    "batch_size": 16,
    "micro_batch": 4,
    "crops": {"size": 32},
    "updates": 4,
    "validate_every": 2,
    "patience": None,
}


class Clock(TrainView):
    """Records messages and progress; each update takes `pause` seconds more."""

    wants_estimate = True

    def __init__(self, pause=0.0):
        self.lines, self.advanced = [], []
        self.pause = pause

    def message(self, line):
        self.lines.append(line)

    def advance(self, updates, seconds_left):
        self.advanced.append((updates, seconds_left))

    def update(self, report):
        time.sleep(self.pause)


def test_the_estimate_comes_first_and_the_bar_moves_inside_updates(photos, tmp_path):
    view = Clock()
    Trainer(prepare(photos, SMALL), tmp_path / "run", view).fit()
    assert view.lines[0].startswith("about ")
    assert " on this machine (" in view.lines[0]
    assert ": 4 updates of 16 images, 3 validations of " in view.lines[0]
    done = [updates for updates, _ in view.advanced]
    assert done == sorted(done)
    inside = [updates for updates in done if 0 < updates < 1]
    assert inside == [0.0625, 0.125, 0.1875, 0.25, 0.4375, 0.625, 0.8125]
    assert all(left is not None and left >= 0 for _, left in view.advanced)
    assert view.advanced[-1] == (4, 0)


def test_the_trial_does_not_change_the_training(photos, tmp_path):
    for name, view in (("plain", None), ("timed", Clock())):
        Trainer(prepare(photos, SMALL), tmp_path / name, view).fit()
    plain, timed = (
        load_file(tmp_path / name / "model/model.safetensors") for name in ("plain", "timed")
    )
    assert plain.keys() == timed.keys()
    assert all(plain[key].equal(timed[key]) for key in plain)
    losses = [[line.get("loss") for line in read_metrics(tmp_path / n)] for n in ("plain", "timed")]
    assert losses[0] == losses[1]


def test_a_run_ends_within_its_minutes(photos, tmp_path):
    few = {"updates": 6, "batch_size": 16, "val_max_side": 48}
    plan = prepare(photos, SETTINGS | few | {"minutes": 2})
    assert plan.speed is not None
    assert plan.notes[-1].startswith(("to end within 2 min: ", "the run takes about "))
    run = tmp_path / "run"
    started = time.perf_counter()
    result = Trainer(plan, run).fit()
    assert plan.spent + time.perf_counter() - started < 2 * 60
    assert result.updates > 0
    written = yaml.safe_load((run / "config.yaml").read_text())
    assert written["minutes"] == 2
    assert written["updates"] == plan.config.updates
    assert written["crops"]["size"] == plan.config.crops.size
    # A resumed run has the same plan, without another trial.
    again = resume(run)
    assert again.plan.speed is None
    assert again.plan.config == plan.config


def test_what_does_not_fit_is_reduced_and_told(photos, monkeypatch):
    def steady(trial, config):
        """The speed of a machine on which nothing else runs."""
        size = config.crops.size
        return Speed(size, 1e-6 * size**2, 1e-3)

    monkeypatch.setattr(Trial, "measure", steady)
    given = SETTINGS | {"updates": 5000, "batch_size": 20}
    # 5 s + 5000 updates of 20 images + 6 validations, in 80 % of the time: 96 pixels take 20 min.
    with pytest.raises(InputError, match=r"takes about 20 min: give `minutes` 20 or more"):
        prepare(photos, given | {"minutes": 10}, preset="paper")
    plan = prepare(photos, given | {"minutes": 60}, preset="paper")
    assert plan.config.updates == 5000
    assert plan.config.batch_size == 20
    assert plan.config.crops.size == 160
    assert plan.notes[-1] == (
        "to end within 60 min: crops of 160 pixels instead of 800, 5 validations instead of 500"
    )
    assert plan.config.validate_every == 1000
    assert plan.reasons["crops.size"] == "to end within 60 min; 800 without this limit"
    enough = prepare(photos, given | {"minutes": 6000}, preset="paper")
    assert enough.config.crops.size == 800
    assert enough.notes[-1].endswith(" of the 6000 min: nothing is reduced")


def test_the_time_of_the_teacher_counts(photos, monkeypatch):
    now = [0.0]

    class SlowTeacher:
        dim, fingerprint, folder, name = 8, "abc", None, "slow"

        def describe(self, images, *, on_progress):
            now[0] += 60 * len(images)

    monkeypatch.setattr(time_limit, "perf_counter", lambda: now[0])
    monkeypatch.setattr(Trial, "measure", lambda trial, config: Speed(config.crops.size, 0.0, 0.0))
    given = SETTINGS | {"updates": 5000, "teacher": SlowTeacher()}
    count = len(list(photos.rglob("*.jpg")))
    with pytest.raises(InputError, match=rf"takes about {count + 1} min"):
        prepare(photos, given | {"minutes": count - 1})
    assert prepare(photos, given | {"minutes": count + 10}).config.updates == 5000


def test_too_few_minutes_are_an_error_that_names_enough(photos):
    with pytest.raises(InputError, match=r"takes about \d+ min: give `minutes` \d+ or more"):
        prepare(photos, SETTINGS | {"minutes": 0.01})


def test_a_run_that_is_slower_than_planned_stops_in_time(photos, tmp_path):
    view, run = Clock(pause=1.0), tmp_path / "run"
    plan = prepare(photos, SMALL | {"updates": 60, "validate_every": 60, "minutes": 0.25})
    result = Trainer(plan, run, view).fit()
    assert 0 < result.updates < 15
    assert result.seconds < 15
    assert view.lines[-1].startswith(f"stopped after update {result.updates}: the 0.25 minutes")
    assert "validation_map" in read_metrics(run)[-1]
    # It has ended: there is nothing to resume.
    assert resume(run).fit().updates == result.updates
