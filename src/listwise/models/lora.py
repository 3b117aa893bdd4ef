"""LoRA (Hu et al. 2021): train low-rank changes of the linear layers of a frozen backbone."""

import math

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from listwise.errors import InputError
from listwise.models.net import RetrievalNet


class LoRA(nn.Module):
    """A low-rank change of a weight: W -> W + alpha / rank · up · down, with up = 0 at the start.

    Args:
        weight: the weight [out, in] to change.
        rank: the number of rows of `down` and columns of `up`.
        alpha: the size of the change.
    """

    merged = True  # when a network is saved, see `RetrievalNet.plain_state`

    def __init__(self, weight: Tensor, rank: int, alpha: float) -> None:
        super().__init__()
        self.down = nn.Parameter(weight.new_empty(rank, weight.shape[1]))
        self.up = nn.Parameter(weight.new_zeros(weight.shape[0], rank))
        self.scale = alpha / rank
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the changed weight [out, in]."""
        with torch.autocast(weight.device.type, enabled=False):
            return weight + self.scale * (self.up @ self.down)


def add_lora(net: RetrievalNet, rank: int = 8, alpha: float = 16.0) -> None:
    """Freeze the backbone of a network, and add LoRA to all its linear layers.

    Pooling and projection are still trained. `RetrievalNet.save` and `fingerprint` merge the
    changes into the weights, so the saved network is a plain one.

    Args:
        net: the network, which is changed.
        rank: the rank of the changes.
        alpha: the changes are multiplied by alpha / rank.

    Raises:
        InputError: the backbone has no linear layers, as most convolutional networks.

    Examples:
        >>> net = RetrievalNet("test_vit", weights="random")
        >>> add_lora(net, rank=4)
        >>> sum(p.numel() for p in net.parameters() if p.requires_grad)
        21505
    """
    layers = [
        part
        for part in net.backbone.modules()
        if isinstance(part, nn.Linear) and not parametrize.is_parametrized(part, "weight")
    ]
    if not layers:
        raise InputError(
            "this backbone has no linear layers: `lora` is for transformers and ConvNeXt"
        )
    net.backbone.requires_grad_(False)
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", LoRA(layer.weight, rank, alpha))
