"""Parts that a user may bring: losses, a pooling and a backbone."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def pairwise_loss(descriptors: Tensor, labels: Tensor) -> Tensor:
    """A plain function: squared error of the similarities, 1 within a class and 0 across."""
    same = (labels[:, None] == labels).to(descriptors.dtype)
    return (descriptors @ descriptors.T - same).square().mean()


class ProxyLoss(nn.Module):
    """A module with parameters: softmax over one learned vector a class."""

    def __init__(self, classes: int, dim: int) -> None:
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(classes, dim))

    def forward(self, descriptors: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(4 * descriptors @ F.normalize(self.proxies, dim=1).T, labels)


class AttentionPooling(nn.Module):
    """A mean of the cells by learned weights, then a linear layer: [B, C, H, W] -> [B, 6]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.score = nn.Conv2d(channels, 1, 1, bias=False)
        self.out = nn.Linear(channels, 6)

    def forward(self, features: Tensor) -> Tensor:
        weights = self.score(features).flatten(2).softmax(2)
        return self.out((features.flatten(2) * weights).sum(2))


class SmallBackbone(nn.Module):
    """Two convolutions with batch norm: [B, 3, H, W] -> [B, 10, H/4, W/4]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 10, 3, 2, 1),
            nn.BatchNorm2d(10),
            nn.ReLU(),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class SharingWeights(SmallBackbone):
    """A backbone that uses the weights of a layer outside of it too, in float32."""

    def forward(self, images: Tensor) -> Tensor:
        features = self.layers(images)
        with torch.autocast(images.device.type, enabled=False):
            extra = F.conv2d(images.float(), self.layers[0].weight, stride=4, padding=1)
        return features + extra.mean(1, keepdim=True)
