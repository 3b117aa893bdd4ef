"""The contrastive loss against its formula written down as a loop."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import normalize
from tuple_examples import batches, hardest, mean_over_tuples, random_tuples, value_and_gradient

from listwise.errors import InputError
from listwise.losses import ContrastiveLoss


def formula(margin):
    def distance(a, b):
        return torch.linalg.vector_norm(a - b)  # with a slope of zero at zero

    def local(query, positive, *negatives):
        total = distance(query, positive) ** 2 / 2
        for negative in negatives:
            total = total + torch.clamp(margin - distance(query, negative), min=0) ** 2 / 2
        return total

    return local


@given(batch=batches(negatives=3), margin=st.floats(0.05, 2))
def test_the_loss_of_given_tuples_follows_the_formula(batch, margin):
    raw, labels, weights, rng = batch
    tuples = random_tuples(labels, 3, rng)
    loss = ContrastiveLoss(margin, negatives=3)
    value, gradient = value_and_gradient(lambda d: loss(d, labels, weights, tuples=tuples), raw)
    expected, expected_gradient = value_and_gradient(
        lambda d: mean_over_tuples(d, tuples.tolist(), weights, formula(margin)), raw
    )
    assert value == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-9, rtol=1e-9)


@given(batch=batches(negatives=3))
def test_without_tuples_every_image_is_a_query_with_the_hardest_of_the_batch(batch):
    raw, labels, weights, _ = batch
    loss = ContrastiveLoss(negatives=3)
    value, _ = value_and_gradient(lambda d: loss(d, labels, weights), raw)
    expected, _ = value_and_gradient(
        lambda d: mean_over_tuples(d, hardest(d, labels, 3), weights, formula(0.85)), raw
    )
    assert value == pytest.approx(expected, abs=1e-7)


def test_shares_of_the_queries_add_up():
    torch.manual_seed(0)
    descriptors = normalize(torch.randn(20, 5, dtype=torch.float64), dim=1)
    labels = torch.arange(20) % 4
    loss = ContrastiveLoss()
    shares = [loss(descriptors, labels, queries=rows) for rows in ((0, 1), (1, 13), (13, 20))]
    assert sum(shares).item() == pytest.approx(loss(descriptors, labels).item(), abs=1e-12)


def test_gradients_are_those_of_finite_differences():
    torch.manual_seed(1)
    raw = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.arange(12) % 3
    loss = ContrastiveLoss(1.2, negatives=2)
    assert torch.autograd.gradcheck(lambda x: loss(normalize(x, dim=1), labels), raw)


def test_equal_images_of_two_classes_give_a_number_and_no_slope():
    descriptors = torch.eye(4)[[0, 0, 0, 0]].requires_grad_()
    value = ContrastiveLoss(0.5, negatives=2)(descriptors, torch.tensor([0, 0, 1, 1]))
    value.backward()
    assert value.item() == pytest.approx(0.25)
    assert descriptors.grad.eq(0).all()


def test_a_batch_with_too_few_other_images_is_refused():
    labels = torch.tensor([0, 0, 0, 1, 1])
    with pytest.raises(InputError, match="needs 5 images of other classes"):
        ContrastiveLoss()(torch.eye(5), labels)


@pytest.mark.parametrize(
    "wrong", [{"margin": 0}, {"margin": math.nan}, {"negatives": 0}, {"negatives": 1.5}]
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InputError, match="must"):
        ContrastiveLoss(**wrong)
