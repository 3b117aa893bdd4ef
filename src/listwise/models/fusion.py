"""Fuse convolutions with bias, residual connection and ReLU, in the graphs of torch.compile.

PyTorch's compiler fuses element-wise operations with each other, but not with convolutions, and it
does not sum what it computes. In a network whose batch norm is folded, each bias, ReLU and residual
connection therefore reads and writes whole feature maps, and the gradient of each bias reads them
again. `ConvolutionFusion` replaces these patterns in the graphs of the forward and backward pass:

- relu(convolution + bias + residual): one kernel of cuDNN.
- The gradient of a ReLU and of the bias before it: one kernel that computes the sum of two
  gradients where the output was positive, and at the same time its sum over all positions.

The passes of PyTorch's compiler are not a public interface. Everything that depends on them is in
this file, and `listwise.optional.NEWEST_TORCH` is the newest version that it is used with.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

aten = torch.ops.aten

CHANNELS = 64  # the number of channels must be a multiple of it
POSITIONS = [0, 2, 3]  # all dimensions of feature maps but the channels
_LAYOUT = (torch.Tag.needs_fixed_stride_order,)
# A program of the kernel reads so many numbers at a time, which lie side by side if there are this
# many channels.
ELEMENTS, COLUMNS = 4096, 1024
PROGRAMS = 2048  # enough to keep every GPU busy; the sum of each takes memory


@torch.library.custom_op("listwise::relu_convolution", mutates_args=(), tags=_LAYOUT)
def relu_convolution(
    maps: Tensor,
    weight: Tensor,
    bias: Tensor,
    added: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Compute relu(convolution + bias + added) in channels-last order.

    Shapes: [B, I, h, w], [O, I, kh, kw], [O], [B, O, H, W] or None -> [B, O, H, W].
    """
    if maps.is_cuda:
        settings = (bias, stride, padding, dilation, 1)
        try:
            if added is None:
                return torch.cudnn_convolution_relu(maps, weight, *settings)
            return torch.cudnn_convolution_add_relu(maps, weight, added, 1, *settings)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            pass  # cuDNN has no fused kernel for this size
    total = F.conv2d(maps, weight, bias, stride, padding, dilation)
    total = torch.relu(total if added is None else total + added)
    return total.contiguous(memory_format=torch.channels_last)


