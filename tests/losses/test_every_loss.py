"""What holds for every loss: shares of the queries, gradients, and half precision."""

import math
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import normalize

from listwise import losses
from listwise.errors import InputError

LOSSES = {
    "AP": losses.QuantizedAPLoss(),
    "AP with the query": losses.QuantizedAPLoss(include_self=True),
    "tie-aware": losses.TieAwareAPLoss(),
    "tie-aware with the query": losses.TieAwareAPLoss(include_self=True),
    "closed": losses.TieAwareAPLoss(form="closed"),
    "triplet": losses.TripletLoss(0.7),
    "log-exp triplet": losses.TripletLoss(0.7, "log-exp"),
    "contrastive": losses.ContrastiveLoss(1.2, negatives=2),
    "smooth AP": losses.SmoothAPLoss(0.3),
    "recall at k": losses.RecallAtKLoss([1, 3], 0.3),
    "recall at k, mixed": losses.RecallAtKLoss([1, 3], 0.3, virtual=5),
    "InfoNCE": losses.InfoNCELoss(0.3),
    "ROADMAP": losses.RoadmapLoss(0.3),
    "hierarchical": losses.HierarchicalAPLoss(torch.arange(7)[:, None] // torch.tensor([3, 1])),
}
if find_spec("pytorch_metric_learning"):
    LOSSES["multi-similarity"] = losses.MultiSimilarityLoss()
    LOSSES["FastAP"] = losses.FastAPLoss()
NO_POSITIVES = {"multi-similarity", "hierarchical", *(name for name in LOSSES if "query" in name)}
LABELS = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 5, 5, 6])


@pytest.fixture
def raw():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(14, 4, generator=generator, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("name", LOSSES)
def test_shares_of_the_queries_add_up(name, raw):
    loss, weights = LOSSES[name], torch.linspace(0.5, 2, 14, dtype=torch.float64)
    descriptors = normalize(raw, dim=1)
    rows = ((0, 1), (1, 9), (9, 14))  # the first one has no positive
    shares = [loss(descriptors, LABELS, weights, queries=part) for part in rows]
    torch.testing.assert_close(sum(shares), loss(descriptors, LABELS, weights))
    assert shares[0] == 0 or name in NO_POSITIVES


@pytest.mark.parametrize("name", LOSSES)
def test_another_default_dtype_changes_nothing(name, raw):
    single = raw.detach().float().requires_grad_()

    def compute():
        single.grad = None
        value = LOSSES[name](normalize(single, dim=1), LABELS)
        value.backward()
        return value.detach(), single.grad

    expected = compute()
    torch.set_default_dtype(torch.float64)
    try:
        found = compute()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)  # the dtypes too


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_finite_differences(name, raw):
    loss = LOSSES[name]
    assert torch.autograd.gradcheck(
        lambda x: loss(normalize(x, dim=1), LABELS), raw, eps=1e-7, atol=1e-6
    )


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_changes_nothing(name, raw):
    """Also where the backward pass runs outside, as PyTorch recommends."""
    found = []
    for autocast in (False, True):
        given = raw.detach().float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = LOSSES[name](normalize(given, dim=1), LABELS)
        value.backward()
        found.append((value.item(), given.grad))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_is_computed_in_float32(name, raw):
    half = normalize(raw.detach(), dim=1).bfloat16().requires_grad_()
    value = LOSSES[name](half, LABELS)
    value.backward()
    assert value.dtype == torch.float32
    assert half.grad.dtype == torch.bfloat16
    torch.testing.assert_close(value, LOSSES[name](half.float(), LABELS), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - NO_POSITIVES))
def test_a_batch_without_a_positive_is_refused(name):
    for labels, weights in ((torch.arange(14), None), (LABELS, torch.zeros(14))):
        with pytest.raises(InputError, match="no query has a positive"):
            LOSSES[name](torch.eye(14), labels, weights)


@pytest.mark.parametrize(
    ("name", "settings", "argument"),
    [
        *(("QuantizedAPLoss", {"bins": bins}, "bins") for bins in (1, 0, 2.5, True, None)),
        ("TieAwareAPLoss", {"bins": 1}, "bins"),
        ("TieAwareAPLoss", {"form": "exact"}, "form"),
        ("SmoothAPLoss", {"temperature": 0}, "temperature"),
        ("InfoNCELoss", {"temperature": 0}, "temperature"),
        ("RoadmapLoss", {"temperature": 0}, "temperature"),
        ("RoadmapLoss", {"slope": -1}, "slope"),
        ("RoadmapLoss", {"offset": math.nan}, "offset"),
        ("RoadmapLoss", {"calibration": 1.5}, "calibration"),
        ("RecallAtKLoss", {"ks": []}, "ks"),
        ("RecallAtKLoss", {"ks": [0]}, "ks"),
        ("RecallAtKLoss", {"virtual": -1}, "virtual"),
        ("RecallAtKLoss", {"k_temperature": -math.inf}, "k_temperature"),
        *(("ContrastiveLoss", {"margin": margin}, "margin") for margin in (0, math.nan)),
        *(("ContrastiveLoss", {"negatives": count}, "negatives") for count in (0, 1.5)),
        *(("TripletLoss", {"margin": margin}, "margin") for margin in (-1, math.nan)),
        ("TripletLoss", {"form": "hinge"}, "form"),
        *(("MatryoshkaLoss", {"loss": None, "dims": dims}, "dims") for dims in ([], [0])),
        *(("ProxyAnchorLoss", {"dim": 2, "classes": n}, "classes") for n in (0, 1)),
        ("ProxyAnchorLoss", {"classes": 3, "dim": 0}, "dim"),
        ("ProxyAnchorLoss", {"classes": 3, "dim": 2, "scale": 0}, "scale"),
        ("ProxyAnchorLoss", {"classes": 3, "dim": 2, "margin": math.nan}, "margin"),
    ],
)
def test_settings_that_make_no_sense_are_refused(name, settings, argument):
    with pytest.raises(InputError, match=argument):
        getattr(losses, name)(**settings)


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=60))
def test_every_class_weighs_the_same(labels):
    weights = losses.class_balanced_weights(torch.tensor(labels)).numpy()
    assert weights.mean() == pytest.approx(1, rel=1e-5)
    sums = [weights[np.array(labels) == label].sum() for label in set(labels)]
    assert sums == pytest.approx([len(labels) / len(sums)] * len(sums), rel=1e-5)


def test_the_loss_gives_each_class_that_counts_the_same_say():
    generator = torch.Generator().manual_seed(0)
    descriptors = normalize(torch.randn(40, 6, generator=generator, dtype=torch.float64), dim=1)
    labels = torch.tensor([0] * 30 + [1] * 6 + [2] * 3 + [3])  # class 3 has no positive
    loss = losses.QuantizedAPLoss()
    balanced = loss(descriptors, labels, losses.class_balanced_weights(labels))
    one_class_at_a_time = [
        loss(descriptors, labels, (labels == label).double()) for label in (0, 1, 2)
    ]
    assert balanced.item() == pytest.approx(sum(one_class_at_a_time).item() / 3, abs=1e-7)
