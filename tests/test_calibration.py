"""Calibration: probabilities that agree with how often pairs show the same thing."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from listwise.calibration import FIRST, MAX_ERROR, NEIGHBORS, Calibration, _fit, fit_calibration
from listwise.errors import InputError


def photos(classes=40, each=6, spread=0.9, seed=0, common=0.0, dim=32):
    """Unit descriptors of classes that overlap, and their labels.

    With `common`, the photos share this much of groups of classes that look alike.
    """
    drawn = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), each)
    rows = drawn.normal(size=(classes, dim))[labels]
    rows = rows + spread * drawn.normal(size=(len(labels), dim))
    rows = rows + common * drawn.normal(size=(4, dim))[drawn.integers(0, 4, classes)[labels]]
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
    slope, intercept = _fit(scores, same, np.ones(4000))
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


def test_points_are_taken_where_they_fit_better_than_a_line():
    fitted = fit_calibration(*photos(spread=1.4))
    scores, values = np.array(fitted.points).T
    assert (np.diff(scores) > 0).all()
    assert (np.diff(values) > 0).all()
    again = Calibration.model_validate_json(fitted.model_dump_json())
    assert again == fitted
    many = np.linspace(-1, 1, 10_001)
    found = again.probability(many)
    assert (np.diff(found) > 0).all()
    middle = (found > 0.001) & (found < 0.999)
    back = [again.score(probability) for probability in found[middle]]
    assert back == pytest.approx(many[middle].tolist(), abs=1e-6)
    assert fit_calibration(*photos(spread=0.9, common=2)).points == ()


def test_the_errors_are_those_of_other_classes():
    fitted = fit_calibration(*photos(spread=1.4), "toys")
    assert fitted.error < MAX_ERROR
    rows, labels = photos(spread=1.4, seed=1)
    scores = rows @ rows.T - 2 * np.eye(len(rows))
    first = np.argsort(-scores, axis=1)[:, :FIRST]
    share = (labels[first] == labels[:, None]).mean()
    assert fitted.first_share == pytest.approx(share, abs=0.05)
    assert fitted.first_probability == pytest.approx(share, abs=0.05)
    assert f"mean probability of {fitted.first_probability:.2f}" in fitted.reliability()


def test_probabilities_that_would_be_wrong_are_refused():
    rows, labels = photos(each=12, spread=1.4, common=6)
    with pytest.raises(
        InputError, match=r"of toys would be off by more than 0\.1: on classes left"
    ):
        fit_calibration(rows, labels, "toys")


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (np.arange(6), "two labels with several photos: toys have 0"),
        (np.zeros(6, int), "two labels with several photos: toys have 1"),
        (np.zeros(1, int), "two labels with several photos: toys have 0"),
        (np.array([0, 0, 1, 2, 3, 4]), "two labels with several photos: toys have 1"),
        (np.array([0, 1, 2, 0, 1, 2]), "do not separate the labels"),
    ],
)
def test_photos_that_cannot_calibrate_are_refused(labels, reason):
    corners = np.eye(8, dtype=np.float32)[np.array([0, 0, 1, 1, 2, 2])[: len(labels)]]
    with pytest.raises(InputError, match=reason):
        fit_calibration(corners, labels, "toys")