@relu_convolution.register_fake
def _(
    maps: Tensor,
    weight: Tensor,
    bias: Tensor,
    added: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    result = F.conv2d(maps, weight, bias, stride, padding, dilation)
    return torch.empty_like(result, memory_format=torch.channels_last)


@torch.library.custom_op("listwise::relu_gradient", mutates_args=(), tags=_LAYOUT)
def relu_gradient(gradient: Tensor, added: Tensor | None, active: Tensor) -> tuple[Tensor, Tensor]:
    """Compute gradient + added where the output of a ReLU is positive; and its sum: [B, C, H, W].

    Returns the gradient before the ReLU [B, C, H, W], and the gradient of the bias [C].
    """
    result = torch.empty_like(active, memory_format=torch.channels_last)
    if not gradient.is_cuda:
        total = gradient if added is None else gradient + added
        result.copy_(torch.where(active > 0, total, 0))
        return result, result.sum(POSITIONS)
    sums = run_gradient_kernel(
        _rows(gradient), None if added is None else _rows(added), _rows(active), _rows(result)
    )
    return result, sums.to(gradient.dtype)


@relu_gradient.register_fake
def _(gradient: Tensor, added: Tensor | None, active: Tensor) -> tuple[Tensor, Tensor]:
    result = torch.empty_like(active, memory_format=torch.channels_last)
    return result, gradient.new_empty(active.shape[1])


def _rows(maps: Tensor) -> Tensor:
    """Return maps [B, C, H, W] in channels-last order as a matrix [B H W, C]."""
    return maps.permute(0, 2, 3, 1).flatten(0, 2).contiguous()


@triton.jit(do_not_specialize=["steps"])  # type: ignore[untyped-decorator]
def gradient_kernel(  # type: ignore[no-untyped-def]
    gradient,
    added,
    active,
    result,
    sums,
    size,
    channels,
    steps,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute `relu_gradient` for some positions and channels.

    Shapes: [size, channels], except for `sums` [row tiles, channels]. A tile has steps × ROWS rows.
    """
    column_tiles = channels // COLUMNS
    tile = tl.program_id(0) // column_tiles
    column = (tl.program_id(0) % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(steps):
        row = (tile * steps + step) * ROWS + tl.arange(0, ROWS)
        real = (row < size)[:, None]
        place = row.to(tl.int64)[:, None] * channels + column[None, :]
        value = tl.load(gradient + place, mask=real, other=0.0).to(tl.float32)
        if ADD:
            value += tl.load(added + place, mask=real, other=0.0).to(tl.float32)
        value = tl.where(tl.load(active + place, mask=real, other=0.0) > 0, value, 0.0)
        tl.store(result + place, value.to(result.dtype.element_ty), mask=real)
        total += value
    tl.store(sums + tile * channels + column, tl.sum(total, axis=0))


def run_gradient_kernel(
    gradient: Tensor, added: Tensor | None, active: Tensor, result: Tensor
) -> Tensor:
    """Write gradient + added where `active` is positive, and 0 elsewhere; return its sum.

    Shapes: [n, C] each -> [C], float32. C is a multiple of 64.
    """
    size, channels = result.shape
    columns = math.gcd(channels, COLUMNS)  # a power of 2
    rows = ELEMENTS // columns
    row_blocks = triton.cdiv(size, rows)
    steps = triton.cdiv(row_blocks * (channels // columns), PROGRAMS)
    tiles = triton.cdiv(row_blocks, steps)
    sums = torch.empty(tiles, channels, dtype=torch.float32, device=result.device)
    gradient_kernel[(tiles * (channels // columns),)](
        gradient,
        added,
        active,
        result,
        sums,
        size,
        channels,
        steps,
        ADD=added is not None,
        ROWS=rows,
        COLUMNS=columns,
    )
    return sums.sum(0)


class ConvolutionFusion(CustomGraphPass):
    """A pass of torch.compile (`post_grad_custom_pre_pass`) that fuses convolutions.

    Args:
        device: type of the device of the convolutions to fuse.
        dtypes: their types.

    Attributes:
        fused: number of patterns that were replaced, forward and backward.
    """

    def __init__(
        self,
        device: str = "cuda",
        dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float16),
    ) -> None:
        self.device, self.dtypes = device, tuple(dtypes)
        self.fused = [0, 0]

    def __call__(self, graph: Graph) -> None:
        """Replace the patterns in a graph."""
        for node in graph.find_nodes(op="call_function", target=aten.relu.default):
            self.fused[0] += self._fuse_forward(graph, node)
        for node in graph.find_nodes(op="call_function", target=aten.where.self):
            self.fused[1] += self._fuse_backward(graph, node)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """Identify this version of the pass in the compiler's cache."""
        return get_hash_for_files((__file__,), f"{self.device} {self.dtypes}")

    def _fuse_forward(self, graph: Graph, relu: Any) -> bool:
        """Replace relu(convolution) or relu(convolution + residual)."""
        convolution: Any = relu.args[0]
        residual: Any = None
        if _is_inner_sum(convolution):
            convolution, residual = convolution.args
            if not self._suits(convolution):
                convolution, residual = residual, convolution
        if not self._suits(convolution):
            return False
        if residual is not None and not self._are_maps_like(convolution, residual):
            return False
        maps, weight, bias, stride, padding, dilation = convolution.args[:6]
        with graph.inserting_before(relu):
            if _is_inner_convolution(residual) and residual.args[2] is not None:
                # Nothing else would add this bias without a pass over the maps.
                bias = _call(graph, aten.add.Tensor, bias, residual.args[2])
                rest = (None, *residual.args[3:])
                residual = _call(graph, residual.target, *residual.args[:2], *rest)
            fused = torch.ops.listwise.relu_convolution.default
            new = _call(graph, fused, maps, weight, bias, residual, stride, padding, dilation)
        relu.replace_all_uses_with(new)
        return True

    def _suits(self, node: Any) -> bool:
        """Whether a node is a convolution with a bias and a single reader that cuDNN can fuse."""
        if not _is_inner_convolution(node):
            return False
        maps, _, bias, _, padding, _, transposed, _, groups = node.args
        return (
            bias is not None
            and len(padding) == 2
            and not transposed
            and groups == 1
            and node.meta["val"].shape[1] % CHANNELS == 0
            and self._are_maps_like(maps)
            and self._are_maps_like(node)
        )

    def _are_maps_like(self, first: Any, *others: Any) -> bool:
        """Whether all are feature maps of one shape and a suitable type, in channels-last order."""
        expected = first.meta["val"]
        if expected.dtype not in self.dtypes or expected.device.type != self.device:
            return False
        for node in (first, *others):
            value = node.meta["val"] if isinstance(node, Node) else None
            if (
                value is None
                or value.shape != expected.shape
                or value.dtype != expected.dtype
                or not value.is_contiguous(memory_format=torch.channels_last)
            ):
                return False
        return True

    def _fuse_backward(self, graph: Graph, where: Any) -> bool:
        """Replace the gradient of a ReLU, where(output <= 0, 0, gradient), and its sums."""
        inactive, zero, gradient = where.args
        sums = [user for user in where.users if _is_sum_of_positions(user)]
        if not sums or not _is_inactive(inactive) or not _is_zero(zero):
            return False
        active, added = inactive.args[0], None
        if _is_inner_sum(gradient):
            gradient, added = gradient.args
        maps = (active, gradient) if added is None else (active, gradient, added)
        if where.meta["val"].ndim != 4 or where.meta["val"].shape[1] % CHANNELS:
            return False
        if not self._are_maps_like(where, *maps):
            return False
        with graph.inserting_before(where):
            fused = torch.ops.listwise.relu_gradient.default
            new = _call(graph, fused, gradient, added, active)
            masked, total = (_call(graph, operator.getitem, new, i) for i in range(2))
        for user in sums:
            user.replace_all_uses_with(total)
        where.replace_all_uses_with(masked)
        return True


def _call(graph: Graph, target: Any, *arguments: Any) -> Any:
    """Insert a call, with the example of its result that the compiler needs."""
    node = graph.call_function(target, arguments)
    node.meta["val"] = target(*torch.fx.node.map_arg(arguments, lambda each: each.meta["val"]))
    return node


def _is_inner_convolution(node: Any) -> bool:
    """Whether a node is a convolution with a single reader."""
    return _is_call(node, aten.convolution.default) and len(node.users) == 1


def _is_inner_sum(node: Any) -> bool:
    """Whether a node is a sum of two tensors with a single reader."""
    return (
        _is_call(node, aten.add.Tensor)
        and len(node.users) == 1
        and not node.kwargs
        and all(isinstance(argument, Node) for argument in node.args)
    )


def _is_sum_of_positions(node: Any) -> bool:
    return _is_call(node, aten.sum.dim_IntList) and node.args[1:] == (POSITIONS,)


def _is_inactive(node: Any) -> bool:
    """Whether a node compares a tensor with zero: tensor <= 0."""
    return _is_call(node, aten.le.Scalar) and bool(node.args[1] == 0)


def _is_zero(node: Any) -> bool:
    """Whether a node is the constant zero."""
    constants = (aten.full.default, aten.scalar_tensor.default)
    return _is_call(node, *constants) and bool(node.args[-1] == 0)


def _is_call(node: Any, *targets: Any) -> bool:
    return isinstance(node, Node) and node.target in targets
