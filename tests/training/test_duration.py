import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from listwise.settings import TrainConfig
from listwise.training.duration import (
    MIN_BATCH,
    MIN_CROP,
    MIN_UPDATES,
    Effort,
    Speed,
    TimeLeft,
    Workload,
    between,
    efforts,
    fit_effort,
    reductions,
    run_seconds,
    smaller_crops,
    workload_of,
)
from listwise.training.projection import PHOTOS

defaults = st.builds(
    Effort,
    updates=st.integers(1, 300),
    crop=st.integers(8, 800),
    batch=st.integers(2, 4096),
    validate_every=st.integers(1, 50),
)
fields = st.frozensets(st.sampled_from(Effort._fields))
seconds = st.floats(1e-5, 2.0)
works = st.builds(
    Workload, validation=st.integers(2, 500), mined=st.integers(0, 500), mining_period=st.just(0)
)


def cost(large: Speed, small: Speed, work: Workload):
    return lambda effort: run_seconds(effort, between(large, small, effort.crop), work)


@st.composite
def cases(draw):
    """A default, fixed fields, and the cost of an effort on some machine."""
    default, fixed = draw(defaults), draw(fields)
    least = [*efforts(default, fixed)][-1]
    large = Speed(default.crop, draw(seconds), draw(seconds))
    small = Speed(least.crop, draw(seconds), draw(seconds))
    return default, fixed, cost(large, small, draw(works))


@given(cases(), st.floats(0, 1e5))
def test_a_plan_never_exceeds_the_limit_and_is_none_only_if_nothing_fits(case, limit):
    default, fixed, seconds_of = case
    chosen = fit_effort(default, fixed, limit, seconds_of)
    if chosen is None:
        assert min(map(seconds_of, efforts(default, fixed))) > limit
    else:
        assert seconds_of(chosen) <= limit
    if seconds_of(default) <= limit:
        assert chosen == default


@given(defaults, fields)
def test_nothing_is_below_the_floors_and_what_is_given_stays(default, fixed):
    least = min(default.updates, MIN_UPDATES), min(default.crop, MIN_CROP), min(default.batch, 64)
    assert MIN_BATCH == 64
    for effort in efforts(default, fixed):
        assert effort[:3] >= least
        assert all(mine >= floor for mine, floor in zip(effort[:3], least, strict=True))
        assert all(mine <= most for mine, most in zip(effort[:3], default[:3], strict=True))
        assert all(getattr(effort, name) == getattr(default, name) for name in fixed)
    if not fixed & {"updates", "crop", "batch"}:
        assert effort[:3] == least


@given(cases(), st.floats(0, 1e5), st.floats(0, 1e5))
def test_more_minutes_never_plan_less(case, first, second):
    default, fixed, seconds_of = case
    short, long = (
        fit_effort(default, fixed, limit, seconds_of) for limit in sorted([first, second])
    )
    assume(short is not None)
    assert long is not None
    for name in ("updates", "crop", "batch", "validations"):
        assert getattr(long, name) >= getattr(short, name)


def test_the_order_of_what_is_given_up():
    default = Effort(updates=36, crop=224, batch=256, validate_every=2)
    found = [*efforts(default)]
    assert found[1] == default._replace(validate_every=8)
    assert found[1].validations == 5
    assert found[17] == Effort(updates=20, crop=224, batch=256, validate_every=4)
    assert [effort.crop for effort in found[18:22]] == [192, 160, 128, 96]
    assert [effort.batch for effort in found[22:]] == [128, 64]
    assert reductions(default, found[-1]) == [
        "20 updates instead of 36",
        "crops of 96 pixels instead of 224",
        "batches of 64 images instead of 256",
        "5 validations instead of 18",
    ]
    assert reductions(default, default) == []


def test_few_crop_sizes_lie_between_the_largest_and_the_smallest():
    assert [*smaller_crops(800)] == [640, 512, 416, 320, 256, 192, 160, 128, 96]
    assert [*smaller_crops(96)] == []
    assert [*smaller_crops(100)] == [96]


def test_the_time_of_a_run():
    effort, speed = Effort(20, 128, 64, 5), Speed(128, 0.01, 0.1)
    plain = run_seconds(effort, speed, Workload(validation=30))
    assert plain == pytest.approx(5 + 20 * 64 * 0.01 + 5 * (1 + 3))
    mined = run_seconds(effort, speed, Workload(validation=30, mined=100, mining_period=8))
    assert mined - plain == pytest.approx(3 * 100 * 0.1)
    started = run_seconds(effort, speed, Workload(validation=30, start=70))
    assert started - plain == pytest.approx(70 * 0.1)


def test_photos_that_are_described_for_a_projection_are_part_of_the_work():
    settings = TrainConfig(projection=8)
    assert workload_of(settings, {}, 100, 20) == Workload(20, start=100)
    assert workload_of(settings, {}, 10**6, 20).start == PHOTOS
    trained = {"model": object()}  # of an index
    for config, parts in ((TrainConfig(), {}), (settings, trained)):
        assert workload_of(config, parts, 100, 20).start == 0


def test_speeds_between_two_sizes():
    large, small = Speed(200, 4.0, 8.0), Speed(100, 1.0, 9.0)
    assert between(large, small, 200) == (200, 4.0, 8.0)
    assert between(large, small, 100) == (100, 1.0, 8.0)  # smaller photos do not take longer
    assert between(large, small, 150).image == pytest.approx(1 + 3 * (150**2 - 100**2) / 30000)


def test_the_remaining_time_follows_the_run():
    left = TimeLeft(Effort(10, 128, 64, 5), Speed(128, 0.5, 1.0), Workload(validation=9))
    assert left.seconds(0) == pytest.approx(10 * 32 + 2 * 10)
    left.note_update(20.0, part=0.5)  # half of the first update took longer than expected
    assert left.seconds(0.5) == pytest.approx(9.5 * 36 + 2 * 10)
    left.note_update(10.0)
    left.note_validation(4.0)
    assert left.seconds(5) == pytest.approx(5 * 10 + 4)
    assert left.seconds(10) == 0


def test_without_a_trial_the_remaining_time_is_unknown_at_first():
    left = TimeLeft(Effort(10, 128, 64, 5), None, Workload(validation=9))
    assert left.seconds(0) is None
    left.note_update(1.0, part=0.25)
    assert left.seconds(0.25) == pytest.approx(9.75 * 4)
    assert math.isclose(left.seconds(0.5), 9.5 * 4)
