"""The triplet loss against its formula written down as a loop, and on awkward input."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize
from tuple_examples import batches, hardest, mean_over_tuples, random_tuples, value_and_gradient

from listwise.errors import InputError
from listwise.losses import TripletLoss


def squared(a, b):
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))


def formula(margin, form):
    def local(query, positive, negative):
        difference = squared(query, positive) - squared(query, negative)
        if form == "margin":
            return torch.clamp(margin + difference, min=0) / 2
        return torch.log(1 + torch.exp(difference))

    return local


@pytest.mark.parametrize("form", ["margin", "log-exp"])
@given(batch=batches(negatives=1), margin=st.floats(0, 2, allow_subnormal=False))
def test_the_loss_of_given_triplets_follows_the_formula(form, batch, margin):
    raw, labels, weights, rng = batch
    tuples = random_tuples(labels, 1, rng)
    loss = TripletLoss(margin, form)
    value, gradient = value_and_gradient(lambda d: loss(d, labels, weights, tuples=tuples), raw)
    expected, expected_gradient = value_and_gradient(
        lambda d: mean_over_tuples(d, tuples.tolist(), weights, formula(margin, form)), raw
    )
    assert value == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("form", ["margin", "log-exp"])
@given(batch=batches(negatives=1))
def test_without_triplets_every_image_is_a_query_with_the_hardest_of_the_batch(form, batch):
    raw, labels, weights, _ = batch
    loss = TripletLoss(form=form)
    value, _ = value_and_gradient(lambda d: loss(d, labels, weights), raw)
    expected, _ = value_and_gradient(
        lambda d: mean_over_tuples(d, hardest(d, labels, 1), weights, formula(0.1, form)), raw
    )
    # Equal images are equally hard, so which is taken, and the gradient, may differ.
    assert value == pytest.approx(expected, abs=1e-9)


@settings(max_examples=20, deadline=None)
@given(batch=batches(negatives=1), data=st.data())
@pytest.mark.parametrize("given_tuples", [False, True])
def test_shares_of_the_queries_add_up(given_tuples, batch, data):
    raw, labels, weights, rng = batch
    tuples = random_tuples(labels, 1, rng) if given_tuples else None
    descriptors = normalize(raw, dim=1)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(labels) - 1), max_size=3)))
    bounds = [0, *cuts, len(labels)]
    loss = TripletLoss()
    shares = [
        loss(descriptors, labels, weights, queries=(start, stop), tuples=tuples)
        for start, stop in pairwise(bounds)
    ]
    whole = loss(descriptors, labels, weights, tuples=tuples)
    assert sum(shares).item() == pytest.approx(whole.item(), abs=1e-12)


@pytest.mark.parametrize("form", ["margin", "log-exp"])
def test_gradients_are_those_of_finite_differences(form):
    torch.manual_seed(1)
    raw = torch.randn(12, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.arange(12) % 3
    loss = TripletLoss(0.7, form)
    assert torch.autograd.gradcheck(lambda x: loss(normalize(x, dim=1), labels), raw)


def test_known_values():
    descriptors = torch.eye(3, dtype=torch.float64)[[0, 1, 2]]
    labels, tuples = torch.tensor([4, 4, 9]), torch.tensor([[0, 1, 2]])
    assert TripletLoss(0.1)(descriptors, labels, tuples=tuples).item() == pytest.approx(0.05)
    value = TripletLoss(form="log-exp")(descriptors, labels, tuples=tuples).item()
    assert value == pytest.approx(math.log(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    torch.manual_seed(0)
    descriptors = normalize(torch.randn(12, 8), dim=1).to(dtype).requires_grad_()
    labels = torch.arange(12) // 3
    value = TripletLoss(1.0)(descriptors, labels)
    assert value.dtype == torch.float32
    value.backward()
    assert descriptors.grad.dtype == dtype
    assert value.item() == TripletLoss(1.0)(descriptors.detach().float(), labels).item()


def test_a_process_without_a_query_has_a_share_of_zero():
    descriptors = torch.eye(6, dtype=torch.float64).requires_grad_()
    labels, tuples = torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([[0, 1, 2], [3, 4, 5]])
    share = TripletLoss()(descriptors, labels, queries=(4, 6), tuples=tuples)
    share.backward()
    assert share.item() == 0
    assert descriptors.grad.eq(0).all()


@pytest.mark.parametrize(
    ("tuples", "reason"),
    [
        ([[0, 1]], r"give \[T, 3\]"),
        ([[0, 1, 2, 3]], r"give \[T, 3\]"),
        ([[0, 2, 3]], "positive of another class"),
        ([[0, 1, 1]], "a negative of its class"),
        ([[0, 1, 4]], "outside of the batch"),
        ([[0, 1, -1]], "outside of the batch"),
        ([[0.0, 1.0, 2.0]], "int64"),
        ([0, 1, 2], "int64"),
    ],
)
def test_impossible_triplets_are_refused(tuples, reason):
    with pytest.raises(InputError, match=reason) as caught:
        TripletLoss()(torch.eye(4), torch.tensor([0, 0, 1, 1]), tuples=torch.tensor(tuples))
    assert "\n" not in str(caught.value)


def test_batches_without_a_triplet_are_refused():
    with pytest.raises(InputError, match="no query has a positive"):
        TripletLoss()(torch.eye(4), torch.arange(4))
    with pytest.raises(InputError, match="one class has 4 of the 4 images of the batch"):
        TripletLoss()(torch.eye(4), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(InputError, match="rows"):
        TripletLoss()(torch.eye(4), torch.arange(4) // 2, queries=(3, 3))


@pytest.mark.parametrize("wrong", [{"margin": -1}, {"margin": math.nan}, {"form": "hinge"}])
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InputError, match="must"):
        TripletLoss(**wrong)
