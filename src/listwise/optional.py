"""Packages that are optional, or that are imported only when they are used."""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from listwise.errors import InputError, ListwiseWarning, first_line

if TYPE_CHECKING:
    import torch

# Packages whose name differs from the name of their module.
DISTRIBUTIONS = {
    "cv2": "opencv-python-headless",
    "faiss": "faiss-cpu",
    "grpc": "grpcio",
    "milvus_lite": "milvus-lite",
    "pillow_heif": "pillow-heif",
    "prometheus_client": "prometheus-client",
    "python_multipart": "python-multipart",
    "pytorch_metric_learning": "pytorch-metric-learning",
    "yaml": "pyyaml",
}


_TRIAL = threading.Lock()

# The newest PyTorch whose compiler `listwise.models.fusion` was tested with: it uses an interface
# that may change in any version.
NEWEST_TORCH = (2, 15)


class MissingDependencyError(ImportError, InputError):
    """A package is not installed; the message names the command that installs it."""


@contextmanager
def requires(extra: str, purpose: str) -> Iterator[None]:
    """Turn a failed import inside this context into an error that names the extra to install.

    Args:
        extra: the extra that installs the package.
        purpose: what needs the package, the beginning of the message: "an index in a folder needs
            faiss: pip install 'listwise[index]'".

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


def import_when_used(
    package: str, names: Sequence[str], modules: Sequence[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose modules are imported when used.

    Args:
        package: the name of the package.
        names: what it exports.
        modules: its modules that have these names, the fast ones first: they are imported one
            after the other until one has the name.
    """
    own = vars(sys.modules[package])

    def find(name: str) -> Any:
        for module in modules if name in names else ():
            found = vars(import_module(f"{package}.{module}"))
            if name in found:
                return own.setdefault(name, found[name])
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find, lambda: sorted({*own, *names})


def runs_triton(device: "torch.device") -> bool:
    """Whether Triton can compile and run kernels on a device; a trial shows it once.

    Triton also needs a C compiler and a GPU that it supports.
    """
    with _TRIAL:  # another thread may be trying it
        return _triton_trial(device)


@cache
def _triton_trial(device: "torch.device") -> bool:
    try:
        import triton
    except ImportError:
        return False
    # The interpreters of versions before that of PyTorch 2.7, in which the tests run the kernels,
    # corrupt memory.
    if _first_numbers(triton.__version__) < (3, 3):
        return False
    import torch

    from listwise.kernel_trial import kernel_doubles

    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return kernel_doubles(device)
    except Exception as error:  # each missing part has its own error
        warnings.warn(
            "the GPU kernels of Listwise are not used, so it runs slower: a trial of Triton failed "
            f"({first_line(error)})",
            ListwiseWarning,
            stacklevel=3,
        )
        return False


@cache
def fuses_convolutions() -> bool:
    """Whether `listwise.models.fusion` was tested with the installed PyTorch; if not, warn."""
    import torch

    if _first_numbers(torch.__version__) <= NEWEST_TORCH:
        return True
    warnings.warn(
        f"networks are compiled without the fusion of convolutions, so they run slower: PyTorch "
        f"{torch.__version__} is newer than {'.'.join(map(str, NEWEST_TORCH))}",
        ListwiseWarning,
        stacklevel=2,
    )
    return False


def _first_numbers(text: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(part) for part in text.split(".")[:2])
