"""ONNX files of models: the network, its whitening and its settings in one file."""

import hashlib
import os
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from listwise.descriptors.tuned import TunedSettings
from listwise.descriptors.whitening import Whitening, WhiteningInfo
from listwise.errors import InputError
from listwise.files import publish
from listwise.models.calibration import Calibration
from listwise.models.onnx_net import DESCRIPTORS, UNWHITENED, OnnxNet
from listwise.models.storage import NetConfig
from listwise.optional import requires

SUFFIX: Final = ".onnx"
FORMAT_VERSION: Final = 1
KEY: Final = "listwise"  # of the settings in the metadata of the file
MEAN, PROJECTION = "whitening.mean", "whitening.projection"
_LARGEST: Final = 2**31 - 1  # bytes of a protobuf message, as which ONNX files are stored


class OnnxInfo(BaseModel):
    """The settings in an ONNX file: JSON in its metadata, under the key `listwise`.

    Attributes:
        format_version: the version of the file format.
        network: the architecture and preprocessing of the network (mean and standard deviation are
            part of the graph).
        dim: the length of the descriptors.
        network_dim: the length of the descriptors before the whitening.
        precision: "float32", or "int8" for a quantized network.
        fingerprint: the fingerprint of the network.
        checksum: SHA-256 of the weights in the file.
        whitening: how the whitening was learned; None without a whitening.
        tuned: settings that apply where a user gives none, such as `max_side` and `scales`.
        calibration: turns scores into probabilities.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = FORMAT_VERSION
    network: NetConfig
    dim: int
    network_dim: int
    precision: Literal["float32", "int8"] = "float32"
    fingerprint: str
    checksum: str = ""
    whitening: WhiteningInfo | None = None
    tuned: TunedSettings | None = None
    calibration: Calibration | None = None


def write_onnx(path: Path, graph: Any, info: OnnxInfo, whitening: Whitening | None) -> None:
    """Add whitening and settings to the graph of a network, and write the file atomically.

    Args:
        path: the file to write.
        graph: an `onnx.ModelProto` with the input `images` and the output `descriptors`.
        info: the settings; the checksum is computed here.
        whitening: the whitening to add.

    Raises:
        InputError: the file cannot be written, or would be larger than ONNX allows.
    """
    if whitening is not None:
        _add_whitening(graph, whitening)
    graph.producer_name = "listwise"
    stored = info.model_copy(update={"checksum": checksum(graph)})
    del graph.metadata_props[:]
    graph.metadata_props.add(key=KEY, value=stored.model_dump_json())
    if graph.ByteSize() > _LARGEST:
        raise InputError(
            f"{path} would be larger than 2 GB, the limit of ONNX: use a smaller model"
        )
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_bytes(graph.SerializeToString())
        publish(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _add_whitening(graph: Any, whitening: Whitening) -> None:
    """Add the nodes of `Whitening.apply`; the descriptors of the network become an output too."""
    from onnx import TensorProto, helper, numpy_helper

    inner = graph.graph
    for node in inner.node:
        node.output[:] = [UNWHITENED if name == DESCRIPTORS else name for name in node.output]
        node.input[:] = [UNWHITENED if name == DESCRIPTORS else name for name in node.input]
    (output,) = inner.output
    output.name = UNWHITENED
    inner.initializer.extend(
        [
            numpy_helper.from_array(whitening.mean, MEAN),
            numpy_helper.from_array(whitening.projection, PROJECTION),
            numpy_helper.from_array(np.float32(1e-12), "whitening.smallest"),
            numpy_helper.from_array(np.array([1], np.int64), "whitening.axes"),
        ]
    )
    steps = [
        ("Sub", [UNWHITENED, MEAN], "whitening.centered", {}),
        ("Gemm", ["whitening.centered", PROJECTION], "whitening.projected", {"transB": 1}),
        (
            "ReduceL2",
            ["whitening.projected", "whitening.axes"],
            "whitening.length",
            {"keepdims": 1},
        ),
        ("Max", ["whitening.length", "whitening.smallest"], "whitening.divisor", {}),
        ("Div", ["whitening.projected", "whitening.divisor"], DESCRIPTORS, {}),
    ]
    inner.node.extend(
        helper.make_node(kind, given, [made], name=made, **options)
        for kind, given, made, options in steps
    )
    batch = output.type.tensor_type.shape.dim[0].dim_param
    rows = helper.make_tensor_value_info(DESCRIPTORS, TensorProto.FLOAT, [batch, whitening.dim])
    kept = [rows, *inner.output]
    del inner.output[:]
    inner.output.extend(kept)


def checksum(graph: Any) -> str:
    """Return the SHA-256 of the names, types, shapes and values of all weights of a graph."""
    from onnx import numpy_helper

    digest = hashlib.sha256()
    for weight in sorted(graph.graph.initializer, key=lambda weight: str(weight.name)):
        values = numpy_helper.to_array(weight)
        digest.update(f"{weight.name} {values.dtype} {values.shape}".encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def read_onnx(path: Path) -> tuple[OnnxNet, Whitening | None, OnnxInfo]:
    """Open an ONNX file that `write_onnx` wrote.

    Raises:
        InputError: it is damaged, of a newer version, or not written by Listwise.
    """
    with requires("export", "a model in an ONNX file"):
        import onnx

    if not path.is_file():
        raise InputError(f"no file {path}: write it with listwise export")
    try:
        graph = onnx.load_model_from_string(path.read_bytes())
    except Exception as error:  # protobuf's errors depend on its version
        raise InputError(
            f"{path} is not an ONNX file, or is damaged: export the model again"
        ) from error
    info = _read_info(path, {each.key: each.value for each in graph.metadata_props})
    try:
        if checksum(graph) != info.checksum:
            raise ValueError
        whitening = _read_whitening(graph, info)
    except (KeyError, ValueError) as error:
        raise InputError(
            f"{path} is damaged or was edited: its weights do not match the checksum saved with "
            "them; export the model again"
        ) from error
    output = DESCRIPTORS if whitening is None else UNWHITENED
    net = OnnxNet(path, info.network, info.network_dim, info.fingerprint, output)
    return net, whitening, info


def _read_info(path: Path, metadata: dict[str, str]) -> OnnxInfo:
    import json

    if KEY not in metadata:
        raise InputError(
            f"{path} is not an ONNX file of Listwise: write one with listwise export MODEL "
            f"{path.name}"
        )
    try:
        content = json.loads(metadata[KEY])
        version = content["format_version"]
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise InputError(
                f"{path} was written by a newer Listwise (format {version}, this one reads "
                f"{FORMAT_VERSION}): pip install --upgrade listwise"
            )
        return OnnxInfo.model_validate(content)
    except (KeyError, TypeError, ValidationError, json.JSONDecodeError) as error:
        raise InputError(f"the settings in {path} are damaged: export the model again") from error


def _read_whitening(graph: Any, info: OnnxInfo) -> Whitening | None:
    from onnx import numpy_helper

    if info.whitening is None:
        return None
    weights = {each.name: each for each in graph.graph.initializer if each.name.startswith("white")}
    mean, projection = (numpy_helper.to_array(weights[name]) for name in (MEAN, PROJECTION))
    return Whitening(mean, projection, info.whitening)
