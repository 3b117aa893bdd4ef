"""The similarity mixup of the Recall@k surrogate; its formula is in `test_formulas.py`."""

import pytest
import torch
from loss_examples import mean_over_queries
from test_formulas import recall_at_k
from torch.nn.functional import normalize

from listwise.errors import InputError
from listwise.losses import RecallAtKLoss
from listwise.losses.lists import Lists
from listwise.losses.smooth_ranks import draw_pairs, with_virtual_examples

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
    expected = mean_over_queries(scores, labels, weights, recall_at_k, ([1, 3], 0.1, 1.0))
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
    ranked, mixed, first = with_virtual_examples(Lists(descriptors, labels), weights, 2)
    assert len(ranked.labels) == len(mixed) == 23  # one pair of each class
    assert first.tolist() == [0, 1, 2]
    with pytest.raises(InputError, match="no query has a positive"):
        loss(descriptors, labels, torch.zeros(20))
