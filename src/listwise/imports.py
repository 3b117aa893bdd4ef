"""Import timm and torchvision without PyTorch's compiler, whose import takes several seconds.

Both packages need two functions of the compiler when they are imported, although only compiled code
ever calls them. They get functions that load the compiler when they are called.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"


def import_timm() -> None:
    """Import timm and torchvision; the compiler of PyTorch is not imported before it is used."""
    import torch

    if _COMPILER not in sys.modules and "timm" not in sys.modules:
        try:
            with _compiler_later(torch.compiler):
                import timm.data
        except (ImportError, AttributeError):  # they need more of the compiler
            for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
                del sys.modules[name]
    import timm.data  # noqa: F401


@contextmanager
def _compiler_later(compiler: Any) -> Iterator[None]:
    package, utils = ModuleType(_COMPILER), ModuleType(f"{_COMPILER}.utils")
    package.__path__ = []
    utils.is_compile_supported = _is_compile_supported  # type: ignore[attr-defined]
    disable = compiler.disable
    sys.modules |= {package.__name__: package, utils.__name__: utils}
    compiler.disable = functools.partial(_disable_later, disable)
    try:
        yield
    finally:
        compiler.disable = disable
        for module in (package, utils):
            if sys.modules.get(module.__name__) is module:
                del sys.modules[module.__name__]


def _is_compile_supported(device_type: str) -> bool:
    from torch._dynamo.utils import is_compile_supported

    return bool(is_compile_supported(device_type))


def _disable_later(
    disable: Callable[..., Any], function: Any = None, *args: Any, **options: Any
) -> Any:
    """Disable the compilation of a function when the compiler is loaded."""
    if function is None or isinstance(function, type):
        return disable(function, *args, **options)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if _COMPILER in sys.modules:
            return disable(function, *args, **options)(*arguments, **named)
        return function(*arguments, **named)

    return call
