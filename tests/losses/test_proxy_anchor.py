"""Proxy-Anchor against its formula written down as loops."""

import pytest
import torch
from loss_examples import assert_same
from torch.nn.functional import normalize

from listwise.errors import InputError
from listwise.losses import ProxyAnchorLoss

LABELS = torch.tensor([0, 3, 3, 1, 0, 0, 4])  # no image of the class 2


def formula(descriptors, labels, proxies, margin, scale):
    """Kim et al., Eq. 4."""
    pulled, pushed, present = 0.0, 0.0, 0
    for k, proxy in enumerate(proxies):
        score = [x @ proxy / proxy.norm() for x in descriptors]
        own = [s for s, label in zip(score, labels, strict=True) if label == k]
        others = [s for s, label in zip(score, labels, strict=True) if label != k]
        if own:
            present += 1
            pulled = pulled + torch.log(1 + sum(torch.exp(-scale * (s - margin)) for s in own))
        pushed = pushed + torch.log(1 + sum(torch.exp(scale * (s + margin)) for s in others))
    return pulled / present + pushed / len(proxies)


def make(dim=4, **settings):
    torch.manual_seed(0)
    loss = ProxyAnchorLoss(5, dim, **settings).double()
    return loss, torch.randn(7, 4, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(("margin", "scale"), [(0.1, 32.0), (-0.3, 2.0)])
def test_equals_the_formula(margin, scale):
    loss, raw = make(margin=margin, scale=scale)
    expected = formula(normalize(raw, dim=1), LABELS, loss.proxies, margin, scale)
    assert_same(loss(normalize(raw, dim=1), LABELS), expected, (raw, loss.proxies))


def test_equals_pytorch_metric_learning():
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    loss, raw = make()
    theirs = losses.ProxyAnchorLoss(5, 4).double()
    theirs.proxies.data.copy_(loss.proxies)
    descriptors = normalize(raw, dim=1)
    torch.testing.assert_close(loss(descriptors, LABELS), theirs(descriptors, LABELS))


def test_shorter_descriptors_are_compared_with_shorter_proxies():
    loss, raw = make(dim=6)
    short = ProxyAnchorLoss(5, 4).double()
    short.proxies.data.copy_(loss.proxies[:, :4])
    descriptors = normalize(raw, dim=1)
    torch.testing.assert_close(loss(descriptors, LABELS), short(descriptors, LABELS))


def test_far_and_near_scores_have_finite_gradients():
    loss = ProxyAnchorLoss(2, 3, scale=1000.0)
    descriptors = torch.eye(3)[[0, 0]].requires_grad_()
    value = loss(descriptors, torch.tensor([0, 1]))
    value.backward()
    assert torch.isfinite(value)
    assert descriptors.grad.isfinite().all()


def test_what_makes_no_sense_is_refused():
    loss = ProxyAnchorLoss(3, 2)
    with pytest.raises(InputError, match="labels must be from 0 to 2, but range from 0 to 3"):
        loss(torch.eye(2), torch.tensor([0, 3]))
    with pytest.raises(InputError, match="descriptors have 3 dimensions, proxies 2"):
        loss(torch.eye(3), torch.arange(3))
