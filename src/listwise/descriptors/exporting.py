"""Export a network and its whitening to an ONNX file."""

import copy
import errno
import hashlib
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
from timm.layers import Conv2dSame
from torch import Tensor, nn

from listwise.descriptors.onnx_file import SUFFIX, OnnxInfo, checksum, write_onnx
from listwise.descriptors.tuned import TunedSettings
from listwise.descriptors.whitening import Whitening
from listwise.errors import InputError, first_line
from listwise.models import RetrievalNet
from listwise.models.calibration import Calibration
from listwise.models.onnx_net import DESCRIPTORS, INPUT, open_session, run_session
from listwise.models.pooling import RMAC
from listwise.optional import requires

# The first version of ONNX whose Resize is that of PyTorch, and the last that PyTorch writes.
OPSETS: Final = range(18, 24)
# The largest difference between the descriptors of PyTorch and of onnxruntime.
TOLERANCE: Final = 1e-4


def export_network(
    path: str | Path,
    net: RetrievalNet,
    whitening: Whitening | None = None,
    tuned: TunedSettings | None = None,
    calibration: Calibration | None = None,
    *,
    opset: int = OPSETS.start,
    photos: Iterable[Tensor] | None = None,
) -> OnnxInfo:
    """Write a network, its whitening and its settings to an ONNX file; return the settings.

    Args:
        path: the file to write; its name ends with .onnx.
        net: the network.
        whitening: the whitening of its descriptors.
        tuned: settings that apply where a user of the file gives none.
        calibration: turns scores into probabilities; left out of a quantized file, whose scores
            differ.
        opset: the version of ONNX's operators.
        photos: images uint8 [3, H, W] on which the range of each activation is measured, to
            quantize the network to int8; None exports it in float32.

    Raises:
        InputError: the path cannot be written, or the network cannot be exported.
    """
    path = check_path(path)
    if opset not in OPSETS:
        raise InputError(f"`opset` must be from {OPSETS.start} to {OPSETS.stop - 1}, not {opset}")
    if isinstance(net.pooling, RMAC):
        raise _not_exportable(net, "the regions of R-MAC depend on the size of the image")
    with requires("export", "the export to ONNX"):
        import onnx
        import onnxruntime
        import onnxscript

        _ = onnx, onnxruntime, onnxscript
    plain = copy.deepcopy(net).float().cpu().eval()
    graph = trace(plain, opset)
    compare(plain, graph)
    fingerprint = net.fingerprint()
    if photos is not None:
        from listwise.descriptors.quantizing import quantize

        graph = quantize(graph, photos)
        fingerprint = hashlib.sha256(f"{fingerprint} int8 {checksum(graph)}".encode()).hexdigest()
    info = OnnxInfo(
        network=net.config,
        dim=net.dim if whitening is None else whitening.dim,
        network_dim=net.dim,
        precision="float32" if photos is None else "int8",
        fingerprint=fingerprint,
        whitening=None if whitening is None else whitening.info,
        tuned=None if tuned is None else tuned.model_copy(update={"network": fingerprint}),
        calibration=calibration if photos is None else None,
    )
    write_onnx(path, graph, info, whitening)
    return info


def check_path(path: str | Path) -> Path:
    """Refuse a path that cannot be written, before the work that it is for."""
    path = Path(path).expanduser()
    if path.suffix != SUFFIX:
        raise InputError(f"{path} must end with {SUFFIX}: give a file such as model{SUFFIX}")
    if path.is_dir():
        raise InputError(f"{path} is a folder: give a file such as model{SUFFIX}")
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"cannot write {path}: {os.strerror(errno.EACCES)}")
    return path


def trace(net: RetrievalNet, opset: int) -> Any:
    """Return the network as an `onnx.ModelProto`, for images of any number, height and width.

    Its input `images` is float32 [batch, 3, height, width] in [0, 1], its output `descriptors` is
    float32 [batch, dim].
    """
    import onnx

    side = net.config.image_size
    # Height, width and batch differ, and none is 1: PyTorch would take equal sizes for the same.
    example = torch.rand(2, 3, side, side + 32, generator=torch.Generator().manual_seed(0))
    if not hasattr(torch.export.Dim, "DYNAMIC"):
        raise InputError(f"the export needs a newer PyTorch than {torch.__version__}: update it")
    any_size = torch.export.Dim.DYNAMIC
    sizes = ({0: any_size, 2: any_size, 3: any_size},)
    traced = copy.deepcopy(net)
    padded = _pad_statically(traced)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            made = torch.onnx.export(
                traced,
                (example,),
                dynamo=True,
                input_names=[INPUT],
                output_names=[DESCRIPTORS],
                dynamic_shapes=sizes,
                opset_version=opset,
                verbose=False,
            )
    except InputError:
        raise
    except Exception as error:  # PyTorch raises many kinds
        raise _not_exportable(net, first_line(error)) from error
    assert made is not None
    graph = made.model_proto
    for node in graph.graph.node:
        if node.op_type == "Conv" and node.input[1] in padded:
            kept = [each for each in node.attribute if each.name not in ("pads", "auto_pad")]
            del node.attribute[:]
            node.attribute.extend([*kept, onnx.helper.make_attribute("auto_pad", "SAME_UPPER")])
    _tidy(graph)
    return graph


def _pad_statically(net: nn.Module) -> set[str]:
    """Give convolutions with TensorFlow's padding a fixed one; return the names of their weights.

    TensorFlow's padding depends on the size of the image, and PyTorch's exporter takes very long
    for the formulas of many such layers. ONNX has it as an option of a convolution. The output of
    both has the same size, so the rest of the graph stays right.
    """
    names = set()
    for name, module in net.named_modules():
        if isinstance(module, Conv2dSame):
            module.__class__ = nn.Conv2d
            sides = zip(module.kernel_size, module.dilation, strict=True)
            module.padding = tuple((kernel - 1) * dilation // 2 for kernel, dilation in sides)
            names.add(f"{name}.weight")
    return names


def _tidy(graph: Any) -> None:
    """Give the sizes of input and output readable names, and remove notes about the source code."""
    inner = graph.graph
    for part in (inner, *inner.node, *inner.input, *inner.output, *inner.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    (given,), (made,) = graph.graph.input, graph.graph.output
    for shape, names in (given, {0: "batch", 2: "height", 3: "width"}), (made, {0: "batch"}):
        for axis, name in names.items():
            shape.type.tensor_type.shape.dim[axis].dim_param = name
    del graph.graph.value_info[:]


def compare(net: RetrievalNet, graph: Any) -> None:
    """Refuse a graph that does not compute what the network does, for images of several shapes."""
    session = open_session(graph.SerializeToString())
    side = net.config.image_size
    random = torch.Generator().manual_seed(1)
    for count, height, width in (1, side, side), (2, side + 24, side // 2 + 8):
        images = torch.rand(count, 3, height, width, generator=random)
        with torch.inference_mode():
            expected = net(images)
        try:
            (found,) = run_session(session, [DESCRIPTORS], images)
        except InputError as error:
            raise _not_exportable(net, str(error)) from error
        difference = float((found - expected).abs().max())
        if not difference <= TOLERANCE:
            reason = f"for images of {width} × {height} pixels its descriptors differ by "
            raise _not_exportable(net, f"{reason}{difference:.1g}")


def _not_exportable(net: RetrievalNet, reason: str) -> InputError:
    return InputError(
        f"the backbone {net.config.backbone!r} with the pooling {net.config.pooling!r} cannot be "
        f"exported for images of any size ({reason}): use another backbone or pooling"
    )
