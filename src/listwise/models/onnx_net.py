"""Networks in ONNX files, computed by onnxruntime on the CPU."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from listwise.errors import InputError, first_line
from listwise.machine import core_count
from listwise.models.net import RetrievalNet
from listwise.models.storage import NetConfig
from listwise.optional import requires

INPUT = "images"
# The descriptors before the whitening; a file without a whitening has only the first output.
DESCRIPTORS, UNWHITENED = "descriptors", "unwhitened"


class OnnxNet(nn.Module):
    """A network in an ONNX file that `Model.export` wrote; `load_model` loads it.

    It maps images to unit descriptors as a `RetrievalNet` does: [B, 3, H, W], uint8 or float in
    [0, 1] -> [B, dim]. The whitening in the file is not applied. Its weights cannot be changed.

    Args:
        file: the ONNX file.
        config: the architecture and preprocessing of the network.
        dim: the length of its descriptors.
        fingerprint: the fingerprint of its weights.
        output: the output of the file that has the descriptors.
    """

    mean: Tensor

    def __init__(
        self, file: Path, config: NetConfig, dim: int, fingerprint: str, output: str
    ) -> None:
        super().__init__()
        self.file, self.config, self.dim = file, config, dim
        self._fingerprint, self._output = fingerprint, output
        self._session = open_session(file)
        # The graph normalizes images itself; the buffer tells the device, as in a `RetrievalNet`.
        self.register_buffer("mean", torch.tensor(config.mean).view(3, 1, 1), persistent=False)
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


Network = RetrievalNet | OnnxNet
"""What a model computes descriptors with."""


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
