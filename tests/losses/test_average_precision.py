"""The losses against the dense float64 transcription of the paper, and on awkward input."""

import math
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_examples import value_and_gradient
from sklearn.metrics import average_precision_score
from torch.nn.functional import normalize

import reference
from listwise.losses import (
    QuantizedAPLoss,
    TieAwareAPLoss,
    class_balanced_weights,
    quantized_ap,
)
from listwise.losses import histogram as histogram_module
from listwise.losses.precision import expected_precision, quantized_precision, tie_aware_precision

LOSSES = {
    "quantized": (QuantizedAPLoss, reference.quantized),
    "tie-aware": (TieAwareAPLoss, reference.simplified_tie_aware),
}


@pytest.fixture(params=[3, 16, 1024], ids="tile{}".format)
def tile(request, monkeypatch):
    monkeypatch.setattr(histogram_module, "TILE", request.param)


@st.composite
def batches(draw):
    """Raw (not yet normalized) descriptors and labels with everything that goes wrong in life."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.integers(3, 40))
    raw = rng.normal(size=(size, draw(st.integers(2, 6))))
    labels = rng.integers(0, draw(st.integers(1, 8)), size)
    if draw(st.booleans()):  # one giant class
        labels[: size * 3 // 4] = 0
    labels[:2] = 0  # so that at least one query has a positive
    if draw(st.booleans()):  # some classes of one image
        labels[2 : 2 + size // 4] = 100 + np.arange(len(labels[2 : 2 + size // 4]))
    if draw(st.booleans()):  # duplicated images, some with another label
        raw[size // 2 :] = raw[: size - size // 2]
    if draw(st.booleans()):  # opposite images
        raw[-1] = -raw[0]
    weights = torch.tensor(rng.uniform(0, 3, size)) if draw(st.booleans()) else None
    if weights is not None:
        weights[0] = 1
    return torch.tensor(raw, dtype=torch.float64), torch.tensor(labels), weights


def clustered(size, classes, dim, seed):
    """Float64 descriptors around one point for each class, and their labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (size,), generator=generator)
    centers = torch.randn(classes, dim, generator=generator)
    raw = centers[labels] + torch.randn(size, dim, generator=generator)
    return normalize(raw.double(), dim=1), labels


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("include_self", [False, True])
@given(batch=batches(), bins=st.integers(2, 300), tile=st.sampled_from([3, 16, 1024]))
def test_equals_the_papers_equations(name, include_self, batch, bins, tile):
    raw, labels, weights = batch
    make, formula = LOSSES[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(histogram_module, "TILE", tile)
        loss = make(bins, include_self=include_self)
        value, gradient = value_and_gradient(lambda d: loss(d, labels, weights), raw)
    expected, expected_gradient = value_and_gradient(
        lambda d: reference.loss(d, labels, bins, weights, include_self, formula), raw
    )
    assert value == pytest.approx(expected, abs=1e-10)
    scale = max(1.0, expected_gradient.abs().max().item())
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-8 * scale, rtol=1e-8)


@pytest.mark.parametrize("bins", [2, 3, 5, 9, 17, 33])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("include_self", [False, True])
def test_scores_exactly_on_bin_centers(name, bins, include_self, tile):
    # Rows of ±1/2: their products are exactly -1, -0.5, 0, 0.5 and 1, and with these numbers of
    # bins so are the centers.
    generator = torch.Generator().manual_seed(bins)
    signs = torch.randint(0, 2, (30, 4), generator=generator).double() - 0.5
    labels = torch.randint(0, 5, (30,), generator=generator)
    make, formula = LOSSES[name]
    descriptors = signs.clone().requires_grad_()
    value = make(bins, include_self=include_self)(descriptors, labels)
    value.backward()
    plain = signs.clone().requires_grad_()
    expected = reference.loss(plain, labels, bins, None, include_self, formula)
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(descriptors.grad, plain.grad, atol=1e-10, rtol=1e-10)
    assert descriptors.grad.abs().max() > 0


FORMULAS = {
    "quantized": quantized_precision,
    "tie-aware": tie_aware_precision,
    "closed": expected_precision,
}


