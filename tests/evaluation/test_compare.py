import math

import numpy as np
import pytest

from listwise.errors import InputError
from listwise.evaluation import Gain, compare_ap


def plain_error(difference, labels):
    """The standard error of the mean difference with classes as clusters, one class at a time."""
    mean = sum(difference) / len(difference)
    total = 0.0
    for label in set(labels):
        total += (
            sum(d - mean for d, own in zip(difference, labels, strict=True) if own == label) ** 2
        )
    count = len(set(labels))
    return math.sqrt(count / (count - 1) * total) / len(difference)


def test_the_error_is_over_classes():
    generator = np.random.default_rng(0)
    labels = np.repeat(np.arange(6), (3, 9, 2, 5, 4, 7))
    base, ap = generator.random((2, len(labels)))
    gain = compare_ap(ap, base, labels)
    assert gain.value == pytest.approx((ap - base).mean())
    assert gain.error == pytest.approx(plain_error((ap - base).tolist(), labels.tolist()))
    # As many independent classes as queries: the usual standard error.
    alone = compare_ap(ap, base, np.arange(30))
    assert alone.error == pytest.approx((ap - base).std(ddof=1) / math.sqrt(30))
    assert compare_ap(ap, base, np.zeros(30)) == alone


def test_copies_of_queries_make_a_gain_no_clearer():
    base, ap = np.array([0.5, 0.5, 0.5, 0.5]), np.array([0.7, 0.6, 0.4, 0.65])
    few = compare_ap(ap, base, np.arange(4))
    many = compare_ap(np.repeat(ap, 50), np.repeat(base, 50), np.repeat(np.arange(4), 50))
    assert many == pytest.approx(few)
    assert not many.clear


def test_only_a_gain_beyond_two_standard_errors_is_clear():
    assert Gain(0.021, 0.01).clear
    assert not Gain(0.02, 0.01).clear
    assert not Gain(0.0, 0.0).clear
    assert not Gain(-0.1, 0.0).clear
    one = compare_ap([0.9], [0.1], [0])
    assert one.value == pytest.approx(0.8)
    assert not one.clear


def test_queries_without_a_positive_do_not_count():
    nan = float("nan")
    gain = compare_ap([0.5, nan, 0.9], [0.4, nan, 0.8], [0, 1, 2])
    assert gain == pytest.approx((0.1, 0.0))
    assert gain.clear
    for ap, base in (([nan], [nan]), ([0.5, nan], [0.5, 0.5])):
        with pytest.raises(InputError, match="the same queries, at least of one"):
            compare_ap(ap, base, np.arange(len(ap)))
    with pytest.raises(InputError, match="lists of the same length"):
        compare_ap([0.5], [0.5, 0.4], [0])
