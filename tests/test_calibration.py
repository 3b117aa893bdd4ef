"""Calibration: probabilities that agree with how often pairs show the same thing."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from listwise.calibration import (
    NEIGHBORS,
    Calibration,
    _fit,
    fit_calibration,
)
from listwise.errors import InputError


def photos(classes=40, each=6, spread=0.9, seed=0):
    """Unit descriptors of classes that overlap, and their labels."""
    drawn = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), each)
    rows = drawn.normal(size=(classes, 32))[labels] + spread * drawn.normal(size=(len(labels), 32))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32), labels


def test_the_probability_is_the_share_of_pairs_of_the_same_thing():
    fitted = fit_calibration(*photos(spread=1.4), "toys")
    rows, labels = photos(spread=1.4, seed=1)  # other photos
    scores = rows @ rows.T - 2 * np.eye(len(rows))
    nearest = np.argsort(-scores, axis=1)[:, :NEIGHBORS]
    found = fitted.probability(np.take_along_axis(scores, nearest, 1)).ravel()
    same = (labels[nearest] == labels[:, None]).ravel()
    for low, high in ((0, 0.1), (0.1, 0.4), (0.4, 0.7), (0.7, 1)):
        inside = (found >= low) & (found < high)
        assert inside.sum() > 50
        assert same[inside].mean() == pytest.approx(found[inside].mean(), abs=0.12)


def test_the_fit_is_a_logistic_regression():
    drawn = np.random.default_rng(3)
    scores = drawn.uniform(-1, 1, 4000)
    same = drawn.random(4000) < 1 / (1 + np.exp(-(9 * scores - 4)))
    expected = LogisticRegression(C=1e9).fit(scores[:, None], same)
    slope, intercept = _fit(scores, same)
    assert slope == pytest.approx(expected.coef_[0, 0], rel=0.02)
    assert intercept == pytest.approx(expected.intercept_[0], rel=0.02)


def test_scores_that_separate_the_labels_give_a_finite_slope():
    rows, labels = photos(spread=0.01)
    fitted = fit_calibration(rows, labels)
    assert np.isfinite(fitted.slope)
    assert fitted.probability(0.99) > 0.9
    assert fitted.probability(0.3) < 0.1


def test_a_score_and_its_probability():
    fitted = Calibration(slope=10, intercept=-5, source="s", photos=4, pairs=6, positives=2)
    assert fitted.probability(0.5) == pytest.approx(0.5)
    for probability in (0.01, 0.5, 0.93):
        assert fitted.probability(fitted.score(probability)) == pytest.approx(probability)
    assert fitted.probability([-1e9, 1e9]).tolist() == [0, 1]
    assert fitted.score(0) == -np.inf


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (np.arange(6), "pairs of photos with the same label: toys have none"),
        (np.zeros(6, int), "pairs of photos with different labels"),
        (np.zeros(1, int), "pairs of photos with the same label"),
        (np.array([0, 1, 2, 0, 1, 2]), "do not separate their labels"),
    ],
)
def test_photos_that_cannot_calibrate_are_refused(labels, reason):
    corners = np.eye(8, dtype=np.float32)[np.array([0, 0, 1, 1, 2, 2])[: len(labels)]]
    with pytest.raises(InputError, match=reason):
        fit_calibration(corners, labels, "toys")
