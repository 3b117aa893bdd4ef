"""ONNX files of models: network, whitening and settings in one file, computed by onnxruntime."""

import hashlib
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor

from listwise.descriptors.whitening import Whitening
from listwise.errors import InputError, first_line
from listwise.files import write_bytes
from listwise.machine import core_count
from listwise.models.net import Network
from listwise.models.storage import KEY, ModelInfo
from listwise.optional import requires

SUFFIX: Final = ".onnx"
INPUT: Final = "images"
# The descriptors before the whitening; a file without a whitening has only the first output.
DESCRIPTORS, UNWHITENED = "descriptors", "unwhitened"
MEAN, PROJECTION = "whitening.mean", "whitening.projection"
_CHECKSUM: Final = f"{KEY}.checksum"
_LARGEST: Final = 2**31 - 1  # bytes of a protobuf message, as which ONNX files are stored


class OnnxInfo(ModelInfo):
    """The settings in an ONNX file: JSON in its metadata, under the key `listwise`.

    Another key has the checksum of this text and of everything else in the file.

    The mean and standard deviation of `network` are part of the graph.

    Attributes:
        dim: the length of the descriptors.
        network_dim: the length of the descriptors before the whitening.
        precision: "float32", or "int8" for a quantized network.
        fingerprint: the fingerprint of the network.
    """

    dim: int
    network_dim: int
    precision: Literal["float32", "int8"] = "float32"
    fingerprint: str


class OnnxNet(Network):
    """A network in an ONNX file that `Model.export` wrote; `load_model` loads it.

    It maps images to unit descriptors as a `RetrievalNet` does: [B, 3, H, W], uint8 or float in
    [0, 1] -> [B, dim]. The whitening in the file is not applied. Its weights cannot be changed.

    Args:
        file: the ONNX file.
        info: the settings in it.
    """

    def __init__(self, file: Path, info: OnnxInfo) -> None:
        super().__init__()
        self.config, self.dim = info.network, info.network_dim
        self._fingerprint = info.fingerprint
        self._output = DESCRIPTORS if info.whitening is None else UNWHITENED
        self._session = open_session(file)
        # The graph normalizes images itself; the buffer tells the device, as in a `RetrievalNet`.
        mean = torch.tensor(self.config.mean).view(3, 1, 1)
        self.register_buffer("mean", mean, persistent=False)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        """Compute descriptors: [B, 3, H, W], uint8 or float in [0, 1] -> [B, dim], unit rows."""
        if images.dtype == torch.uint8:
            images = images.float() / 255
        (rows,) = run_session(self._session, [self._output], images.float())
        return rows

    def fingerprint(self) -> str:
        """Return the fingerprint of the network: that of the exported one, if not quantized."""
        return self._fingerprint


def write_onnx(path: Path, graph: Any, info: OnnxInfo, whitening: Whitening | None) -> None:
    """Add whitening and settings to the graph of a network, and write the file atomically.

    Args:
        path: the file to write.
        graph: an `onnx.ModelProto` with the input `images` and the output `descriptors`.
        info: the settings.
        whitening: the whitening to add.

    Raises:
        InputError: the file cannot be written, or would be larger than ONNX allows.
    """
    if whitening is not None:
        _add_whitening(graph, whitening)
    graph.producer_name = "listwise"
    del graph.metadata_props[:]
    settings = info.model_dump_json()
    sums = {KEY: settings, _CHECKSUM: checksum(graph, settings)}
    for key, value in sums.items():
        graph.metadata_props.add(key=key, value=value)
    if graph.ByteSize() > _LARGEST:
        raise InputError(
            f"{path} would be larger than 2 GB, the limit of ONNX: use a smaller model"
        )
    write_bytes(path, graph.SerializeToString())


def _add_whitening(graph: Any, whitening: Whitening) -> None:
    """Add the nodes of `Whitening.apply`; the descriptors of the network become an output too."""
    from onnx import TensorProto, helper, numpy_helper

    inner = graph.graph
    for node in inner.node:
        node.output[:] = [UNWHITENED if name == DESCRIPTORS else name for name in node.output]
        node.input[:] = [UNWHITENED if name == DESCRIPTORS else name for name in node.input]
    (output,) = inner.output
    output.name = UNWHITENED
    values: dict[str, Any] = {MEAN: whitening.mean, PROJECTION: whitening.projection}
    values |= {"whitening.smallest": np.float32(1e-12), "whitening.axes": np.array([1], np.int64)}
    inner.initializer.extend(numpy_helper.from_array(each, name) for name, each in values.items())
    steps = [
        ("Sub", [UNWHITENED, MEAN], "whitening.centered", {}),
        ("Gemm", ["whitening.centered", PROJECTION], "whitening.projected", {"transB": 1}),
        ("ReduceL2", ["whitening.projected", "whitening.axes"], "whitening.length", {}),
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


def checksum(graph: Any, settings: str = "") -> str:
    """Return the SHA-256 of a model without metadata (graph and weights), and of settings."""
    digest = hashlib.sha256(graph.SerializeToString(deterministic=True))
    digest.update(settings.encode())
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
        metadata = {each.key: each.value for each in graph.metadata_props}
    except Exception as error:  # protobuf's errors depend on its version
        raise InputError(
            f"{path} is not an ONNX file, or is damaged: export the model again"
        ) from error
    if KEY not in metadata:
        raise InputError(
            f"{path} is not an ONNX file of Listwise: write one with listwise export MODEL "
            f"{path.name}"
        )
    info, whitening = OnnxInfo.parse(metadata[KEY], path, "export the model again"), None
    try:
        del graph.metadata_props[:]
        # Weights in other files, which onnxruntime would read, have no checksum.
        external = any(weight.data_location for weight in graph.graph.initializer)
        if external or checksum(graph, metadata[KEY]) != metadata[_CHECKSUM]:
            raise ValueError
        if info.whitening is not None:
            weights = {each.name: each for each in graph.graph.initializer}
            mean, projection = (onnx.numpy_helper.to_array(weights[n]) for n in (MEAN, PROJECTION))
            whitening = Whitening(mean, projection, info.whitening)
    except (KeyError, ValueError) as error:
        raise InputError(
            f"{path} is damaged or was edited: it does not match its checksum; export the model "
            "again"
        ) from error
    return OnnxNet(path, info), whitening, info


def open_session(model: Path | bytes) -> Any:
    """Open an ONNX file, or the bytes of one, with onnxruntime on the CPU.

    Raises:
        InputError: onnxruntime cannot run it.
    """
    with requires("export", "a model in an ONNX file"):
        import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = min(core_count(), torch.get_num_threads())
    # Waiting threads sleep: on a busy machine, spinning ones take cores from those they wait for.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.enable_mem_pattern = False  # a plan of the memory holds for one shape only
    options.log_severity_level = 3
    given = model if isinstance(model, bytes) else str(model)
    try:
        return onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no public class
        what = "the exported network" if isinstance(model, bytes) else str(model)
        raise InputError(
            f"onnxruntime {onnxruntime.__version__} cannot run {what} ({first_line(error)}): "
            "update onnxruntime, or export the model again"
        ) from error


def run_session(session: Any, outputs: list[str], images: Tensor) -> list[Tensor]:
    """Compute outputs of a graph for images [B, 3, H, W], float in [0, 1]."""
    try:
        found = session.run(outputs, {INPUT: images.contiguous().numpy()})
    except Exception as error:
        height, width = images.shape[2:]
        raise InputError(
            f"the ONNX network fails on images of {width} × {height} pixels ({first_line(error)})"
        ) from error
    return [torch.from_numpy(rows) for rows in found]
