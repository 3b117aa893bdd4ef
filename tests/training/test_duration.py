"""The estimate of a run's duration, and runs with a maximum duration."""

import itertools
import math
import time
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from training_examples import SETTINGS as SMALL_RUN
from training_examples import Witness

from listwise.errors import InputError
from listwise.settings import make_config
from listwise.training import Trainer, duration, prepare, resume
from listwise.training.choices import Speed
from listwise.training.duration import TimeLeft, reductions, validations
from listwise.training.run import read_metrics
from listwise.training.weights import PCA_PHOTOS

SETTINGS = {
    name: SMALL_RUN[name] for name in ("backbone", "weights", "val_fraction", "device", "workers")
}
SMALL = SMALL_RUN | {"micro_batch": 4, "updates": 4}


def config_of(updates=10, crop=128, batch=64, every=5, **others):
    given = {"updates": updates, "batch_size": batch, "validate_every": every}
    return make_config(given | {"crops": {"size": crop}} | others)


def effort(config):
    return config.updates, config.crops.size, config.batch_size, validations(config)


configs = st.builds(
    config_of,
    st.integers(1, 300),
    st.integers(8, 800),
    st.integers(2, 4096),
    st.integers(1, 50),
)
NAMES = ("updates", "crops.size", "batch_size", "validate_every")


@given(configs, st.frozensets(st.sampled_from(NAMES)))
def test_every_reduction_is_smaller_and_what_is_given_stays(default, fixed):
    values = default.model_dump(include=fixed - {"crops.size"})
    if "crops.size" in fixed:
        values["crops"] = {"size": default.crops.size}
    floors = [min(default.updates, 20), min(default.crops.size, 96), min(default.batch_size, 64)]
    first, *reduced = reductions(make_config(values), default)
    assert first == make_config(values)
    found = [effort(default)] + [effort(config) for config in reduced]
    # Fewer updates first, then smaller crops, then smaller batches.
    order = [
        next((i for i in range(3) if before[i] != after[i]), 0)
        for before, after in itertools.pairwise(found)
    ]
    assert order == sorted(order)
    for i, name in enumerate(NAMES[:3]):
        values = [each[i] for each in found]
        assert values == sorted(values, reverse=True)
        assert values[-1] == (values[0] if name in fixed else floors[i])
    if "validate_every" in fixed:
        assert {config.validate_every for config in reduced} == {default.validate_every}
    else:
        assert all(each[3] <= min(found[0][3], 5) for each in found[1:])


def test_the_time_of_a_run():
    def seconds(train=100, choice=0.0, **others):
        plan = SimpleNamespace(train=range(train), validation=range(30))
        plan.config, plan.speed = config_of(20, **others), Speed(0.004, 0.006, 0.1)
        return TimeLeft(plan, choice).seconds(0)

    plain = seconds()
    assert plain == pytest.approx(5 + 20 * 64 * 0.01 + 5 * (1 + 3))
    triplets = {"loss": "triplet", "triplet": {"tuples": 4, "refresh": 32, "pool": 60}}
    mined = plain + 20 * (12 - 64) * 0.01 + 3 * 60 * 0.1
    assert seconds(**triplets) == pytest.approx(mined)
    for train, described in ((70, 70), (10**6, PCA_PHOTOS)):
        assert seconds(train, projection=8) - plain == pytest.approx(described * 0.1)
    assert seconds(choice=1.5) - plain == pytest.approx(1.5 * 4)


def test_the_estimate_comes_first_and_the_bar_moves_inside_updates(photos, tmp_path):
    view = Witness(wants_estimate=True)
    Trainer(prepare(photos, SMALL), tmp_path / "run", view).fit()
    assert view.lines[0].startswith("about ")
    assert " on this machine (" in view.lines[0]
    assert ": 4 updates of 16 images, 3 validations of " in view.lines[0]
    done = [updates for updates, _ in view.advanced]
    assert done == sorted(done)
    assert len([updates for updates in done if 0 < updates < 1]) > 3
    assert all(left is not None and left >= 0 for _, left in view.advanced)
    assert view.advanced[-1] == (4, 0)


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
    # A resumed run has the same plan, without another trial.
    again = resume(run)
    assert again.plan.speed is None
    assert again.plan.config == plan.config


@pytest.fixture
def steady(monkeypatch):
    """The speed of a machine on which nothing else runs."""

    def measure(forward, plan):
        return Speed(0.0, 1e-6 * plan.config.crops.size**2, 1e-3)

    monkeypatch.setattr(duration, "measure_speed", measure)


def test_what_does_not_fit_is_reduced_and_told(photos, steady):
    given = SETTINGS | {"updates": 5000, "batch_size": 20}
    # 5 s + 5000 updates of 20 images + 6 validations, in 80 % of the time: 96 pixels take 20 min.
    with pytest.raises(InputError, match=r"takes about 20 min: give `minutes` 20 or more"):
        prepare(photos, given | {"minutes": 10}, preset="paper")
    plan = prepare(photos, given | {"minutes": 60}, preset="paper")
    assert effort(plan.config) == (5000, 160, 20, 5)
    assert plan.notes[-1] == (
        "to end within 60 min: crops of 160 pixels instead of 800, 5 validations instead of 500"
    )
    assert plan.reasons["crops.size"] == "to end within 60 min: crops of 160 pixels instead of 800"
    enough = prepare(photos, given | {"minutes": 6000}, preset="paper")
    assert enough.config.crops.size == 800
    assert enough.notes[-1].endswith(" of the 6000 min: nothing is reduced")
    # All that could be shorter was given.
    fixed = prepare(photos, given | {"minutes": 1, "crops": {"size": 96}}, preset="paper")
    assert fixed.config.crops.size == 96


def test_more_minutes_never_plan_less(photos, steady):
    efforts = []
    for minutes in (0.5, 1, 3, 6, 20, 40, 100):
        plan = prepare(photos, SETTINGS | {"minutes": minutes}, preset="paper")
        efforts.append(effort(plan.config))
    assert len(set(efforts)) > 4
    for fewer, more in itertools.pairwise(efforts):
        assert all(a <= b for a, b in zip(fewer, more, strict=True))


def test_the_time_of_the_teacher_counts(photos, monkeypatch):
    now = [0.0]

    class SlowTeacher:
        dim, fingerprint, folder, name = 8, "abc", None, "slow"

        def describe(self, images, *, on_progress):
            now[0] += 60 * len(images)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(duration, "measure_speed", lambda *_: Speed(0.0, 0.0, 0.0))
    given = SETTINGS | {"updates": 5000, "teacher": SlowTeacher()}
    count = len(list(photos.rglob("*.jpg")))
    with pytest.raises(InputError, match=rf"takes about {count + 1} min"):
        prepare(photos, given | {"minutes": count - 1})
    assert prepare(photos, given | {"minutes": 2 * count}).config.updates == 5000


def test_a_run_that_is_slower_than_planned_stops_in_time(photos, tmp_path):
    view, run = Witness(pause=0.5), tmp_path / "run"
    plan = prepare(photos, SMALL | {"updates": 60, "validate_every": 60, "minutes": 0.15})
    result = Trainer(plan, run, view).fit()
    assert 0 < result.updates < 18
    assert math.ceil(result.seconds) <= 9
    assert view.lines[-2].startswith(f"stopped after update {result.updates}: the 0.15 minutes")
    assert "validation_map" in read_metrics(run)[-1]
    # It has ended: there is nothing to resume.
    assert resume(run).fit().updates == result.updates
