"""The dimension, power and shrinkage of a whitening, chosen on validation photos."""

import numpy as np
import pytest

from listwise.data import Images, LabelledImages
from listwise.descriptors import Whitening, choosing
from listwise.descriptors.choosing import choose_whitening, validation_folds
from listwise.errors import InputError
from listwise.evaluation import compare_ap, evaluate_labelled


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def spread_over(classes, photos, noise, signal, seed=0):
    """Rows of some classes: `signal` has the spread of the classes in each dimension."""
    generator = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), photos)
    centers = generator.standard_normal((classes, len(signal))) * signal
    rows = centers[labels] + generator.standard_normal((len(labels), len(noise))) * noise
    return unit(rows), labels


def helpful(classes=16, seed=0):
    """Four dimensions of noise are much larger than the dimensions that tell classes apart."""
    noise = np.array([2.0] * 4 + [0.12] * 28)
    return spread_over(classes, 8, noise, np.array([0.0] * 4 + [0.2] * 28), seed)


def harmful(classes=16, seed=0):
    """Four large dimensions tell classes apart; the small ones are noise."""
    noise = np.array([0.5] * 4 + [0.02] * 60)
    return spread_over(classes, 8, noise, np.array([1.0] * 4 + [0.0] * 60), seed)


def images_of(labels, splits=None):
    names = [str(i) for i in range(len(labels))]
    plain = Images(tuple(names), tuple(names), None)
    return LabelledImages.from_names(plain, [f"c{label:03}" for label in labels], splits)


def choose(rows, labels, **options):
    folds, _ = validation_folds(images_of(labels))
    return choose_whitening(folds, lambda at: [rows[at]], labels, **options)


def test_the_best_candidate_is_the_one_that_a_plain_search_finds():
    rows, labels = helpful()
    folds, _ = validation_folds(images_of(labels))
    choice = choose(rows, labels)

    def plain_ap(dim, power, shrinkage):
        found = []
        for fold in folds:
            learned = Whitening.learn([rows[fold.learn]], dim, power, shrinkage)
            own = learned.apply(rows[fold.validate])
            found.append(evaluate_labelled(own, labels[fold.validate]).per_query_ap)
        return np.concatenate(found)

    found = {
        (dim, power, shrinkage): plain_ap(dim, power, shrinkage)
        for dim in (4, 8, 16, 32)
        for power in choosing.POWERS
        for shrinkage in (0.0, "ledoit-wolf")
    }
    best = choice.best
    expected = found[best.dim, best.power, best.shrinkage]
    assert choice.validation_map == pytest.approx(expected.mean(), abs=1e-4)
    assert choice.validation_map >= max(ap.mean() for ap in found.values()) - 1e-4
    for each, value in choice.maps.items():
        same = [ap.mean() for (dim, *_), ap in found.items() if dim == each.dim]
        assert value == pytest.approx(max(same), abs=1e-4)
    order = np.concatenate([fold.validate for fold in folds])
    start = [evaluate_labelled(rows[f.validate], labels[f.validate]).per_query_ap for f in folds]
    gain = compare_ap(expected, np.concatenate(start), labels[order])
    assert choice.gain == pytest.approx(gain, abs=1e-4)
    assert choice.gain.clear
    assert gain.value > 0.2
    assert f"{100 * choice.start_map:.1f}" in choice.table()
    assert "none" in choice.table()


def test_a_whitening_that_does_not_help_says_so():
    rows, labels = harmful()
    choice = choose(rows, labels)
    assert not choice.gain.clear
    fixed = choose(rows, labels, power=0.5, shrinkage=0.0, dim=32)
    assert fixed.gain.value < -0.1
    assert list(fixed.maps) == [(32, 0.5, 0.0)]
    # Compared with a bad whitening, a better one helps.
    bad = Whitening.learn([rows], power=0.5)
    assert choose(rows, labels, current=bad).gain.clear


def test_what_is_given_is_not_chosen():
    rows, labels = helpful()
    assert {each.dim for each in choose(rows, labels, dim=7).maps} == {7}
    assert choose(rows, labels, power=0.125).best.power == 0.125
    assert choose(rows, labels, shrinkage=0.5).best.shrinkage == 0.5
    supervised = choose(rows, labels, supervised=True)
    assert (supervised.best.power, supervised.best.shrinkage) == (None, None)
    assert supervised.gain.clear
    with pytest.raises(InputError, match="no whitening of this `dim` can be learned"):
        choose(rows, labels, dim=33)


def test_equal_candidates_take_fewer_dimensions_and_no_shrinkage():
    labels = np.repeat(np.arange(8), 4)
    noise = np.random.default_rng(0).standard_normal((32, 8))
    rows = unit(np.eye(8)[labels] + 0.001 * noise)
    choice = choose(rows, labels)
    assert (choice.start_map, choice.gain.value, choice.gain.clear) == (1.0, 0.0, False)
    equal = [each for each, value in choice.maps.items() if value == 1.0]
    assert choice.best == equal[0]
    assert choice.best.shrinkage == 0.0


def test_folds_never_validate_on_what_they_learn_from():
    labels = np.repeat(np.arange(40), 3)
    folds, final = validation_folds(images_of(labels))
    assert len(folds) == 5
    assert len(final) == 120
    validated = np.concatenate([fold.validate for fold in folds])
    assert sorted(validated) == list(range(120))
    for fold in folds:
        assert not set(labels[fold.learn]) & set(labels[fold.validate])
        assert sorted([*fold.learn, *fold.validate]) == list(range(120))
    few, _ = validation_folds(images_of(np.repeat(np.arange(4), 2)))
    assert [len(np.unique(fold.validate // 2)) for fold in few] == [2, 2]
    with pytest.raises(InputError, match="at least 4 classes of two or more photos, but only 3"):
        validation_folds(images_of([0, 0, 1, 1, 2, 2, 3]))


def test_the_split_val_of_a_table_is_validated_on():
    labels = [0, 0, 1, 1, 2, 2]
    splits = ["train", "train", "val", "val", "test", "test"]
    used = choosing.without_test_split(images_of(labels, splits))
    assert used.ids == ("0", "1", "2", "3")
    ((learn, validate),), final = validation_folds(used)
    assert (learn.tolist(), validate.tolist(), final.tolist()) == ([0, 1], [2, 3], [0, 1])
    with pytest.raises(InputError, match='every photo has the split "val"'):
        validation_folds(images_of([0, 0], ["val", "val"]))
    with pytest.raises(InputError, match="a class with two photos of the split"):
        validation_folds(images_of([0, 1, 2], ["val", "val", "train"]))
