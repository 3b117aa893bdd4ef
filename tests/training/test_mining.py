import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize
from training_examples import SETTINGS as SMALL
from two_processes import in_two_processes

from listwise.errors import InputError
from listwise.settings import TripletSettings, make_config
from listwise.training import Trainer, prepare
from listwise.training.run import read_metrics
from listwise.training.sampling import (
    TripletMiner,
    fixed_positives,
    hardest_triplets,
    make_miner,
    nearest_of_other_classes,
)


@st.composite
def pools(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.integers(2, 20))
    descriptors = normalize(torch.tensor(rng.normal(size=(size, 4))), dim=1)
    return descriptors, torch.tensor(rng.integers(0, draw(st.integers(1, 7)), size))


def all_triplets(descriptors, labels, query):
    """Every triplet of a query as (q·n − q·p, positive, negative), hardest first."""
    scores = (descriptors @ descriptors[query]).tolist()
    positives = [i for i in range(len(labels)) if labels[i] == labels[query] and i != query]
    negatives = [i for i in range(len(labels)) if labels[i] != labels[query]]
    found = [(scores[n] - scores[p], p, n) for p, n in itertools.product(positives, negatives)]
    return sorted(found, reverse=True)


@given(pools(), st.integers(1, 30))
def test_the_hardest_triplets_are_the_hardest_of_all(pool, hardest):
    descriptors, labels = pool
    gaps, pairs = hardest_triplets(descriptors, labels, hardest)
    assert gaps.shape == (len(labels), min(hardest, len(labels)))
    for query in range(len(labels)):
        expected = all_triplets(descriptors, labels, query)[: gaps.shape[1]]
        found = [
            (gap, *pair)
            for gap, pair in zip(gaps[query].tolist(), pairs[query].tolist(), strict=True)
            if gap > -np.inf
        ]
        assert [gap for gap, *_ in found] == pytest.approx([gap for gap, *_ in expected])
        # Of equally hard ones any may be taken, none twice.
        every = {(p, n): gap for gap, p, n in all_triplets(descriptors, labels, query)}
        assert [every[p, n] for _, p, n in found] == pytest.approx([gap for gap, *_ in found])
        assert len({(p, n) for _, p, n in found}) == len(found)


@given(pools(), st.integers(1, 5), st.randoms(use_true_random=False))
def test_negatives_are_the_nearest_of_the_pool_one_of_a_class(pool, count, random):
    descriptors, labels = pool
    rows = list(range(len(labels)))
    queries = torch.tensor(random.sample(rows, random.randint(1, len(rows))))
    among = torch.tensor(random.sample(rows, random.randint(1, len(rows))))
    if len(labels[among].unique()) <= count:
        with pytest.raises(InputError, match="too few classes"):
            nearest_of_other_classes(descriptors, labels, queries, among, count)
        return
    found = nearest_of_other_classes(descriptors, labels, queries, among, count)
    for query, negatives in zip(queries.tolist(), found.tolist(), strict=True):
        taken = {int(labels[query])}
        expected = []
        order = sorted(among.tolist(), key=lambda i: -float(descriptors[query] @ descriptors[i]))
        for image in order:
            if int(labels[image]) not in taken:
                expected.append(image)
                taken.add(int(labels[image]))
        assert negatives == expected[:count]


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(0, 99))
def test_fixed_positives_are_others_of_the_class(labels, seed):
    labels = np.array(labels)
    positives = fixed_positives(labels, np.random.default_rng(seed))
    for i, positive in enumerate(positives):
        if (labels == labels[i]).sum() == 1:
            assert positive == -1
        else:
            assert positive != i
            assert labels[positive] == labels[i]


def describe(photos, dim=8):
    """Descriptors that depend on the photo alone."""
    rows = [np.random.default_rng(int(photo)).normal(size=dim) for photo in photos]
    return normalize(torch.tensor(np.array(rows)), dim=1)


LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(30), 8))


