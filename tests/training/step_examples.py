"""Small networks and a dense loss, and ordinary backpropagation to compare with."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from listwise.models.pooling import make_pooling


class TinyNet(nn.Module):
    """Conv, residual conv with stochastic depth, pooling, dropout, projection, L2."""

    def __init__(self, pooling: str = "gem", drop: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.branch = nn.Conv2d(8, 8, 3, padding=1)
        self.depth = StochasticDepth(drop, mode="row")
        self.pool = make_pooling(pooling)
        self.dropout = nn.Dropout(drop)
        self.head = nn.Linear(8, 6)

    def forward(self, images: Tensor) -> Tensor:
        features = F.relu(self.stem(images.to(self.stem.weight.dtype)))
        features = features + self.depth(F.gelu(self.branch(features)))
        vectors = self.dropout(self.pool(features))
        return F.normalize(self.head(vectors.to(self.stem.weight.dtype)), dim=1)


class SoftmaxLoss:
    """Minus the log of the softmax mass of the positives, weighted mean over the queries."""

    def __call__(self, descriptors, labels, weights=None, *, queries=None) -> Tensor:
        start, stop = queries or (0, len(labels))
        weights = torch.ones_like(descriptors[:, 0]) if weights is None else weights
        own = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        scores = (4 * descriptors @ descriptors.T).masked_fill(own, -torch.inf)
        positive = (labels[:, None] == labels) & ~own
        mass = (scores.softmax(1) * positive).sum(1)
        return -(weights * mass.log())[start:stop].sum() / weights.sum()


class Crowded(nn.Module):
    """A network on a device whose memory holds the graphs of a few images only."""

    def __init__(self, net: nn.Module, room: int) -> None:
        super().__init__()
        self.net = net
        self.room = room
        self.failures = 0

    def forward(self, images):
        if torch.is_grad_enabled() and len(images) > self.room:
            self.failures += 1
            raise torch.OutOfMemoryError("out of memory")
        return self.net(images)


def make_net(dtype: torch.dtype = torch.float64, **options) -> TinyNet:
    torch.manual_seed(1)
    return TinyNet(**options).to(dtype)


def make_batch(size: int, dtype: torch.dtype = torch.float64, side: int = 8):
    """Images [size, 3, side, side] and labels in which everyone has a positive."""
    generator = torch.Generator().manual_seed(size)
    # Each of its own color, so that descriptors differ: in float32 the gradients of nearly
    # equal ones are mostly rounding.
    colors = torch.randn(size, 3, 1, 1, generator=generator, dtype=torch.float64)
    noise = torch.rand(size, 3, side, side, generator=generator, dtype=torch.float64)
    return (2 * colors + noise).to(dtype), torch.arange(size) % max(1, min(3, size // 2))


def tuple_batch(loss, count: int, dtype: torch.dtype = torch.float64):
    """Images and labels of so many tuples for a loss, one after the other."""
    width = 2 + loss.negatives
    labels = torch.arange(count * width)
    labels[1::width] = labels[::width]
    return make_batch(count * width, dtype)[0], labels


def gradients(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def ordinary(net, loss, images, labels, micro_batch=None, weights=None):
    """Loss and gradients by one backward through the graph of the whole batch."""
    net.zero_grad()
    pieces = [net(crop) for crop in images.split(micro_batch or len(images))]
    value = loss(torch.cat(pieces), labels, weights)
    value.backward()
    expected = gradients(net)
    net.zero_grad()
    return value.detach(), expected


def assert_equal_gradients(actual, expected, relative):
    """Same names, and differences small against the norm of the expected gradient."""
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        assert (actual[name] - gradient).norm() <= relative * gradient.norm(), name
