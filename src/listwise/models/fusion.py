"""Fuse 1 × 1 convolutions with what follows them, in the graphs of torch.compile.

PyTorch's compiler fuses element-wise operations with each other, but not with convolutions. Each
bias, ReLU and residual connection, and the gradient of each, therefore reads and writes whole
feature maps, which takes as long as many convolutions. But a 1 × 1 convolution is a matrix product,
and a kernel that computes it can apply them before it writes its result:

- *Forward*: relu(convolution + bias + residual).
- *Backward*: (gradient of the input + gradient of the residual) where the input was positive. The
  kernel also sums the result over all positions: the gradient of the bias before it.

`PointwiseFusion` finds these patterns in the graphs that the compiler made of the forward and of
the backward pass, and replaces them by one operator each.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

aten = torch.ops.aten

# The kernel reads so many channels at a time.
CHANNELS = 64
POSITIONS = [0, 2, 3]  # all dimensions of feature maps but the channels
_LAYOUT = (torch.Tag.needs_fixed_stride_order,)


@torch.library.custom_op("listwise::relu_convolution", mutates_args=(), tags=_LAYOUT)
def relu_convolution(maps: Tensor, weight: Tensor, bias: Tensor, added: Tensor | None) -> Tensor:
    """Compute relu(convolution + bias + added): [B, K, H, W], [N, K, 1, 1], [N] -> [B, N, H, W]."""
    result = _empty_maps(maps, len(weight))
    if not maps.is_cuda:
        total = torch.nn.functional.conv2d(maps, weight, bias)
        return result.copy_(torch.relu(total if added is None else total + added))
    from listwise.models import fusion_kernels

    fusion_kernels.relu_convolution(
        _rows(maps), weight.flatten(1), bias, None if added is None else _rows(added), _rows(result)
    )
    return result


@relu_convolution.register_fake
def _(maps: Tensor, weight: Tensor, bias: Tensor, added: Tensor | None) -> Tensor:
    return _empty_maps(maps, len(weight))


@torch.library.custom_op("listwise::relu_gradient", mutates_args=(), tags=_LAYOUT)
def relu_gradient(
    gradient: Tensor, weight: Tensor, added: Tensor | None, active: Tensor
) -> tuple[Tensor, Tensor]:
    """Backpropagate through a convolution and the ReLU that computed its input `active`.

    Returns the gradient before the ReLU, and its sum over all positions. `added` is another
    gradient of `active`. Shapes: [B, K, H, W], [K, N, 1, 1], [B, N, H, W] -> [B, N, H, W], [N].
    """
    result = _empty_maps(gradient, weight.shape[1])
    if not gradient.is_cuda:
        total = torch.nn.functional.conv2d(gradient, weight.transpose(0, 1))
        result.copy_(torch.where(active > 0, total if added is None else total + added, 0))
        return result, result.sum(POSITIONS)
    from listwise.models import fusion_kernels

    sums = fusion_kernels.relu_gradient(
        _rows(gradient),
        weight.flatten(1),
        None if added is None else _rows(added),
        _rows(active),
        _rows(result),
    )
    return result, sums.to(gradient.dtype)


@relu_gradient.register_fake
def _(
    gradient: Tensor, weight: Tensor, added: Tensor | None, active: Tensor
) -> tuple[Tensor, Tensor]:
    return _empty_maps(gradient, weight.shape[1]), gradient.new_empty(weight.shape[1])


def _empty_maps(like: Tensor, channels: int) -> Tensor:
    images, _, height, width = like.shape
    return torch.empty(
        (images, channels, height, width),
        dtype=like.dtype,
        device=like.device,
        memory_format=torch.channels_last,
    )


def _rows(maps: Tensor) -> Tensor:
    """Return maps [B, C, H, W] in channels-last order as a matrix [B H W, C]."""
    return maps.permute(0, 2, 3, 1).flatten(0, 2).contiguous()


class PointwiseFusion(CustomGraphPass):
    """A pass of torch.compile (`post_grad_custom_pre_pass`) that fuses 1 × 1 convolutions.

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
            if not self._is_pointwise(convolution):
                convolution, residual = residual, convolution
        if not self._is_pointwise(convolution):
            return False
        maps, weight, bias = convolution.args[:3]
        if residual is not None and not self._are_maps_like(convolution, residual):
            return False
        with graph.inserting_before(relu):
            if _is_inner_convolution(residual) and residual.args[2] is not None:
                # Nothing else would add this bias without a pass over the maps.
                bias = _call(graph, aten.add.Tensor, bias, residual.args[2])
                residual = _call(
                    graph, residual.target, *residual.args[:2], None, *residual.args[3:]
                )
            new = _call(
                graph, torch.ops.listwise.relu_convolution.default, maps, weight, bias, residual
            )
        relu.replace_all_uses_with(new)
        return True

    def _is_pointwise(self, node: Any) -> bool:
        if not _is_inner_convolution(node) or node.args[2] is None:
            return False
        maps, weight = node.args[:2]
        return _is_plain(node.args[3:]) and self._suits(weight) and self._are_maps_like(maps, maps)

    def _suits(self, weight: Any) -> bool:
        """Whether the kernel takes this weight [N, K, 1, 1]."""
        value = weight.meta["val"]
        outputs, inputs, *window = value.shape
        return (
            value.device.type == self.device
            and value.dtype in self.dtypes
            and window == [1, 1]
            and outputs % CHANNELS == inputs % CHANNELS == 0
        )

    def _are_maps_like(self, first: Any, *others: Any) -> bool:
        """Whether all are feature maps of one shape and type in channels-last order."""
        expected = first.meta["val"]
        if expected.dtype not in self.dtypes:
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
        """Replace the gradient of a ReLU whose output is the input of a convolution."""
        inactive, zero, gradient = where.args
        if not _is_inactive(inactive) or not _is_zero(zero):
            return False
        active, source = inactive.args[0], gradient
        added: Any = None
        if _is_inner_sum(gradient):
            source, added = gradient.args
            if self._backward_of(source) is None:
                source, added = added, source
        backward = self._backward_of(source)
        if backward is None or not self._are_maps_like(
            where, active, *(() if added is None else (added,))
        ):
            return False
        with graph.inserting_before(where):
            call = torch.ops.listwise.relu_gradient.default
            new = _call(graph, call, backward.args[0], backward.args[2], added, active)
            masked, sums = (_call(graph, operator.getitem, new, i) for i in range(2))
        for user in list(where.users):
            if user.target is aten.sum.dim_IntList and user.args[1:] == (POSITIONS,):
                user.replace_all_uses_with(sums)
        where.replace_all_uses_with(masked)
        # The gradient of the weight is still computed by the library.
        wanted = [False, *backward.args[10][1:]]
        with graph.inserting_before(backward):
            rest = _call(graph, backward.target, *backward.args[:10], wanted)
        backward.replace_all_uses_with(rest)
        return True

    def _backward_of(self, node: Any) -> Any:
        """Return the backward pass of a 1 × 1 convolution that only this gradient is read from."""
        if not isinstance(node, Node) or node.target is not operator.getitem:
            return None
        backward: Any
        backward, place = node.args
        if place != 0 or len(node.users) != 1:
            return None
        if backward.target is not aten.convolution_backward.default:
            return None
        gradient, _, weight, _, *settings, wanted = backward.args
        if wanted[2] or not _is_plain(settings) or not self._suits(weight):
            return None
        return backward if self._are_maps_like(gradient, gradient) else None


