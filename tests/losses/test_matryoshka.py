"""A loss of several lengths of descriptors."""

import torch
from torch.nn.functional import normalize

from listwise.losses import MatryoshkaLoss, ProxyAnchorLoss, QuantizedAPLoss
from listwise.training.objective import accepted_arguments

LABELS = torch.arange(10) // 2


def descriptors(rows=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(rows, 6, generator=generator, dtype=torch.float64), dim=1)


def test_it_is_the_mean_over_the_lengths():
    given, references = descriptors().requires_grad_(), descriptors(8, 1)
    options = {"references": references, "reference_labels": torch.arange(8) // 2}
    weights = torch.linspace(1, 2, 10, dtype=torch.float64)
    loss = MatryoshkaLoss(QuantizedAPLoss(), [2, 6, 2, 3])
    assert loss.dims == (6, 3, 2)
    for kept in ({}, options):
        value = loss(given, LABELS, weights, queries=(2, 7), **kept)
        expected = 0.0
        for dim in (2, 3, 6):
            cut = given
            if dim < 6:
                cut = given[:, :dim] / given[:, :dim].norm(dim=1, keepdim=True)
            other = {k: v[:, :dim] for k, v in kept.items() if k == "references"}
            other = {k: v / v.norm(dim=1, keepdim=True) for k, v in other.items()}
            whole = QuantizedAPLoss()(cut, LABELS, weights, queries=(2, 7), **(kept | other))
            expected = expected + whole / 3
        torch.testing.assert_close(value, expected)
        gradients = [torch.autograd.grad(v, given)[0] for v in (value, expected)]
        torch.testing.assert_close(*gradients)


def test_half_precision_keeps_its_type():
    given = descriptors().to(torch.bfloat16).requires_grad_()
    value = MatryoshkaLoss(QuantizedAPLoss(), [6, 3])(given, LABELS)
    value.backward()
    assert given.grad.dtype == torch.bfloat16


def test_parameters_and_arguments_are_those_of_the_loss():
    proxies = MatryoshkaLoss(ProxyAnchorLoss(5, 6), [6, 2])
    assert [name for name, _ in proxies.named_parameters()] == ["loss.proxies"]
    assert accepted_arguments(proxies) == {"queries"}
    assert accepted_arguments(MatryoshkaLoss(QuantizedAPLoss(), [2])) == {"queries", "weights"}
