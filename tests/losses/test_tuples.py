"""The losses of tuples against their formulas written down as loops, and on awkward input."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_examples import (
    assert_equal,
    batches,
    hardest,
    mean_over_tuples,
    random_tuples,
    value_and_gradient,
)

from listwise.errors import InputError
from listwise.losses import ContrastiveLoss, TripletLoss


def difference(query, positive, negative):
    return ((query - positive) ** 2).sum() - ((query - negative) ** 2).sum()


def triplet(margin, *rows):
    return torch.clamp(margin + difference(*rows), min=0) / 2


def log_exp(margin, *rows):
    return torch.log(1 + torch.exp(difference(*rows)))


def contrastive(margin, query, positive, *negatives):
    # The norm has a slope of zero at zero.
    total = torch.linalg.vector_norm(query - positive) ** 2 / 2
    for negative in negatives:
        apart = torch.linalg.vector_norm(query - negative)
        total = total + torch.clamp(margin - apart, min=0) ** 2 / 2
    return total


LOSSES = {
    "margin": (TripletLoss, triplet, 1),
    "log-exp": (partial(TripletLoss, form="log-exp"), log_exp, 1),
    "contrastive": (partial(ContrastiveLoss, negatives=3), contrastive, 3),
}


@pytest.mark.parametrize("name", LOSSES)
@given(data=st.data(), margin=st.floats(0.05, 2))
def test_the_loss_of_given_tuples_follows_the_formula(name, data, margin):
    make, formula, negatives = LOSSES[name]
    raw, labels, weights, rng = data.draw(batches(negatives))
    tuples = random_tuples(labels, negatives, rng)
    assert_equal(
        lambda d: make(margin)(d, labels, weights, tuples=tuples),
        lambda d: mean_over_tuples(d, tuples.tolist(), weights, partial(formula, margin)),
        raw,
    )


@pytest.mark.parametrize("name", LOSSES)
@given(data=st.data())
def test_without_tuples_every_image_is_a_query_with_the_hardest_of_the_batch(name, data):
    make, formula, negatives = LOSSES[name]
    raw, labels, weights, _ = data.draw(batches(negatives))
    local = partial(formula, 0.4)
    value, _ = value_and_gradient(lambda d: make(0.4)(d, labels, weights), raw)
    expected, _ = value_and_gradient(
        lambda d: mean_over_tuples(d, hardest(d, labels, negatives), weights, local), raw
    )
    # Equal images are equally hard, so which is taken, and the gradient, may differ.
    assert value == pytest.approx(expected, abs=1e-7 if name == "contrastive" else 1e-9)


def test_known_values():
    descriptors = torch.eye(3, dtype=torch.float64)[[0, 1, 2]]
    labels, tuples = torch.tensor([4, 4, 9]), torch.tensor([[0, 1, 2]])
    assert TripletLoss(0.1)(descriptors, labels, tuples=tuples).item() == pytest.approx(0.05)
    value = TripletLoss(form="log-exp")(descriptors, labels, tuples=tuples).item()
    assert value == pytest.approx(math.log(2))


def test_a_process_without_a_query_has_a_share_of_zero():
    descriptors = torch.eye(6, dtype=torch.float64).requires_grad_()
    labels, tuples = torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([[0, 1, 2], [3, 4, 5]])
    share = TripletLoss()(descriptors, labels, queries=(4, 6), tuples=tuples)
    share.backward()
    assert share.item() == 0
    assert descriptors.grad.eq(0).all()


def test_equal_images_of_two_classes_give_a_number_and_no_slope():
    descriptors = torch.eye(4)[[0, 0, 0, 0]].requires_grad_()
    value = ContrastiveLoss(0.5, negatives=2)(descriptors, torch.tensor([0, 0, 1, 1]))
    value.backward()
    assert value.item() == pytest.approx(0.25)
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


def test_a_batch_with_too_few_other_images_is_refused():
    for loss, labels, reason in (
        (TripletLoss(), torch.zeros(5, dtype=torch.int64), "one class has 5 of the 5 images"),
        (ContrastiveLoss(), torch.tensor([0, 0, 0, 1, 1]), "needs 5 images of other classes"),
    ):
        with pytest.raises(InputError, match=reason):
            loss(torch.eye(5), labels)
