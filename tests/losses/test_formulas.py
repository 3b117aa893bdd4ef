"""Losses against the formulas of their papers, written down as loops."""

import math
import sys

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from loss_examples import assert_equal, batches, mean_over_queries, step, value_and_gradient
from torch.nn.functional import normalize

from listwise import losses
from listwise.errors import InputError
from listwise.losses import lists


def info_nce(s, own, positives, negatives, temperature):
    others = sum(torch.exp(s[n] / temperature) for n in negatives)
    found = [torch.exp(s[p] / temperature) for p in positives]
    return -sum(torch.log(each / (each + others)) for each in found) / len(positives)


def smooth_ap(s, own, positives, negatives, temperature):
    """Brown et al.: ranks by sigmoids; the query is in its own list."""
    relevant, precision = own + positives, 0.0
    for i in relevant:
        ahead = {j: torch.sigmoid((s[j] - s[i]) / temperature) for j in relevant + negatives}
        ahead[i] = 1.0
        precision = precision + sum(ahead[j] for j in relevant) / sum(ahead.values())
    return 1 - precision / len(relevant)


def recall_at_k(s, own, positives, negatives, ks, temperature, k_temperature):
    """Patel et al., Eq. 5 to 7: the database is the batch without the query."""
    recall = 0.0
    for x in positives:
        others = [z for z in positives + negatives if z != x]
        rank = 1 + sum(1 / (1 + torch.exp((s[x] - s[z]) / temperature)) for z in others)
        recall = recall + sum(1 / (1 + torch.exp((rank - k) / k_temperature)) for k in ks)
    return 1 - recall / len(positives) / len(ks)


def roadmap(s, own, positives, negatives, tau, rho, delta, share, alpha, beta):
    """Ramzi et al., Eq. 3 to 7: the database is the batch without the query."""
    precision = 0.0
    for k in positives:
        better = 1 + sum(1 for j in positives if s[j] > s[k])
        worse = sum(step(s[j] - s[k], tau, rho, delta) for j in negatives)
        precision = precision + better / (better + worse) / len(positives)
    near = sum(torch.relu(alpha - s[k]) for k in positives) / len(positives)
    far = sum(torch.relu(s[j] - beta) for j in negatives) / len(negatives)
    return (1 - share) * (1 - precision) + share * (near + far)


def smooth(descriptors, delta, alpha, beta):
    """Whether no score or difference of scores is where the loss of ROADMAP has two slopes."""
    scores = descriptors @ descriptors.T
    gaps = (scores[:, :, None] - scores[:, None]).masked_fill(torch.eye(len(scores)) > 0, 9)
    kinks = [gaps, gaps - delta, scores - alpha, scores - beta]
    return all(bool((values.abs() > 1e-9).all()) for values in kinks)


