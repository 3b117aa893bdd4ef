"""Batches for the losses of tuples, and a mean over tuples written down plainly."""

import numpy as np
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


def value_and_gradient(function, raw):
    raw = raw.clone().requires_grad_()
    value = function(normalize(raw, dim=1))
    value.backward()
    return value.item(), raw.grad
