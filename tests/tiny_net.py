"""A network of two convolutions, for tests in which the network does not matter.

It is a timm model of the name `tiny_net` in processes that have imported this module. Its
descriptors have the length of those of timm's `test_resnet`.
"""

import numpy as np
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import register_model
from torch import Tensor, nn

from listwise.data import Images, load_image, whole_image

TINY_NET = "tiny_net"


class TinyNet(nn.Module):
    """Two convolutions with batch norm: [B, 3, H, W] -> [B, 96, H/8, W/8]."""

    num_features = 96

    def __init__(self) -> None:
        super().__init__()
        self.pretrained_cfg = {
            "input_size": (3, 64, 64),
            "mean": IMAGENET_DEFAULT_MEAN,
            "std": IMAGENET_DEFAULT_STD,
        }
        self.stem = nn.Conv2d(3, 24, 7, 4, 3, bias=False)
        self.norm1 = nn.BatchNorm2d(24)
        self.conv = nn.Conv2d(24, 96, 3, 2, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(96)

    def forward_features(self, images: Tensor) -> Tensor:
        start = self.norm1(self.stem(images)).relu()
        return self.norm2(self.conv(start)).relu()

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_features(images).mean((2, 3))


@register_model
def tiny_net(pretrained: bool = False, **options) -> TinyNet:
    """Make the network; there are no pretrained weights."""
    assert not pretrained
    return TinyNet()


def trained(net: nn.Module) -> nn.Module:
    """The network with batch norms that do something, as after training."""
    torch.manual_seed(1)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 2)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, std=0.2)
    return net.eval()


@torch.no_grad()
def one_by_one(net: nn.Module, images: Images, max_side: int | None = None) -> np.ndarray:
    """The descriptors of photos, each computed alone."""
    photos = [load_image(path, images.box(i)) for i, path in enumerate(images.paths)]
    rows = [net.eval()(whole_image(photo, max_side)[None]) for photo in photos]
    return torch.cat(rows).numpy()
