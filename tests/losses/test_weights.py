import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from listwise.losses import QuantizedAPLoss, class_balanced_weights


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=60))
def test_every_class_weighs_the_same(labels):
    weights = class_balanced_weights(torch.tensor(labels)).numpy()
    assert weights.mean() == pytest.approx(1, rel=1e-5)
    sums = [weights[np.array(labels) == label].sum() for label in set(labels)]
    assert sums == pytest.approx([len(labels) / len(sums)] * len(sums), rel=1e-5)


def test_the_loss_gives_each_class_that_counts_the_same_say():
    generator = torch.Generator().manual_seed(0)
    descriptors = torch.nn.functional.normalize(
        torch.randn(40, 6, generator=generator, dtype=torch.float64), dim=1
    )
    labels = torch.tensor([0] * 30 + [1] * 6 + [2] * 3 + [3])  # class 3 has no positive
    loss = QuantizedAPLoss()
    balanced = loss(descriptors, labels, class_balanced_weights(labels))
    one_class_at_a_time = [
        loss(descriptors, labels, (labels == label).double()) for label in (0, 1, 2)
    ]
    assert balanced.item() == pytest.approx(sum(one_class_at_a_time).item() / 3, abs=1e-7)


def test_labels_must_be_integers():
    with pytest.raises(ValueError, match="integers"):
        class_balanced_weights(torch.ones(3))
