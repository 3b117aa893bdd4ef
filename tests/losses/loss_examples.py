"""Batches for the losses, and means over queries and tuples written down plainly."""

import math

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch.nn.functional import normalize


@st.composite
def batches(draw, negatives):
    """Raw descriptors, labels and weights; every query has enough images of other classes."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.integers(negatives + 3, 16))
    raw = rng.normal(size=(size, draw(st.integers(2, 6))))
    labels = rng.integers(0, draw(st.integers(2, 6)), size)
    labels[: size - negatives] %= 3
    labels[size - negatives :] = 7 + np.arange(negatives)  # classes of one image
    labels[:2] = 0
    if draw(st.booleans()):  # equal images, some of other classes
        raw[size // 2 :] = raw[: size - size // 2]
    weights = torch.tensor(rng.uniform(0.1, 3, size)) if draw(st.booleans()) else None
    return torch.tensor(raw, dtype=torch.float64), torch.tensor(labels), weights, rng


def random_tuples(labels, negatives, rng):
    """Possible tuples [T, 2 + N], queries more than once."""
    rows = []
    for _ in range(7):
        query = rng.choice([i for i in range(len(labels)) if (labels == labels[i]).sum() > 1])
        same = np.flatnonzero((labels == labels[query]).numpy())
        others = np.flatnonzero((labels != labels[query]).numpy())
        positive = rng.choice(same[same != query])
        rows.append([query, positive, *rng.choice(others, negatives)])
    return torch.tensor(np.array(rows))


def hardest(descriptors, labels, negatives):
    """For each image with a positive: itself, the farthest positive, the nearest negatives."""
    rows = []
    for query in range(len(labels)):
        distance = [torch.dist(descriptors[query], other).item() for other in descriptors]
        same = [i for i in range(len(labels)) if i != query and labels[i] == labels[query]]
        others = [i for i in range(len(labels)) if labels[i] != labels[query]]
        if same:
            nearest = sorted(others, key=lambda i: distance[i])[:negatives]
            rows.append([query, max(same, key=lambda i: distance[i]), *nearest])
    return rows


def mean_over_tuples(descriptors, rows, weights, local_loss):
    """Σ w ℓ / Σ w with ℓ from the descriptors of a tuple."""
    weights = torch.ones(len(descriptors)) if weights is None else weights
    total = sum(weights[row[0]] * local_loss(*(descriptors[i] for i in row)) for row in rows)
    return total / sum(weights[row[0]] for row in rows)


def mean_over_queries(scores, labels, weights, loss, settings=(), alone=False, ranked=None):
    """Σ w ℓ / Σ w over the queries with a positive, or also those `alone`.

    ℓ is a function of a query's scores, a list with itself, its positives and its negatives. With
    the labels of images that are `ranked` instead of the batch, no query is in its list.
    """
    weights = torch.ones(len(labels)) if weights is None else weights
    above, below, others = 0.0, 0.0, labels if ranked is None else ranked
    for q, (row, label) in enumerate(zip(scores, labels, strict=True)):
        own = [q] if ranked is None else []
        images = [i for i in range(len(others)) if i not in own]
        positives = [i for i in images if others[i] == label]
        negatives = [i for i in images if others[i] != label]
        if positives or alone:
            above = above + weights[q] * loss(row, own, positives, negatives, *settings)
            below = below + weights[q]
    return above / below


def step(t, tau, rho, delta):
    """Ramzi et al., Eq. 4."""
    if t < 0:
        return 1 / (1 + torch.exp(-t / tau))
    if t <= delta:
        return 1 / (1 + torch.exp(-t / tau)) + 0.5
    return rho * (t - delta) + 1 / (1 + math.exp(-delta / tau)) + 0.5


def assert_equal(function, formula, raw, atol=1e-10, slope=1e-8):
    """A loss has the value and the gradient of a formula; both take normalized descriptors."""
    value, gradient = value_and_gradient(function, raw)
    expected, expected_gradient = value_and_gradient(formula, raw)
    assert value == pytest.approx(expected, abs=atol)
    torch.testing.assert_close(gradient, expected_gradient, atol=slope, rtol=slope)


def value_and_gradient(function, raw):
    raw = raw.clone().requires_grad_()
    value = function(normalize(raw, dim=1))
    value.backward()
    return value.item(), raw.grad


def assert_same(value, expected, inputs):
    """Two losses have the same value and the same gradients."""
    torch.testing.assert_close(value, expected, atol=1e-10, rtol=0)
    actual = torch.autograd.grad(value, inputs, retain_graph=True)
    for a, b in zip(actual, torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)
