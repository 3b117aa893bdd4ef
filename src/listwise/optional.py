"""Packages that only some installations have, and what to say where one is missing."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from listwise.errors import InputError

# What to install for a module that is named otherwise.
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


class MissingDependencyError(ImportError, InputError):
    """A package is not installed; the message names the command that installs it."""


@contextmanager
def requires(extra: str, purpose: str) -> Iterator[None]:
    """Import inside this context what the extra `extra` installs.

    A package that is missing raises a `MissingDependencyError` that begins with `purpose`:
    "an index in a folder needs lancedb: pip install 'listwise[index]'".
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
    """Whether Triton is one that the kernels were tested with: 3.3 (of PyTorch 2.7) or newer.

    The interpreters of older ones, in which the tests run the kernels, corrupt memory.
    """
    try:
        import triton
    except ImportError:
        return False
    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (3, 3)