@pytest.mark.parametrize("name", FORMULAS)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(1, 12), bins=st.sampled_from([2, 3, 5, 9]))
def test_the_slope_on_a_bin_center_is_the_mean_of_both_sides(name, seed, size, bins):
    # Few scores on centers leave many bins empty, also those before the first score. Each score is
    # moved alone, up and down, by plain arithmetic: no gradient is involved in what is expected.
    def precisions(moved):
        found = histogram_module.score_histograms(moved, relevant.expand_as(moved), bins)
        return FORMULAS[name](found[0], found[1], relevant.sum())

    generator = torch.Generator().manual_seed(seed)
    scores = 1 - torch.randint(bins, (1, size), generator=generator).double() * (2 / (bins - 1))
    relevant = torch.rand(1, size, generator=generator) < 0.5
    relevant[0, 0] = True
    step = 1e-6
    each = step * torch.eye(size, dtype=torch.float64)
    expected = (precisions(scores + each) - precisions(scores - each)) / (2 * step)
    scores.requires_grad_()
    precisions(scores).sum().backward()
    torch.testing.assert_close(scores.grad[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bins", [2, 3, 5, 20, 21])
@pytest.mark.parametrize("make", [QuantizedAPLoss, TieAwareAPLoss])
def test_one_class_has_neither_loss_nor_gradient(make, bins):
    rows = torch.cat([torch.eye(4), -torch.eye(4), torch.eye(4)[:1]]).double().requires_grad_()
    value = make(bins)(rows, torch.zeros(9, dtype=torch.int64))
    value.backward()
    assert value.item() == pytest.approx(0, abs=1e-12)
    torch.testing.assert_close(rows.grad, torch.zeros_like(rows), atol=1e-12, rtol=0)


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 7), st.integers(2, 30)),
    bins=st.integers(2, 300),
    tile=st.sampled_from([4, 1024]),
)
def test_any_score_matrix(seed, shape, bins, tile):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
    centers = 1 - torch.randint(bins, shape, generator=generator).double() * (2 / (bins - 1))
    scores = torch.where(torch.rand(shape, generator=generator) < 0.3, centers, scores)
    scores[:, 0] = 1  # so that no bin is empty up to itself, where a precision would be 0/0
    scores[:, 1] = -1
    relevance = torch.rand(shape, generator=generator) < 0.3
    plain = scores.clone().requires_grad_()
    expected = reference.average_precisions(
        plain, relevance, torch.ones(shape, dtype=torch.bool), bins
    )
    expected.nansum().backward()
    scores.requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(histogram_module, "TILE", tile)
        ap = quantized_ap(scores, relevance, bins)
        ap.nansum().backward()
    torch.testing.assert_close(ap, expected, atol=1e-10, rtol=0, equal_nan=True)
    assert ap.isnan().tolist() == (relevance.sum(1) == 0).tolist()
    counted = relevance.any(1)
    torch.testing.assert_close(scores.grad[counted], plain.grad[counted], atol=1e-8, rtol=1e-8)
    assert torch.equal(scores.grad[~counted], torch.zeros_like(scores.grad[~counted]))


def test_a_query_gallery_split_is_the_same_loss():
    descriptors, labels = clustered(30, 4, 5, seed=0)
    ap = quantized_ap(descriptors @ descriptors.T, labels[:, None] == labels, bins=20)
    loss = QuantizedAPLoss(20, include_self=True)(descriptors, labels)
    assert 1 - ap.mean().item() == pytest.approx(loss.item(), abs=1e-12)


def test_products_that_stray_past_one_count_as_one():
    row = normalize(torch.tensor([[0.1, 0.7, 0.3]], dtype=torch.float64), dim=1)
    row = row * (1 + 1e-15)
    assert (row @ row.T).item() > 1
    descriptors = torch.cat([row, row, -row, -row])
    labels = torch.tensor([0, 0, 1, 1])
    for bins in (2, 20, 1000):
        assert QuantizedAPLoss(bins)(descriptors, labels).item() == 0
    scores = torch.tensor([[1 + 4e-3, -1 - 4e-3]], dtype=torch.float64)
    assert quantized_ap(scores, torch.tensor([[1, 0]]), bins=1000).item() == 1


@given(st.data())
def test_closed_form_is_the_mean_over_all_orders(data):
    every = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(lambda n: sum(n)))
    relevant = [data.draw(st.integers(0, n)) for n in every]
    if not sum(relevant):
        relevant[int(np.argmax(every))] = 1
    expected = reference.mean_precision_over_orders(relevant, every)
    ap = expected_precision(
        torch.tensor(relevant, dtype=torch.float64),
        torch.tensor(every, dtype=torch.float64),
        torch.tensor(sum(relevant)),
    )
    assert ap.item() == pytest.approx(expected, abs=1e-12)


