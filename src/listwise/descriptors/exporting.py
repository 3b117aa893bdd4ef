"""Export a model to an ONNX file."""

import copy
import errno
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from timm.layers import Conv2dSame
from torch import Tensor, nn

from listwise.descriptors.onnx_file import (
    DESCRIPTORS,
    INPUT,
    SUFFIX,
    OnnxInfo,
    checksum,
    open_session,
    run_session,
    write_onnx,
)
from listwise.descriptors.whitening import Whitening
from listwise.errors import InputError, first_line
from listwise.files import write_text
from listwise.models import RetrievalNet
from listwise.models.pooling import RMAC
from listwise.models.storage import ModelInfo
from listwise.optional import requires

MODEL_FILE: Final = "model.onnx"
SETTINGS_FILE: Final = "settings.json"
PAGE: Final = ("index.html", "listwise.js")


def check_path(path: str | Path, web: bool = False) -> Path:
    """Refuse a file, or with `web` a folder, that cannot be written; return its path."""
    path = Path(path).expanduser()
    if not web and path.suffix != SUFFIX:
        raise InputError(f"{path} must end with {SUFFIX}: give a file such as model{SUFFIX}")
    if path.exists() and path.is_dir() != web:
        kind, other = ("file", "a folder") if web else ("folder", f"a file such as model{SUFFIX}")
        raise InputError(f"{path} is a {kind}: give {other}")
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: the folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"cannot write {path}: {os.strerror(errno.EACCES)}")
    return path


def add_page(folder: Path, info: OnnxInfo) -> None:
    """Write the settings that a page needs, and the example page, next to the model."""
    settings = {
        "backbone": info.network.backbone,
        "dim": info.dim,
        "max_side": info.tuned.max_side if info.tuned else None,
        "precision": info.precision,
        "fingerprint": info.fingerprint,
    }
    write_text(folder / SETTINGS_FILE, json.dumps(settings, indent=2) + "\n")
    for name in PAGE:
        shutil.copyfile(Path(__file__).parent / "web" / name, folder / name)


def quantize(graph: Any, photos: Iterable[Tensor]) -> Any:
    """Return the graph with convolutions and matrix products in int8.

    Weights have 7 bits and one scale per output channel. Activations have 8 bits and one scale per
    tensor, from the values that the photos cause. All other operations stay in float32.

    Args:
        graph: an `onnx.ModelProto` of a network.
        photos: images uint8 [3, H, W] of any sizes.
    """
    import onnx
    from onnxruntime.quantization import (
        CalibrationMethod,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    feeds = ({INPUT: (photo[None].float() / 255).numpy()} for photo in photos)
    reader = SimpleNamespace(get_next=lambda: next(feeds, None))  # as onnxruntime reads them
    # Otherwise onnxruntime advises to prepare the graph, which was optimized when it was exported.
    graph.metadata_props.add(key="onnx.quant.pre_process", value="onnxruntime.quant")
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        onnx.save(graph, source)
        quantize_static(
            source,
            out,
            reader,
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            # Weights of 7 bits: processors without VNNI add two products in 16 bits, which
            # overflow with 8 bits.
            reduce_range=True,
            weight_type=QuantType.QInt8,
            activation_type=QuantType.QUInt8,
            calibrate_method=CalibrationMethod.MinMax,
            # Relu and Clip (ReLU6) too, so that the result of a convolution is quantized after its
            # activation. The range before it is much wider and would waste most of the 8 bits.
            op_types_to_quantize=["Conv", "MatMul", "Gemm", "Relu", "Clip"],
        )
        return onnx.load(out)


# The first version of ONNX's operators whose Resize is that of PyTorch.
OPSET: Final = 18
# The largest difference between the descriptors of PyTorch and of onnxruntime.
TOLERANCE: Final = 1e-4


def export_model(
    net: RetrievalNet,
    whitening: Whitening | None,
    info: ModelInfo,
    path: str | Path,
    photos: Iterable[Tensor] | None = None,
    web: bool = False,
) -> Path:
    """Write a model to an ONNX file, or with `web` to a folder with a page; return the file.

    Args:
        net: the network.
        whitening: the whitening of its descriptors.
        info: the settings; the calibration is left out of a quantized file, whose scores differ.
        path: the file to write, whose name ends with .onnx, or the folder.
        photos: images uint8 [3, H, W] on which the range of each activation is measured, to
            quantize the network to int8; None exports it in float32.
        web: write a folder with the file, its settings and an example page.

    Raises:
        InputError: the path cannot be written, or the network cannot be exported.
    """
    path = check_path(path, web)
    if isinstance(net.pooling, RMAC):
        raise _not_exportable(net, "the regions of R-MAC depend on the size of the image")
    with requires("export", "the export to ONNX"):
        import onnx
        import onnxruntime
        import onnxscript

        _ = onnx, onnxruntime, onnxscript
    plain = copy.deepcopy(net).float().cpu().eval()
    graph = trace(plain)
    compare(plain, graph)
    fingerprint = net.fingerprint()
    if photos is not None:
        graph = quantize(graph, photos)
        fingerprint = hashlib.sha256(f"{fingerprint} int8 {checksum(graph)}".encode()).hexdigest()
    kept = dict(info) if photos is None else {**dict(info), "calibration": None}
    stored = OnnxInfo(
        **kept,
        dim=net.dim if whitening is None else whitening.dim,
        network_dim=net.dim,
        precision="float32" if photos is None else "int8",
        fingerprint=fingerprint,
    )
    if web:
        path.mkdir(exist_ok=True)
        add_page(path, stored)
        path = path / MODEL_FILE
    write_onnx(path, graph, stored, whitening)
    return path


def trace(net: RetrievalNet) -> Any:
    """Return the network as an `onnx.ModelProto`, for images of any number, height and width.

    Its input `images` is float32 [batch, 3, height, width] in [0, 1], its output `descriptors` is
    float32 [batch, dim].
    """
    import onnx

    side = net.config.image_size
    # Height, width and batch differ, and none is 1: PyTorch would take equal sizes for the same.
    example = torch.rand(2, 3, side, side + 32, generator=torch.Generator().manual_seed(0))
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
                opset_version=OPSET,
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
