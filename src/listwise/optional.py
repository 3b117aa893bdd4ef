"""Optional packages: errors that name the command which installs a missing one."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING

from listwise.errors import InputError

if TYPE_CHECKING:
    import torch

# Packages whose name differs from the name of their module.
DISTRIBUTIONS = {
    "cv2": "opencv-python-headless",
    "faiss": "faiss-cpu",
    "grpc": "grpcio",
    "milvus_lite": "milvus-lite",
    "prometheus_client": "prometheus-client",
    "python_multipart": "python-multipart",
    "pytorch_metric_learning": "pytorch-metric-learning",
    "yaml": "pyyaml",
}


_TRIAL = threading.Lock()


class MissingDependencyError(ImportError, InputError):
    """A package is not installed; the message names the command that installs it."""


@contextmanager
def requires(extra: str, purpose: str) -> Iterator[None]:
    """Turn a failed import inside this context into an error that names the extra to install.

    Args:
        extra: the extra that installs the package.
        purpose: what needs the package, the beginning of the message: "an index in a folder needs
            lancedb: pip install 'listwise[index]'".

    Raises:
        MissingDependencyError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        raise MissingDependencyError(
            f"{purpose} needs {DISTRIBUTIONS.get(module, module)}: pip install 'listwise[{extra}]'",
            name=module,
        ) from error


@cache
def has_triton() -> bool:
    """Whether Triton 3.3 (of PyTorch 2.7) or newer is installed, which the kernels need.

    The interpreters of older versions, in which the tests run the kernels, corrupt memory.
    """
    try:
        import triton
    except ImportError:
        return False
    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (3, 3)


def runs_triton(device: "torch.device") -> bool:
    """Whether Triton can compile and run kernels on a device; a trial shows it once.

    Triton also needs a C compiler and a GPU that it supports.
    """
    with _TRIAL:  # another thread may be trying it
        return _triton_trial(device)


@cache
def _triton_trial(device: "torch.device") -> bool:
    if not has_triton():
        return False
    try:
        import torch

        from listwise.kernel_trial import kernel_doubles

        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return kernel_doubles(device)
    except Exception:  # each missing part has its own error
        return False
