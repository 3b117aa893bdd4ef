import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_net import TINY_NET

from listwise.descriptors.scales import describe_scales, power_mean
from listwise.models import RetrievalNet
from listwise.models.embed import PhotoNet


def plain_power_mean(descriptors, power):
    """For each dimension the mean of signed powers, its signed root; then L2. In float64."""
    result = np.zeros(descriptors.shape[1:])
    for row in range(result.shape[0]):
        for column in range(result.shape[1]):
            total = 0.0
            for value in descriptors[:, row, column]:
                total += math.copysign(abs(value) ** power, value)
            mean = total / len(descriptors)
            result[row, column] = math.copysign(abs(mean) ** (1 / power), mean)
    return result / np.linalg.norm(result, axis=1, keepdims=True)


@settings(deadline=None)
@given(st.integers(1, 4), st.floats(0.5, 6), st.integers(0, 99), st.booleans())
def test_the_signed_power_mean(scales, power, seed, positive):
    values = np.random.default_rng(seed).standard_normal((scales, 3, 7))
    values = np.abs(values) if positive else values
    values /= np.linalg.norm(values, axis=2, keepdims=True)
    found = power_mean(torch.from_numpy(values), power).numpy()
    np.testing.assert_allclose(found, plain_power_mean(values, power), rtol=0, atol=1e-9)


def test_tiny_values_and_zeros_survive_a_high_power():
    values = torch.full((2, 1, 4), 1e-12)
    values[:, :, 3] = 0
    expected = torch.tensor([[1.0, 1.0, 1.0, 0.0]]) / math.sqrt(3)
    torch.testing.assert_close(power_mean(values, 8.0), expected)
    assert power_mean(torch.zeros(2, 1, 4), 3.0).isfinite().all()


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return RetrievalNet(TINY_NET, weights="random").eval()


@torch.no_grad()
def test_photos_are_seen_at_each_scale(net):
    generator = torch.Generator().manual_seed(1)
    photos = torch.randint(0, 256, (2, 3, 90, 120), dtype=torch.uint8, generator=generator)
    seen = []
    net.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape[-2:])))
    sizes = [(90, 120)] * 2
    found = describe_scales(PhotoNet(net, None), photos, sizes, (1.0, 0.7071, 0.5), 3.0)
    assert seen == [(90, 120), (64, 85), (45, 60)]
    single = [
        net(F.interpolate(photos / 255, size, mode="bilinear", antialias=True)).double().numpy()
        for size in seen[:3]
    ]
    expected = plain_power_mean(np.stack(single), 3.0)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-5)
    plain = describe_scales(PhotoNet(net, None), photos, sizes, (1.0,), 3.0)
    torch.testing.assert_close(plain, net(photos))