def test_closed_form_at_broken_counts_follows_the_digamma_function():
    mpmath = pytest.importorskip("mpmath")
    mpmath.mp.dps = 50
    generator = np.random.default_rng(0)
    for _ in range(50):
        every = generator.choice([1e-9, 0.015, 0.3, 0.981, 1 - 1e-9, 1.019, 1.7, 40.5, 3000.2], 6)
        relevant = every * generator.choice([0, 0.2, 1.0], 6)
        relevant[0] = every[0]
        total, ahead, relevant_ahead = mpmath.mpf(0), mpmath.mpf(0), mpmath.mpf(0)
        for n_relevant, n in zip(map(mpmath.mpf, relevant), map(mpmath.mpf, every), strict=True):
            inverse_ranks = mpmath.digamma(ahead + n + 1) - mpmath.digamma(ahead + 1)
            slope = (n_relevant - 1) / (n - 1)
            inner = slope * n + (relevant_ahead + 1 - slope * (ahead + 1)) * inverse_ranks
            total += n_relevant / n * inner
            ahead, relevant_ahead = ahead + n, relevant_ahead + n_relevant
        tensors = torch.tensor(relevant), torch.tensor(every), torch.tensor(relevant.sum())
        expected = float(total / mpmath.mpf(relevant.sum()))
        assert expected_precision(*tensors).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("make", [QuantizedAPLoss, TieAwareAPLoss])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.float64, 1e-12), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)],
)
def test_precisions(make, dtype, tolerance):
    descriptors, labels = clustered(300, 20, 32, seed=5)
    descriptors = descriptors.to(dtype)
    exact = descriptors.double().requires_grad_()
    expected = make()(exact, labels)
    expected.backward()
    descriptors.requires_grad_()
    value = make()(descriptors, labels)
    value.backward()
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert descriptors.grad.dtype == dtype
    # Sums run in float32 at least, so half precision costs the rounding of its input alone.
    assert value.item() == pytest.approx(expected.item(), abs=1e-6)
    error = (descriptors.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert error < tolerance


NAMED_PRECISIONS = hasattr(torch.backends.cuda.matmul, "fp32_precision")


@pytest.fixture
def any_precision():
    """Lets a test change PyTorch's settings for float32 products."""
    yield
    if NAMED_PRECISIONS:
        torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("any_precision")
@pytest.mark.parametrize("make", [QuantizedAPLoss, TieAwareAPLoss])
def test_the_setting_for_float32_products_changes_nothing_and_stays(make):
    # On CPUs that compute bfloat16, "medium" makes PyTorch multiply in another way.
    generator = torch.Generator().manual_seed(6)
    raw = torch.randn(300, 256, generator=generator)
    labels = torch.randint(0, 20, (300,), generator=generator)
    torch.set_float32_matmul_precision("highest")
    plain = value_and_gradient(lambda d: make()(d, labels), raw)
    for precision, named in (("high", "tf32"), ("medium", "bf16")):
        torch.set_float32_matmul_precision(precision)
        found = value_and_gradient(lambda d: make()(d, labels), raw)
        assert found[0] == plain[0]
        assert torch.equal(found[1], plain[1])
        assert torch.get_float32_matmul_precision() == precision
        if NAMED_PRECISIONS:
            assert torch.backends.mkldnn.matmul.fp32_precision == named


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)]
)
def test_torch_compile(backend):
    if backend == "inductor" and not shutil.which("g++"):
        pytest.skip("needs g++")
    generator = torch.Generator().manual_seed(7)
    raw = torch.randn(40, 8, generator=generator)
    labels = torch.randint(0, 6, (40,), generator=generator)
    for make in (QuantizedAPLoss, TieAwareAPLoss):
        plain = value_and_gradient(lambda d, m=make: m()(d, labels), raw)
        loss = torch.compile(make(), backend=backend)
        compiled = value_and_gradient(lambda d, f=loss: f(d, labels), raw)
        assert compiled[0] == pytest.approx(plain[0], abs=1e-6)
        torch.testing.assert_close(compiled[1], plain[1], atol=1e-6, rtol=1e-4)


