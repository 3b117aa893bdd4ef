"""The residual blocks of ResNets, for inference on a GPU.

After a convolution, PyTorch reads and writes the feature maps once for the bias, once for the sum
with the shortcut, once for the ReLU, and once more to set the values outside of the photos. Here
one kernel does all of it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from listwise.models.folding import is_plain


def finish(
    output: Tensor, bias: Tensor, added: Tensor | None = None, sizes: Tensor | None = None
) -> Tensor:
    """Compute relu(output + bias + added) in place, and zeros outside of the photos.

    Args:
        output: [B, C, H, W], the output of a convolution.
        bias: [C].
        added: [B, C, H, W].
        sizes: int32 [B, 2], heights and widths of the photos, which lie in the upper left corners;
            by default they cover everything. `OwnAreas` passes it.
    """
    if has_torch_function_unary(output):
        finished: Tensor = handle_torch_function(finish, (output,), output, bias, added)
        return finished
    maps = [output] if added is None else [output, added]
    if output.is_cuda and all(x.is_contiguous(memory_format=torch.channels_last) for x in maps):
        from listwise.models.epilogue import finish_on_gpu  # needs Triton

        finish_on_gpu(output, bias, added, sizes)
        return output
    output += bias.view(-1, 1, 1)
    if added is not None:
        output += added
    output.relu_()
    if sizes is not None:
        for photo, (height, width) in zip(output, sizes.tolist(), strict=True):
            photo[:, height:] = 0
            photo[:, :, width:] = 0
    return output


class ReluConvolution(nn.Module):
    """Computes relu(conv(maps) + added)."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, maps: Tensor, added: Tensor | None = None) -> Tensor:
        """Compute feature maps: [B, I, h, w] and [B, O, H, W] or None -> [B, O, H, W]."""
        conv = self.conv
        assert conv.bias is not None
        how: Any = conv.stride, conv.padding, conv.dilation, conv.groups
        return finish(F.conv2d(maps, conv.weight, None, *how), conv.bias, added)


class ResidualBlock(nn.Module):
    """Computes the same as a `BasicBlock` or `Bottleneck` of timm whose batch norm is folded."""

    def __init__(self, convs: list[nn.Conv2d], shortcut: nn.Module | None) -> None:
        super().__init__()
        self.convs = nn.ModuleList(map(ReluConvolution, convs))
        self.shortcut = shortcut

    def forward(self, maps: Tensor) -> Tensor:
        """Compute feature maps: [B, I, h, w] -> [B, O, H, W]."""
        added = maps if self.shortcut is None else self.shortcut(maps)
        *first, last = self.convs
        for conv in first:
            maps = conv(maps)
        result: Tensor = last(maps, added)
        return result


def replace_blocks(net: nn.Module) -> None:
    """Replace the residual blocks and the first convolution of ResNets whose batch norm is folded.

    Blocks with other layers, hooks or changed methods stay as they are.
    """
    for parent in list(net.modules()):
        for name, child in parent.named_children():
            layers = dict(child.named_children())
            shortcut = layers.pop("downsample", None)
            if type(child) in (BasicBlock, Bottleneck) and is_plain(child) and _are_usual(layers):
                convs: Any = [layer for each, layer in layers.items() if each.startswith("conv")]
                setattr(parent, name, ResidualBlock(convs, shortcut))
        first: Any = {name: getattr(parent, name, None) for name in ("conv1", "bn1", "act1")}
        if type(parent) is ResNet and is_plain(parent) and _are_usual(first):
            parent.conv1, parent.act1 = ReluConvolution(first["conv1"]), nn.Identity()


def _are_usual(layers: dict[str, nn.Module]) -> bool:
    """Whether layers are convolutions with bias, ReLUs, and what remains of batch norm: nothing."""
    return all(map(_is_usual, layers, layers.values()))


def _is_usual(name: str, layer: nn.Module) -> bool:
    if name.startswith("conv"):
        with_bias = type(layer) is nn.Conv2d and layer.bias is not None
        return with_bias and layer.padding_mode == "zeros" and is_plain(layer)
    return type(layer) is (nn.ReLU if name.startswith("act") else nn.Identity) and is_plain(layer)
