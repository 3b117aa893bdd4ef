"""ROADMAP against its formulas written down as loops."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn.functional import normalize
from tuple_examples import batches, value_and_gradient

from listwise.errors import InputError
from listwise.losses import RoadmapLoss, pairs


def step(t, tau, rho, delta):
    """Ramzi et al., Eq. 4."""
    if t < 0:
        return 1 / (1 + torch.exp(-t / tau))
    if t <= delta:
        return 1 / (1 + torch.exp(-t / tau)) + 0.5
    return rho * (t - delta) + 1 / (1 + math.exp(-delta / tau)) + 0.5


def formula(descriptors, labels, weights, tau, rho, delta, share, alpha, beta):
    """Ramzi et al., Eq. 3 to 7: the database is the batch without the query."""
    scores = descriptors @ descriptors.T
    weights = torch.ones(len(labels)) if weights is None else weights
    above, below = 0.0, 0.0
    for q, s in enumerate(scores):
        positives = [i for i in range(len(labels)) if i != q and labels[i] == labels[q]]
        negatives = [i for i in range(len(labels)) if labels[i] != labels[q]]
        if not positives:
            continue
        precision, near, far = 0.0, 0.0, 0.0
        for k in positives:
            better = 1 + sum(1 for j in positives if s[j] > s[k])
            worse = sum(step(s[j] - s[k], tau, rho, delta) for j in negatives)
            precision = precision + better / (better + worse) / len(positives)
            near = near + torch.relu(alpha - s[k]) / len(positives)
        for j in negatives:
            far = far + torch.relu(s[j] - beta) / len(negatives)
        above = above + weights[q] * ((1 - share) * (1 - precision) + share * (near + far))
        below = below + weights[q]
    return above / below


def smooth(descriptors, delta, alpha, beta):
    """Whether no score or difference of scores is where the loss has two slopes."""
    scores = descriptors @ descriptors.T
    gaps = (scores[:, :, None] - scores[:, None]).masked_fill(torch.eye(len(scores)) > 0, 9)
    kinks = [gaps, gaps - delta, scores - alpha, scores - beta]
    return all(bool((values.abs() > 1e-9).all()) for values in kinks)


@pytest.mark.slow
@given(
    batches(negatives=2),
    st.floats(0.05, 1),
    st.floats(0, 20),
    st.floats(0, 0.3),
    st.floats(0, 1),
    st.floats(-1, 1),
    st.floats(-1, 1),
    st.sampled_from([1, 40, 2**24]),
)
def test_equals_the_formula(batch, tau, rho, delta, share, alpha, beta, entries):
    raw, labels, weights, _ = batch
    assume(smooth(normalize(raw, dim=1), delta, alpha, beta))
    loss = RoadmapLoss(tau, rho, delta, share, alpha, beta)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "ENTRIES", entries)
        value, gradient = value_and_gradient(lambda d: loss(d, labels, weights), raw)
    expected, expected_gradient = value_and_gradient(
        lambda d: formula(d, labels, weights, tau, rho, delta, share, alpha, beta), raw
    )
    assert value == pytest.approx(expected, abs=1e-10)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-8, rtol=1e-8)


def test_it_is_an_upper_bound_of_the_true_loss():
    torch.manual_seed(1)
    descriptors = normalize(torch.randn(24, 6, dtype=torch.float64), dim=1)
    labels = torch.arange(24) // 4
    scores = descriptors @ descriptors.T
    true = 0.0
    for q in range(24):
        order = [i for i in scores[q].argsort(descending=True).tolist() if i != q]
        ranks = [place for place, i in enumerate(order, 1) if labels[i] == labels[q]]
        true += 1 - sum((n + 1) / rank for n, rank in enumerate(ranks)) / 3
    assert RoadmapLoss(calibration=0)(descriptors, labels).item() >= true / 24


def test_shares_of_the_queries_add_up():
    torch.manual_seed(0)
    descriptors = normalize(torch.randn(14, 5, dtype=torch.float64), dim=1)
    labels = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 5, 5, 6])
    loss = RoadmapLoss(0.1)
    shares = [loss(descriptors, labels, queries=rows) for rows in ((0, 1), (1, 9), (9, 14))]
    assert sum(shares).item() == pytest.approx(loss(descriptors, labels).item(), abs=1e-12)


def test_what_makes_no_sense_is_refused():
    for settings_, says in (
        ({"temperature": 0}, "temperature must be above zero"),
        ({"slope": -1}, "slope must be at least zero"),
        ({"offset": math.nan}, "offset must be at least zero"),
        ({"calibration": 1.5}, "calibration must be from 0 to 1"),
    ):
        with pytest.raises(InputError, match=says):
            RoadmapLoss(**settings_)
    with pytest.raises(InputError, match="no query has a positive"):
        RoadmapLoss()(torch.eye(3), torch.arange(3))
