"""Use libraries without those parts of their dependencies that take long to import.

timm, torchvision, optimizers and custom operators call two or three functions of PyTorch's
compiler, to exclude code from compilation. Without compiled code these functions have nothing to
do, so the compiler is loaded when it is used. LanceDB imports the client of a web service, which an
index in a folder does not use.
"""

import functools
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
_LANCE_CLIENT = "lance_namespace_urllib3_client"


def import_timm() -> None:
    """Import timm and torchvision; the compiler of PyTorch is not imported before it is used."""
    import torch

    if "timm" not in sys.modules:
        try:
            with _compiler_disabled_later(torch.compiler), without_compiler():
                import timm.data
        except (ImportError, AttributeError):  # they need more of the compiler
            for name in [name for name in sys.modules if name.partition(".")[0] == "timm"]:
                del sys.modules[name]
    import timm.data  # noqa: F401


@contextmanager
def without_lance_client() -> Iterator[None]:
    """Import LanceDB without the client of its web service, which is loaded when it is used.

    Of this client LanceDB only needs the types of requests. The rest takes about half of the time
    that LanceDB takes to import.
    """
    spec = None
    if _LANCE_CLIENT not in sys.modules:
        spec = importlib.util.find_spec(_LANCE_CLIENT)
    if spec is not None and spec.submodule_search_locations:
        sys.modules[_LANCE_CLIENT] = package = _LaterPackage(_LANCE_CLIENT)
        package.__spec__, package.__loader__, package.__file__ = spec, spec.loader, spec.origin
        package.__path__ = list(spec.submodule_search_locations)
    yield


class _LaterPackage(ModuleType):
    """A package whose modules can be imported; its own code runs when a name of it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # which `import *` reads
            raise AttributeError(name)
        with _loading:  # other threads wait until the package has all its names
            if name not in self.__dict__ and self.__class__ is _LaterPackage:
                self._load()
        return object.__getattribute__(self, name)

    def _load(self) -> None:
        if "_started" in self.__dict__:  # a module of the package looks for a name of it
            return
        self.__dict__["_started"] = True
        try:
            assert self.__spec__ is not None
            assert self.__spec__.loader is not None
            self.__spec__.loader.exec_module(self)
            self.__class__ = ModuleType  # type: ignore[assignment]
        finally:
            del self.__dict__["_started"]


_loading = threading.RLock()


@contextmanager
def without_compiler() -> Iterator[None]:
    """Do not import the compiler for code that only excludes itself from compilation.

    Inside this context a small module takes the place of the compiler. It loads the compiler if
    anything else of it is used.
    """
    if _COMPILER in sys.modules:
        yield
        return
    package, utils = _Placeholder(_COMPILER), ModuleType(f"{_COMPILER}.utils")
    utils.is_compile_supported = _is_compile_supported  # type: ignore[attr-defined]
    # Another thread may have begun to import the compiler, which must not be replaced.
    if sys.modules.setdefault(_COMPILER, package) is not package:
        yield
        return
    sys.modules.setdefault(utils.__name__, utils)
    try:
        yield
    finally:
        _remove(package, utils)


def call_without_compiler(operator: Callable[..., Any], *arguments: Any) -> Any:
    """Call a custom operator; its first call would import the compiler, which takes seconds."""
    import torch

    if torch.compiler.is_compiling() or operator in _called:
        return operator(*arguments)
    with without_compiler():
        result = operator(*arguments)
    _called.add(operator)
    return result


_called: set[Callable[..., Any]] = set()


class _Placeholder(ModuleType):
    """Stands for the compiler."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.graph_break = lambda: None
        self.disable = functools.partial(_disable_later, _disable)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        utils = sys.modules.get(f"{_COMPILER}.utils")
        _remove(self, *([] if utils is None or hasattr(utils, "__file__") else [utils]))
        return getattr(importlib.import_module(_COMPILER), name)


def _remove(*placeholders: ModuleType) -> None:
    for module in placeholders:
        if sys.modules.get(module.__name__) is module:
            del sys.modules[module.__name__]


@contextmanager
def _compiler_disabled_later(compiler: Any) -> Iterator[None]:
    disable = compiler.disable
    compiler.disable = functools.partial(_disable_later, disable)
    try:
        yield
    finally:
        compiler.disable = disable


def _is_compile_supported(device_type: str) -> bool:
    from torch._dynamo.utils import is_compile_supported

    return bool(is_compile_supported(device_type))


def _disable(*args: Any, **options: Any) -> Any:
    from torch._dynamo import disable

    return disable(*args, **options)  # type: ignore[no-untyped-call]


def _disable_later(
    disable: Callable[..., Any], function: Any = None, *args: Any, **options: Any
) -> Any:
    """Disable the compilation of a function when the compiler is loaded."""
    if function is None or isinstance(function, type):
        return disable(function, *args, **options)

    disabled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if isinstance(sys.modules.get(_COMPILER), _Placeholder | None):
                return function(*arguments, **named)
            disabled = disable(function, *args, **options)
        return disabled(*arguments, **named)

    return call