def test_more_bins_come_nearer_to_the_exact_average_precision():
    generator = np.random.default_rng(0)
    relevance = generator.random((300, 200)) < 0.1
    relevance[:, 0] = True
    scores = np.clip(generator.normal(0.1, 0.2, relevance.shape) + 0.25 * relevance, -1, 1)
    exact = np.array(
        [average_precision_score(y, s) for y, s in zip(relevance, scores, strict=True)]
    )
    errors = []
    for bins in (20, 50, 100, 200, 500, 1000, 2000):
        ap = quantized_ap(torch.tensor(scores), torch.tensor(relevance), bins)
        errors.append(np.abs(ap.numpy() - exact).mean())
    assert all(later < earlier for earlier, later in pairwise(errors)), errors
    assert errors[-1] < 0.01, errors
    assert errors[-1] < errors[0] / 5, errors


UNIT = torch.eye(4)
LABELS = torch.tensor([0, 0, 1, 1])
NAN = torch.full((4, 4), math.nan)


@pytest.mark.parametrize("rows", [(0, 5), (2, 2), (-1, 3)])
def test_rows_outside_of_the_batch(rows):
    with pytest.raises(ValueError, match="queries must be rows"):
        QuantizedAPLoss()(UNIT, LABELS, queries=rows)


@pytest.mark.parametrize("make", [QuantizedAPLoss, TieAwareAPLoss])
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((UNIT[0], LABELS), r"descriptors must be a tensor \[B, C\], not \[4\]"),
        ((UNIT.long(), LABELS), "floating-point"),
        ((UNIT.numpy(), LABELS), "ndarray"),
        ((UNIT, LABELS[:3]), "4 descriptors but 3 labels"),
        ((UNIT, LABELS[:, None]), r"labels must be a tensor \[B\]"),
        ((UNIT, LABELS.float()), "labels must be integers"),
        ((UNIT, LABELS > 0), "labels must be integers"),
        ((UNIT, [0, 0, 1, 1]), "labels must be a tensor"),
        ((NAN, LABELS), "NaN"),
        ((UNIT * math.inf, LABELS), "NaN or infinite"),
        ((UNIT * 3, LABELS), "normalize"),
        ((UNIT[:1], LABELS[:1]), "at least two images"),
        ((UNIT, torch.arange(4)), "no query has a positive"),
        ((UNIT, LABELS, torch.zeros(4)), "no query has a positive"),
        ((UNIT, LABELS, torch.ones(3)), r"weights must be a tensor \[4\]"),
        ((UNIT, LABELS, [1.0, 1.0, 1.0, 1.0]), r"weights must be a tensor \[4\].*not list"),
        ((UNIT, LABELS, -torch.ones(4)), "not negative"),
        ((UNIT, LABELS, NAN[0]), "finite"),
    ],
)
def test_bad_input_is_an_error_of_one_sentence(make, arguments, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        make()(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("scores", "relevance", "reason"),
    [
        (UNIT[0], UNIT[0], r"scores must be a tensor \[Q, N\]"),
        (UNIT, UNIT[:3], r"scores are \[4, 4\] but relevance is \[3, 4\]"),
        (UNIT.long(), UNIT, "floating-point"),
        (UNIT[:, :0], UNIT[:, :0], "at least one"),
        (UNIT * 2, UNIT, r"in \[-1, 1\]"),
        (NAN, UNIT, "NaN"),
        (UNIT, UNIT * 0.5, "0 or 1"),
    ],
)
def test_bad_score_matrices(scores, relevance, reason):
    with pytest.raises(ValueError, match=reason):
        quantized_ap(scores, relevance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("make", [QuantizedAPLoss, TieAwareAPLoss])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-8), (torch.float32, 5e-3), (torch.bfloat16, 2e-2), (torch.float16, 5e-3)],
)
def test_gpu_equals_cpu(make, dtype, tolerance):
    descriptors, labels = clustered(3000, 300, 64, seed=10)
    descriptors = descriptors.to(dtype)
    exact = descriptors.double().clone().requires_grad_()
    weights = class_balanced_weights(labels)
    expected = make()(exact, labels, weights)
    expected.backward()
    there = descriptors.cuda().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        value = make()(there, labels.cuda(), weights.cuda())
    value.backward()
    assert value.item() == pytest.approx(expected.item(), abs=1e-5)
    # A score that rounding takes over a bin center gets another slope; one such pair is visible.
    error = (there.grad.cpu().double() - exact.grad).norm() / exact.grad.norm()
    assert error < tolerance
    scores = (there.detach() @ there.detach().T).float().clamp(-1, 1)
    relevance = labels[:, None] == labels
    on_gpu = quantized_ap(scores, relevance.cuda())
    torch.testing.assert_close(on_gpu.cpu(), quantized_ap(scores.cpu(), relevance))
