"""InfoNCE against its formula written down as a loop."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import normalize
from tuple_examples import batches, value_and_gradient

from listwise.errors import InputError
from listwise.losses import InfoNCELoss, infonce


def formula(descriptors, labels, weights, temperature):
    scores = descriptors @ descriptors.T
    weights = torch.ones(len(labels)) if weights is None else weights
    above, below = 0.0, 0.0
    for q in range(len(labels)):
        positives = [i for i in range(len(labels)) if labels[i] == labels[q] and i != q]
        negatives = [i for i in range(len(labels)) if labels[i] != labels[q]]
        if not positives:
            continue
        loss = 0.0
        for p in positives:
            score = torch.exp(scores[q, p] / temperature)
            others = sum(torch.exp(scores[q, n] / temperature) for n in negatives)
            loss = loss - torch.log(score / (score + others)) / len(positives)
        above = above + weights[q] * loss
        below = below + weights[q]
    return above / below


@pytest.mark.slow
@given(batches(negatives=2), st.floats(0.02, 1), st.sampled_from([1, 40, 2**24]))
def test_equals_the_formula(batch, temperature, entries):
    raw, labels, weights, _ = batch
    loss = InfoNCELoss(temperature)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(infonce, "_ENTRIES", entries)
        value, gradient = value_and_gradient(lambda d: loss(d, labels, weights), raw)
    expected, expected_gradient = value_and_gradient(
        lambda d: formula(d, labels, weights, temperature), raw
    )
    assert value == pytest.approx(expected, abs=1e-9)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-8, rtol=1e-8)


def test_equals_pytorch_metric_learning():
    """Theirs is the mean over pairs; with classes of one size also the mean over queries."""
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    torch.manual_seed(0)
    descriptors, labels = normalize(torch.randn(24, 6), dim=1), torch.arange(24) % 8
    expected = losses.NTXentLoss(temperature=0.1)(descriptors, labels)
    torch.testing.assert_close(InfoNCELoss(0.1)(descriptors, labels), expected)


def test_one_class_alone_has_no_loss_and_no_gradient():
    descriptors = normalize(torch.randn(4, 3), dim=1).requires_grad_()
    value = InfoNCELoss()(descriptors, torch.zeros(4, dtype=torch.long))
    value.backward()
    assert value == 0
    assert (descriptors.grad == 0).all()


def test_shares_of_the_queries_add_up():
    torch.manual_seed(0)
    descriptors = normalize(torch.randn(14, 5, dtype=torch.float64), dim=1)
    labels = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 5, 5, 6])
    loss = InfoNCELoss(0.1)
    shares = [loss(descriptors, labels, queries=rows) for rows in ((0, 1), (1, 9), (9, 14))]
    assert sum(shares).item() == pytest.approx(loss(descriptors, labels).item(), abs=1e-12)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(InputError, match="temperature must be above zero"):
        InfoNCELoss(0)
    with pytest.raises(InputError, match="no query has a positive"):
        InfoNCELoss()(torch.eye(3), torch.arange(3))