def test_triplets_have_a_loss_and_are_of_the_hardest_in_the_pool():
    settings = TripletSettings(tuples=16, pool=100, refresh=64, hardest=5, margin=0.3)
    miner = TripletMiner(settings, LABELS, seed=3)
    assert (miner.period, miner.per_update) == (4, 16)
    photos = miner.photos(8)
    assert len(np.unique(photos)) == 100
    descriptors = describe(photos)
    triplets = miner.tuples(8, photos, descriptors)
    assert triplets.shape == (64, 3)
    place = {int(photo): row for row, photo in enumerate(photos)}
    labels = torch.from_numpy(LABELS[photos])
    for triplet in triplets:
        query, positive, negative = (place[int(photo)] for photo in triplet)
        gap = float(descriptors[query] @ (descriptors[negative] - descriptors[positive]))
        best = all_triplets(descriptors, labels, query)[:5]
        assert (positive, negative) in [(p, n) for _, p, n in best]
        assert 0.3 / 2 + gap > 0
    assert len(np.unique(triplets[:, 0])) > 30
    assert len({tuple(t) for t in triplets.tolist()}) > 50


@pytest.mark.parametrize(("form", "is_drawn"), [("margin", False), ("log-exp", True)])
def test_queries_without_a_loss_are_not_drawn(form, is_drawn):
    """Class 0 is far from the others, so the hinge of its triplets is zero."""
    labels = np.repeat([0, 1, 2], 4)
    angles = torch.tensor([3.0] * 4 + [0.0, 0.1, 0.2, 0.3] * 2)
    descriptors = torch.stack([angles.cos(), angles.sin()], 1)
    settings = TripletSettings(tuples=50, form=form)
    triplets = TripletMiner(settings, labels, 0).tuples(0, np.arange(12), descriptors)
    assert (labels[triplets[:, 0]] == 0).any() == is_drawn


@pytest.mark.parametrize("loss", ["triplet", "contrastive"])
@pytest.mark.parametrize("tuples", [3, 500])
def test_a_small_set_bounds_the_pool_and_what_is_mined_at_once(loss, tuples):
    config = make_config({"loss": loss, loss: {"tuples": tuples}}, "here")
    miner = make_miner(config, LABELS)
    assert miner.period == max(1, len(LABELS) // tuples)
    photos = miner.photos(0)
    np.testing.assert_array_equal(photos, np.arange(len(LABELS)))
    found = miner.tuples(0, photos, describe(photos))
    assert found.shape == (miner.period * tuples, 2 + config.mined.negatives)


@pytest.mark.parametrize("loss", ["triplet", "contrastive"])
def test_photos_that_cannot_be_read_are_not_asked_for(loss):
    miner = make_miner(make_config({"loss": loss, loss: {"tuples": 20}}, "here"), LABELS)
    photos = miner.photos(0)[::3]
    found = miner.tuples(0, photos, describe(photos))
    chosen = np.delete(found, 1, axis=1) if loss == "contrastive" else found  # a fixed positive
    assert np.isin(chosen, photos).all()
    with pytest.raises(InputError, match=r"increase `triplet\.pool`|none of the drawn") as caught:
        miner.tuples(0, photos[:0], describe(range(1))[:0])
    assert "\n" not in str(caught.value)


SETTINGS = SMALL | {
    "val_fraction": 0.3,
    "micro_batch": 4,
    "updates": 3,
    "validate_every": 3,
    "triplet": {"tuples": 5, "pool": 25, "refresh": 10},
    "contrastive": {"tuples": 3, "negatives": 2, "pool": 9, "refresh": 6},
}


def fit(photos, run, loss):
    trainer = Trainer(prepare(photos, SETTINGS | {"loss": loss}), run)
    return trainer.fit(), np.array(trainer.progress.tuples)


def work(rank, folder, photos):
    return {loss: fit(photos, folder / loss, loss) for loss in ("triplet", "contrastive")}


def test_two_processes_mine_and_train_like_one(photos, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    both = in_two_processes(work, tmp_path, tmp_path, photos)
    for loss in ("triplet", "contrastive"):
        result, tuples = fit(photos, tmp_path / "one" / loss, loss)
        for other, other_tuples in (both[0][loss], both[1][loss]):
            np.testing.assert_array_equal(other_tuples, tuples)
            assert other.counts == result.counts
        lines = zip(
            read_metrics(tmp_path / "one" / loss), read_metrics(tmp_path / loss), strict=True
        )
        for line, other in lines:
            for name in ("loss", "validation_map", "forwards"):
                assert other.get(name) == pytest.approx(line.get(name), abs=1e-5)
    torch.set_num_threads(threads)
