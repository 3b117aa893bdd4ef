"""The Recall@k surrogate against its formula written down as a loop."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import normalize
from tuple_examples import batches, value_and_gradient

from listwise.errors import InputError
from listwise.losses import RecallAtKLoss, pairs
from listwise.losses.lists import Lists
from listwise.losses.recall_at_k import draw_pairs, with_virtual_examples


def formula(descriptors, labels, weights, ks, temperature, k_temperature):
    """Patel et al., Eq. 5 to 7: the database is the batch without the query."""
    scores = descriptors @ descriptors.T
    return formula_of_scores(scores, labels, weights, ks, temperature, k_temperature)


def formula_of_scores(scores, labels, weights, ks, temperature, k_temperature):
    weights = torch.ones(len(labels)) if weights is None else weights
    above, below = 0.0, 0.0
    for q in range(len(labels)):
        database = [i for i in range(len(labels)) if i != q]
        positives = [i for i in database if labels[i] == labels[q]]
        if not positives:
            continue
        loss = 0.0
        for k in ks:
            recall = 0.0
            for x in positives:
                rank = 1.0
                for z in database:
                    if z != x:
                        rank = rank + 1 / (
                            1 + torch.exp((scores[q, x] - scores[q, z]) / temperature)
                        )
                recall = recall + 1 / (1 + torch.exp((rank - k) / k_temperature))
            loss = loss + (1 - recall / len(positives)) / len(ks)
        above = above + weights[q] * loss
        below = below + weights[q]
    return above / below


@pytest.mark.slow
@given(
    batches(negatives=2),
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.floats(0.02, 1),
    st.floats(0.1, 2),
    st.sampled_from([1, 40, 2**24]),
)
def test_equals_the_formula(batch, ks, temperature, k_temperature, entries):
    raw, labels, weights, _ = batch
    loss = RecallAtKLoss(ks, temperature, k_temperature)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "ENTRIES", entries)
        value, gradient = value_and_gradient(lambda d: loss(d, labels, weights), raw)
    expected, expected_gradient = value_and_gradient(
        lambda d: formula(d, labels, weights, ks, temperature, k_temperature), raw
    )
    assert value == pytest.approx(expected, abs=1e-10)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-8, rtol=1e-8)


def test_small_temperatures_give_the_true_recall():
    """One positive of two is first, the other last among five."""
    angles = torch.tensor([0.0, 0.1, 1.5, 0.5, 0.9, 1.1], dtype=torch.float64)
    descriptors = torch.stack([angles.cos(), angles.sin()], 1)
    labels = torch.tensor([1, 1, 1, 2, 3, 4])
    found = RecallAtKLoss([1, 4, 5], 1e-4, 1e-3)
    weights = torch.tensor([1.0, 0, 0, 0, 0, 0])  # the first query alone
    # Ranks 1 and 5: where rank and k are equal, the sigmoid of zero is a half.
    expected = 1 - ((0.5 + 0) / 2 + (1 + 0) / 2 + (1 + 0.5) / 2) / 3
    assert found(descriptors, labels, weights).item() == pytest.approx(expected, abs=1e-6)


LABELS = torch.tensor([0, 1, 1, 2, 2, 2, 2])


def example():
    torch.manual_seed(0)
    return torch.randn(7, 5, dtype=torch.float64, requires_grad=True)


def test_similarity_mixup_mixes_the_scores():
    """Patel et al., section 3.4: scores of virtual examples are mixtures of scores."""
    raw, weights = example(), torch.linspace(1, 2, 7, dtype=torch.float64)
    descriptors = normalize(raw, dim=1)
    first, second, share = draw_pairs(LABELS, 4)
    assert LABELS[first].equal(LABELS[second])
    assert (first != second).all()
    drawn = {frozenset(pair) for pair in zip(first.tolist(), second.tolist(), strict=True)}
    assert len(drawn) == len(first)
    assert torch.bincount(LABELS[first]).tolist() == [0, 1, 4]  # of 0, 1 and 6 pairs
    assert ((share >= 0) & (share <= 1)).all()

    scores = descriptors @ descriptors.T
    labels = LABELS
    for x, z, a in zip(first, second, share, strict=True):
        row = a * scores[x] + (1 - a) * scores[z]
        own = a * row[x] + (1 - a) * row[z]
        scores = torch.cat([scores, row[None]])
        scores = torch.cat([scores, torch.cat([row, own[None]])[:, None]], 1)
        labels = torch.cat([labels, LABELS[x][None]])
        weights = torch.cat([weights, (a * weights[x] + (1 - a) * weights[z])[None]])
    expected = formula_of_scores(scores, labels, weights, [1, 3], 0.1, 1.0)
    value = RecallAtKLoss([1, 3], 0.1, virtual=4)(descriptors, LABELS, weights[:7])
    torch.testing.assert_close(value, expected, atol=1e-10, rtol=0)
    gradients = [torch.autograd.grad(each, raw, retain_graph=True)[0] for each in (value, expected)]
    torch.testing.assert_close(*gradients, atol=1e-9, rtol=1e-9)


def test_a_large_class_has_as_many_virtual_examples_as_others():
    first, second, _ = draw_pairs(torch.zeros(20_000, dtype=torch.int64), 3)
    assert len({*zip(first.tolist(), second.tolist(), strict=True)}) == 3
    assert first.max() > 10  # not always the first images


def test_shares_with_similarity_mixup_add_up_and_every_batch_draws_its_own():
    descriptors = normalize(example(), dim=1)
    loss = RecallAtKLoss([1, 3], 0.1, virtual=5)
    shares = [loss(descriptors, LABELS, queries=rows) for rows in ((0, 1), (1, 5), (5, 7))]
    torch.testing.assert_close(sum(shares), loss(descriptors, LABELS))
    assert not draw_pairs(LABELS.flip(0), 5)[2].equal(draw_pairs(LABELS, 5)[2])
    references = {"references": descriptors.detach(), "reference_labels": LABELS}
    assert loss(descriptors, LABELS, **references).isfinite()


def test_only_images_with_a_weight_are_mixed_and_their_share_is_the_whole_loss():
    """As with a cross-batch memory, whose images follow those of the batch without a weight."""
    torch.manual_seed(0)
    descriptors = normalize(torch.randn(20, 5, dtype=torch.float64), dim=1)
    labels, weights = torch.arange(20) % 3, (torch.arange(20) < 6).double()
    loss = RecallAtKLoss([1, 3], 0.1, virtual=2)
    shares = [loss(descriptors, labels, weights, queries=rows) for rows in ((0, 2), (2, 6))]
    torch.testing.assert_close(sum(shares), loss(descriptors, labels, weights))
    lists, mixed, first = with_virtual_examples(Lists(descriptors, labels), weights, 2)
    assert len(lists.labels) == len(mixed) == 23  # one pair of each class
    assert first.tolist() == [0, 1, 2]
    with pytest.raises(InputError, match="no query has a positive"):
        loss(descriptors, labels, torch.zeros(20))


def test_shares_of_the_queries_add_up():
    torch.manual_seed(0)
    descriptors = normalize(torch.randn(14, 5, dtype=torch.float64), dim=1)
    labels = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 5, 5, 6])
    loss = RecallAtKLoss([1, 3], 0.1)
    shares = [loss(descriptors, labels, queries=rows) for rows in ((0, 1), (1, 9), (9, 14))]
    assert sum(shares).item() == pytest.approx(loss(descriptors, labels).item(), abs=1e-12)


def test_what_makes_no_sense_is_refused():
    for settings_, says in (
        ({"ks": []}, "ks is empty"),
        ({"ks": [0]}, "ks must be a whole number of at least 1"),
        ({"virtual": -1}, "virtual must be a whole number of at least 0"),
        ({"temperature": 0}, "temperature must be above zero"),
        ({"k_temperature": -math.inf}, "k_temperature must be above zero"),
    ):
        with pytest.raises(InputError, match=says):
            RecallAtKLoss(**settings_)
    with pytest.raises(InputError, match="no query has a positive"):
        RecallAtKLoss()(torch.eye(3), torch.arange(3))
