"""The losses of pytorch-metric-learning against their papers' formulas, called our way."""

import sys

import pytest
import torch
from hypothesis import given
from torch.nn.functional import normalize
from tuple_examples import batches, value_and_gradient

from listwise.errors import InputError
from listwise.losses import FastAPLoss, MultiSimilarityLoss

pytest.importorskip("pytorch_metric_learning")


def fast_ap(descriptors, labels, bins=10):
    """Cakir et al.: for each image with a positive, None for the others."""
    values = []
    delta = 4 / bins
    for q in range(len(labels)):
        others = [i for i in range(len(labels)) if i != q]
        positives = [i for i in others if labels[i] == labels[q]]
        total, positive_above, all_above = 0.0, 0.0, 0.0
        for edge in range(bins + 1):
            pulse = {
                i: torch.clamp(
                    1
                    - ((descriptors[q] - descriptors[i]).square().sum() - edge * delta).abs()
                    / delta,
                    min=0,
                )
                for i in others
            }
            in_bin = sum(pulse[i] for i in positives)
            positive_above = positive_above + in_bin
            all_above = all_above + sum(pulse.values())
            if positives and in_bin > 0:
                total = total + in_bin * positive_above / all_above
        values.append(1 - total / len(positives) if positives else None)
    return values


def multi_similarity(descriptors, labels, alpha=2, beta=50, base=0.5):
    """Wang et al., for each image."""
    values = []
    for q in range(len(labels)):
        positive = negative = torch.zeros((), dtype=torch.float64)
        for i in range(len(labels)):
            score = descriptors[q] @ descriptors[i]
            if i != q and labels[i] == labels[q]:
                positive = positive + torch.exp(-alpha * (score - base))
            elif labels[i] != labels[q]:
                negative = negative + torch.exp(beta * (score - base))
        values.append(torch.log1p(positive) / alpha + torch.log1p(negative) / beta)
    return values


def weighted_mean(values, weights):
    weights = torch.ones(len(values)) if weights is None else weights
    counted = [i for i, value in enumerate(values) if value is not None]
    return sum(weights[i] * values[i] for i in counted) / sum(weights[i] for i in counted)


CASES = {"fastap": (FastAPLoss, fast_ap), "multi": (MultiSimilarityLoss, multi_similarity)}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@given(batch=batches(negatives=2))
def test_equals_the_formula(name, batch):
    raw, labels, weights, _ = batch
    make, formula = CASES[name]
    loss = make()
    value, _ = value_and_gradient(lambda d: loss(d, labels, weights), raw)
    expected, _ = value_and_gradient(lambda d: weighted_mean(formula(d, labels), weights), raw)
    assert value == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_finite_differences(name):
    torch.manual_seed(1)
    raw = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    labels, loss = torch.arange(9) % 3, CASES[name][0]()
    assert torch.autograd.gradcheck(lambda x: loss(normalize(x, dim=1), labels), raw)


@pytest.mark.parametrize("name", CASES)
def test_shares_of_the_queries_add_up(name):
    torch.manual_seed(0)
    descriptors = normalize(torch.randn(14, 5, dtype=torch.float64), dim=1)
    labels = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 5, 5, 6])
    weights = torch.rand(14)
    loss = CASES[name][0]()
    rows = ((0, 1), (1, 9), (9, 14))
    shares = [loss(descriptors, labels, weights, queries=row) for row in rows]
    assert sum(shares).item() == pytest.approx(loss(descriptors, labels, weights).item())


@pytest.mark.parametrize("name", CASES)
def test_half_precision_is_computed_in_float32(name):
    descriptors = normalize(torch.randn(12, 8), dim=1).bfloat16().requires_grad_()
    value = CASES[name][0]()(descriptors, torch.arange(12) // 3)
    value.backward()
    assert value.dtype == torch.float32
    assert descriptors.grad.isfinite().all()


def test_batches_without_a_positive_are_refused():
    with pytest.raises(InputError, match="no query has a positive"):
        FastAPLoss()(torch.eye(4), torch.arange(4))
    with pytest.raises(InputError, match="weight of zero"):
        FastAPLoss()(torch.eye(4), torch.arange(4) // 2, torch.zeros(4))


@pytest.mark.parametrize("name", CASES)
def test_without_the_library_it_is_one_line(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning", None)
    with pytest.raises(InputError, match=r"pip install 'listwise\[compare\]'") as caught:
        CASES[name][0]()
    assert "\n" not in str(caught.value)