def _call(graph: Graph, target: Any, *arguments: Any) -> Any:
    """Insert a call, with the example of its result that the compiler needs."""
    node = graph.call_function(target, arguments)
    node.meta["val"] = target(*torch.fx.node.map_arg(arguments, lambda each: each.meta["val"]))
    return node


def _is_inner_convolution(node: Any) -> bool:
    """Whether a node is a convolution with a single reader."""
    return (
        isinstance(node, Node) and node.target is aten.convolution.default and len(node.users) == 1
    )


def _is_inner_sum(node: Any) -> bool:
    """Whether a node is a sum of two tensors with a single reader."""
    return (
        isinstance(node, Node)
        and node.target is aten.add.Tensor
        and len(node.users) == 1
        and not node.kwargs
        and all(isinstance(argument, Node) for argument in node.args)
    )


def _is_plain(settings: Sequence[Any]) -> bool:
    """Whether stride, padding, dilation, transposition and groups make a 1 × 1 window a product."""
    stride, padding, _, transposed, _, groups = settings
    return list(stride) == [1, 1] and list(padding) == [0, 0] and not transposed and groups == 1


def _is_inactive(node: Any) -> bool:
    """Whether a node compares a tensor with zero: tensor <= 0."""
    return isinstance(node, Node) and node.target is aten.le.Scalar and bool(node.args[1] == 0)


def _is_zero(node: Any) -> bool:
    """Whether a node is the constant zero: full([], 0) or scalar_tensor(0)."""
    constants = (aten.full.default, aten.scalar_tensor.default)
    return isinstance(node, Node) and node.target in constants and bool(node.args[-1] == 0)