SHARES = st.floats(0, 1)
CASES = {
    "InfoNCE": (losses.InfoNCELoss, info_nce, [st.floats(0.02, 1)]),
    "Smooth-AP": (losses.SmoothAPLoss, smooth_ap, [st.floats(0.01, 1)]),
    "Recall@k": (
        losses.RecallAtKLoss,
        recall_at_k,
        [
            st.lists(st.integers(1, 9), min_size=1, max_size=3),
            st.floats(0.02, 1),
            st.floats(0.1, 2),
        ],
    ),
    "ROADMAP": (
        losses.RoadmapLoss,
        roadmap,
        [st.floats(0.05, 1), st.floats(0, 20), st.floats(0, 0.3), SHARES, *[st.floats(-1, 1)] * 2],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@given(data=st.data(), batch=batches(negatives=2), entries=st.sampled_from([1, 40, 2**24]))
def test_equals_the_formula(name, data, batch, entries):
    make, formula, strategies = CASES[name]
    settings = data.draw(st.tuples(*strategies))
    raw, labels, weights, _ = batch
    if name == "ROADMAP":
        _, _, delta, _, alpha, beta = settings
        assume(smooth(normalize(raw, dim=1), delta, alpha, beta))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lists, "ENTRIES", entries)
        assert_equal(
            lambda d: make(*settings)(d, labels, weights),
            lambda d: mean_over_queries(d @ d.T, labels, weights, formula, settings),
            raw,
            atol=1e-9 if name == "InfoNCE" else 1e-10,
        )


def fast_ap(s, own, positives, negatives, bins=10):
    """Cakir et al."""
    total, positive_above, all_above, delta = 0.0, 0.0, 0.0, 4 / bins
    for edge in range(bins + 1):
        pulse = torch.clamp(1 - (2 - 2 * s - edge * delta).abs() / delta, min=0)
        in_bin = sum(pulse[i] for i in positives)
        positive_above = positive_above + in_bin
        all_above = all_above + sum(pulse[i] for i in positives + negatives)
        if in_bin > 0:
            total = total + in_bin * positive_above / all_above
    return 1 - total / len(positives)


def multi_similarity(s, own, positives, negatives, alpha=2, beta=50, base=0.5):
    """Wang et al.; it counts queries without a positive too."""
    positive = sum((torch.exp(-alpha * (s[i] - base)) for i in positives), torch.zeros(()))
    negative = sum(torch.exp(beta * (s[i] - base)) for i in negatives)
    return torch.log1p(positive) / alpha + torch.log1p(negative) / beta


LIBRARY = {
    "fastap": (losses.FastAPLoss, fast_ap),
    "multi": (losses.MultiSimilarityLoss, multi_similarity),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARY)
@given(batch=batches(negatives=2))
def test_losses_of_pytorch_metric_learning_equal_the_formula(name, batch):
    pytest.importorskip("pytorch_metric_learning")
    raw, labels, weights, _ = batch
    make, formula = LIBRARY[name]
    alone = name == "multi"
    value, _ = value_and_gradient(lambda d: make()(d, labels, weights), raw)
    expected, _ = value_and_gradient(
        lambda d: mean_over_queries(d @ d.T, labels, weights, formula, alone=alone), raw
    )
    assert value == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", LIBRARY)
def test_without_pytorch_metric_learning_it_is_one_line(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning", None)
    with pytest.raises(InputError, match=r"pip install 'listwise\[compare\]'") as caught:
        LIBRARY[name][0]()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("ours", "theirs", "labels"),
    [
        # Theirs is the mean over pairs; with classes of one size also the mean over queries.
        (losses.InfoNCELoss(0.1), "NTXentLoss", torch.arange(24) % 8),
        # Rows in the order of classes, and as many classes as images of a class.
        (losses.SmoothAPLoss(0.1), "SmoothAPLoss", torch.arange(16) // 4),
    ],
)
def test_equals_pytorch_metric_learning_where_both_are_defined(ours, theirs, labels):
    library = pytest.importorskip("pytorch_metric_learning.losses")
    torch.manual_seed(0)
    descriptors = normalize(torch.randn(len(labels), 6), dim=1)
    expected = getattr(library, theirs)(temperature=0.1)(descriptors, labels)
    torch.testing.assert_close(ours(descriptors, labels), expected)


def test_infonce_of_one_class_alone_has_no_loss_and_no_gradient():
    descriptors = normalize(torch.randn(4, 3), dim=1).requires_grad_()
    value = losses.InfoNCELoss()(descriptors, torch.zeros(4, dtype=torch.long))
    value.backward()
    assert value == 0
    assert (descriptors.grad == 0).all()


def test_roadmap_is_an_upper_bound_of_the_true_loss():
    torch.manual_seed(1)
    descriptors = normalize(torch.randn(24, 6, dtype=torch.float64), dim=1)
    labels = torch.arange(24) // 4
    true = 0.0
    for q, scores in enumerate(descriptors @ descriptors.T):
        order = [i for i in scores.argsort(descending=True).tolist() if i != q]
        ranks = [place for place, i in enumerate(order, 1) if labels[i] == labels[q]]
        true += 1 - sum((n + 1) / rank for n, rank in enumerate(ranks)) / 3
    bound = losses.RoadmapLoss(calibration=0)(descriptors, labels).item()
    assert bound >= true / 24
    assert math.isfinite(bound)
