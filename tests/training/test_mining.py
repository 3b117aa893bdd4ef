import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from listwise.errors import InputError
from listwise.settings import ContrastiveSettings, TripletSettings, make_config
from listwise.training.mining import miners as mining
from listwise.training.mining.miners import (
    ContrastiveMiner,
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


@given(pools(), st.integers(1, 30), st.sampled_from([1, 7, 512]))
def test_the_hardest_triplets_are_the_hardest_of_all(pool, hardest, block):
    descriptors, labels = pool
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mining, "_BLOCK", block)
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


@given(pools(), st.integers(1, 5), st.randoms(use_true_random=False), st.sampled_from([1, 512]))
def test_negatives_are_the_nearest_of_the_pool_one_of_a_class(pool, count, random, block):
    descriptors, labels = pool
    rows = list(range(len(labels)))
    queries = torch.tensor(random.sample(rows, random.randint(1, len(rows))))
    among = torch.tensor(random.sample(rows, random.randint(1, len(rows))))
    if len(labels[among].unique()) <= count:
        with pytest.raises(InputError, match="too few classes"):
            nearest_of_other_classes(descriptors, labels, queries, among, count)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mining, "_BLOCK", block)
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


def test_every_other_of_the_class_may_be_the_positive():
    labels = np.array([1, 0, 0, 1, 0, 0])
    drawn = {fixed_positives(labels, np.random.default_rng(seed))[2] for seed in range(50)}
    assert drawn == {1, 4, 5}


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


def test_training_continues_if_no_triplet_has_a_loss():
    labels = np.repeat([0, 1], 3)
    miner = TripletMiner(TripletSettings(tuples=4), labels, 0)
    triplets = miner.tuples(0, np.arange(6), torch.eye(2)[torch.from_numpy(labels)])
    assert (labels[triplets[:, 0]] == labels[triplets[:, 1]]).all()
    assert (labels[triplets[:, 0]] != labels[triplets[:, 2]]).all()


def test_a_pool_without_pairs_is_one_line():
    miner = TripletMiner(TripletSettings(tuples=4), np.arange(6), 0)
    with pytest.raises(InputError, match=r"triplet\.pool") as caught:
        miner.tuples(0, np.arange(6), describe(range(6)))
    assert "\n" not in str(caught.value)


def test_contrastive_tuples_are_those_of_the_paper():
    settings = ContrastiveSettings(tuples=7, pool=60, refresh=40, negatives=3)
    miner = ContrastiveMiner(settings, LABELS, seed=3)
    assert (miner.period, miner.per_update) == (5, 7)
    photos = miner.photos(10)
    queries, pool = miner._draw(10)
    assert (len(queries), len(pool)) == (35, 60)
    np.testing.assert_array_equal(photos, np.union1d(queries, pool))
    tuples = miner.tuples(10, photos, describe(photos))
    assert tuples.shape == (35, 5)
    np.testing.assert_array_equal(tuples[:, 0], queries)
    assert len(np.unique(queries)) == 35
    np.testing.assert_array_equal(tuples[:, 1], miner.positives[queries])
    for query, _, *negatives in tuples.tolist():
        near = sorted(pool.tolist(), key=lambda i: -float(describe([query]) @ describe([i]).T))
        classes, expected = {LABELS[query]}, []
        for photo in near:
            if LABELS[photo] not in classes:
                expected.append(photo)
                classes.add(LABELS[photo])
        assert negatives == expected[:3]
    # The pairs are the same at the next mining, the queries and negatives others.
    again = miner.tuples(15, miner.photos(15), describe(miner.photos(15)))
    assert set(again[:, 0]) != set(queries)
    np.testing.assert_array_equal(again[:, 1], miner.positives[again[:, 0]])


@pytest.mark.parametrize("loss", ["triplet", "contrastive"])
def test_what_is_mined_repeats_by_seed_and_update(loss):
    def mine(seed, update):
        miner = make_miner(make_config({"loss": loss, "seed": seed}, "here"), LABELS)
        photos = miner.photos(update)
        return miner.tuples(update, photos, describe(photos)).tolist()

    assert mine(1, 5) == mine(1, 5)
    assert mine(1, 5) != mine(1, 6)
    assert mine(1, 5) != mine(2, 5)


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
    with pytest.raises(InputError, match=r"a pool of 0 photos has no triplet|none of the drawn"):
        miner.tuples(0, photos[:0], describe(range(1))[:0])


def test_other_losses_are_not_mined():
    assert make_miner(make_config({}, "here"), LABELS) is None
    assert make_miner(make_config({"loss": "fastap"}, "here"), LABELS) is None
