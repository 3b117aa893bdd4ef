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

# The convolutions of a block in their order, each followed by a ReLU, and the layers between them
# that must be missing.
_CONVOLUTIONS = {
    BasicBlock: (("conv1", "conv2"), ("bn1", "bn2", "drop_block", "aa", "se", "drop_path")),
    Bottleneck: (
        ("conv1", "conv2", "conv3"),
        ("bn1", "bn2", "bn3", "drop_block", "aa", "se", "drop_path"),
    ),
}


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
            names, missing = _CONVOLUTIONS.get(type(child), ((), ()))
            if names and _is_usual(child, names, missing):
                convs = [getattr(child, each) for each in names]
                setattr(parent, name, ResidualBlock(convs, child.downsample))  # type: ignore[arg-type]
        if type(parent) is ResNet and _is_usual(parent, ("conv1",), ("bn1",)):
            parent.conv1 = ReluConvolution(parent.conv1)  # type: ignore[arg-type]
            parent.act1 = nn.Identity()


def _is_usual(block: nn.Module, convs: tuple[str, ...], missing: tuple[str, ...]) -> bool:
    """Whether a block consists of convolutions with bias and ReLUs only."""
    layers = [getattr(block, name) for name in convs]
    relus = [getattr(block, name.replace("conv", "act")) for name in convs]
    rest = [getattr(block, name) for name in missing]
    return (
        all(type(layer) is nn.Conv2d and layer.bias is not None for layer in layers)
        and all(layer.padding_mode == "zeros" for layer in layers)
        and all(type(relu) is nn.ReLU for relu in relus)
        and all(layer is None or type(layer) is nn.Identity for layer in rest)
        and all(is_plain(layer) for layer in (block, *layers, *relus, *rest) if layer is not None)
    )
