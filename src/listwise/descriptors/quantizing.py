"""Quantize a network in an ONNX graph to int8."""

import contextlib
import io
import logging
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from listwise.models.onnx_net import INPUT


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

    with tempfile.TemporaryDirectory() as folder, _quiet():
        source, out = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        onnx.save(graph, source)
        quantize_static(
            source,
            out,
            _Photos(photos),
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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress onnxruntime's advice to people who quantize by hand."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


class _Photos:
    """Gives the photos one by one, as onnxruntime reads them."""

    def __init__(self, photos: Iterable[Tensor]) -> None:
        self._photos: Iterator[Tensor] = iter(photos)

    def get_next(self) -> dict[str, Any] | None:
        photo = next(self._photos, None)
        if photo is None:
            return None
        return {INPUT: (photo[None].to(torch.float32) / 255).numpy()}
