"""Listwise: image retrieval trained on the metric it is judged by.

    run = listwise.train("photos")                  # labelled photos -> a network
    model = listwise.load("runs/photos/model")      # or the name of any timm backbone
    vectors = model.encode(["a.jpg", "b.jpg"])      # [2, dim], unit rows

Nothing heavy is imported until a name is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from listwise.api import load
    from listwise.descriptors import Model

__version__ = "0.1.0"
__all__ = ["Model", "__version__", "load"]

_HOMES = {"Model": "listwise.descriptors", "load": "listwise.api"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'listwise' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
