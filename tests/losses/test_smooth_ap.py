"""Smooth-AP against its formula written down as a loop."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import normalize
from tuple_examples import batches, value_and_gradient

from listwise.errors import InputError
from listwise.losses import SmoothAPLoss, pairs


def formula(descriptors, labels, weights, temperature):
    """Brown et al.: ranks by sigmoids; the query is in its own list."""
    scores = descriptors @ descriptors.T
    weights = torch.ones(len(labels)) if weights is None else weights
    above, below = 0.0, 0.0
    for q in range(len(labels)):
        positives = [i for i in range(len(labels)) if labels[i] == labels[q]]
        if len(positives) == 1:
            continue
        precision = 0.0
        for i in positives:
            ahead = [
                torch.sigmoid((scores[q, j] - scores[q, i]) / temperature) if j != i else 0.0
                for j in range(len(labels))
            ]
            precision = precision + (1 + sum(ahead[j] for j in positives)) / (1 + sum(ahead))
        above = above + weights[q] * (1 - precision / len(positives))
        below = below + weights[q]
    return above / below


@pytest.mark.slow
@given(batches(negatives=2), st.floats(0.01, 1), st.sampled_from([1, 40, 2**24]))
def test_equals_the_formula(batch, temperature, entries):
    raw, labels, weights, _ = batch
    loss = SmoothAPLoss(temperature)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "ENTRIES", entries)
        value, gradient = value_and_gradient(lambda d: loss(d, labels, weights), raw)
    expected, expected_gradient = value_and_gradient(
        lambda d: formula(d, labels, weights, temperature), raw
    )
    assert value == pytest.approx(expected, abs=1e-10)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-8, rtol=1e-8)


def test_equals_pytorch_metric_learning_where_that_is_defined():
    """Rows in the order of classes, and as many classes as images of a class."""
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    torch.manual_seed(0)
    descriptors, labels = normalize(torch.randn(16, 6), dim=1), torch.arange(16) // 4
    expected = losses.SmoothAPLoss(temperature=0.05)(descriptors, labels)
    torch.testing.assert_close(SmoothAPLoss(0.05)(descriptors, labels), expected)


def test_shares_of_the_queries_add_up():
    torch.manual_seed(0)
    descriptors = normalize(torch.randn(14, 5, dtype=torch.float64), dim=1)
    labels = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 5, 5, 6])
    loss = SmoothAPLoss(0.1)
    shares = [loss(descriptors, labels, queries=rows) for rows in ((0, 1), (1, 9), (9, 14))]
    assert sum(shares).item() == pytest.approx(loss(descriptors, labels).item(), abs=1e-12)


def test_gradients_are_those_of_finite_differences():
    torch.manual_seed(1)
    raw = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 1, 0, 2, 2, 2, 1, 0, 3])
    loss = SmoothAPLoss(0.3)
    assert torch.autograd.gradcheck(lambda x: loss(normalize(x, dim=1), labels), raw)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(InputError, match="temperature must be above zero"):
        SmoothAPLoss(0)
    with pytest.raises(InputError, match="no query has a positive"):
        SmoothAPLoss()(torch.eye(4), torch.arange(4))
