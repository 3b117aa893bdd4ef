import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from listwise.models.pooling import POOLINGS, GeM, make_pooling

Map = NDArray[np.float64]


def per_channel(x: Map, pool: Callable[[Map], float]) -> Map:
    return np.array([[pool(channel.ravel()) for channel in image] for image in x])


def region_count(long: int, short: int) -> int:
    """Regions along the longer side at scale 1, by trying all numbers up to a large one."""
    if long == short:
        return 1
    best, best_error = 0, math.inf
    for m in range(2, 200):
        shift = (long - short) / (m - 1)
        error = abs((short - shift) / short - 0.4)
        if error < best_error - 1e-12:
            best, best_error = m, error
    return best


def rmac_loops(x: Map) -> Map:
    batch, channels, height, width = x.shape
    out = np.zeros((batch, channels))
    short = min(height, width)
    extra_rows = region_count(height, width) - 1 if height > width else 0
    extra_columns = region_count(width, height) - 1 if width > height else 0
    for b, scale in itertools.product(range(batch), (1, 2, 3)):
        side = math.floor(2 * short / (scale + 1))
        if side < 1:
            continue
        rows, columns = scale + extra_rows, scale + extra_columns
        for r, k in itertools.product(range(rows), range(columns)):
            top = math.floor(r * (height - side) / (rows - 1) + 1e-9) if rows > 1 else 0
            left = math.floor(k * (width - side) / (columns - 1) + 1e-9) if columns > 1 else 0
            vector = np.array(
                [
                    max(x[b, c, top + i, left + j] for i, j in np.ndindex(side, side))
                    for c in range(channels)
                ]
            )
            out[b] += vector / max(math.sqrt(sum(vector**2)), 1e-12)
    return out


def crow_loops(x: Map) -> Map:
    batch, channels, height, width = x.shape
    out = np.zeros((batch, channels))
    for b in range(batch):
        positive = np.maximum(x[b], 0)
        cells = [sum(positive[:, i, j]) for i, j in np.ndindex(height, width)]
        norm = math.sqrt(sum(s * s for s in cells))
        alpha = np.array([math.sqrt(s / norm) if s > 0 else 0.0 for s in cells])
        share = [np.count_nonzero(positive[c]) / (height * width) for c in range(channels)]
        for c in range(channels):
            beta = math.log((channels * 1e-6 + sum(share)) / (1e-6 + share[c]))
            out[b, c] = beta * sum(alpha * positive[c].ravel())
    return out


LOOPS = {
    "gem": lambda x: per_channel(x, lambda c: (sum(np.maximum(c, 1e-6) ** 3) / len(c)) ** (1 / 3)),
    "mac": lambda x: per_channel(x, max),
    "spoc": lambda x: per_channel(x, lambda c: sum(c) / len(c)),
    "rmac": rmac_loops,
    "crow": crow_loops,
}


def feature_map(shape: tuple[int, ...], seed: int, signed: bool = False) -> Map:
    values = np.random.default_rng(seed).normal(size=shape)
    return values if signed else np.maximum(values, 0)


shapes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 11), st.integers(1, 11))


@pytest.mark.parametrize("name", POOLINGS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(shape=shapes, seed=st.integers(0, 1000), signed=st.booleans())
def test_pools_as_defined(name: str, shape: tuple[int, ...], seed: int, signed: bool) -> None:
    x = feature_map(shape, seed, signed)
    pooled = make_pooling(name).double()(torch.from_numpy(x))
    np.testing.assert_allclose(pooled.detach().numpy(), LOOPS[name](x), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", POOLINGS)
@pytest.mark.parametrize("size", [(1, 1), (1, 4), (3, 5)])
def test_gradients_are_right(name: str, size: tuple[int, int]) -> None:
    x = np.abs(feature_map((2, 3, *size), 1, signed=True)) + 0.05
    pool = make_pooling(name).double()
    parameters = tuple(pool.parameters())
    images = torch.from_numpy(x).requires_grad_()
    assert torch.autograd.gradcheck(lambda t, *_: pool(t), (images, *parameters))


@pytest.mark.parametrize("name", POOLINGS)
def test_empty_maps_have_finite_gradients(name: str) -> None:
    x = torch.zeros(2, 4, 3, 3)
    x[0, 0, 1, 1] = 1.0
    x.requires_grad_()
    pool = make_pooling(name)
    pool(x).square().sum().backward()
    for tensor in (x, *pool.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


@pytest.mark.parametrize("p", [3.0, 20.0])
def test_gem_survives_any_scale(p: float) -> None:
    small, large = torch.full((1, 1, 4, 4), 1e-6), torch.full((1, 1, 4, 4), 1e5)
    x = torch.cat([small, large], dim=1).requires_grad_()
    pool = GeM(p=p)
    pooled = pool(x)
    torch.testing.assert_close(pooled, torch.tensor([[1e-6, 1e5]]))
    pooled.sum().backward()
    assert x.grad is not None
    assert pool.p.grad is not None
    assert x.grad.isfinite().all()
    assert pool.p.grad.isfinite().all()


@pytest.mark.parametrize("name", POOLINGS)
def test_half_precision_maps_are_pooled_in_single(name: str) -> None:
    x = torch.from_numpy(feature_map((2, 8, 7, 9), 5)).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pooled = make_pooling(name)(x)
    assert pooled.dtype == torch.float32
    exact = LOOPS[name](x.double().numpy())
    np.testing.assert_allclose(pooled.detach().numpy(), exact, rtol=1e-5, atol=1e-6)
