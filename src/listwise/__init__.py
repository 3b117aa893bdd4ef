"""Listwise: image retrieval trained on the metric it is judged by.

    model = listwise.load("runs/photos/model")      # or the name of any timm backbone
    vectors = model.encode(["a.jpg", "b.jpg"])      # [2, dim], unit rows
    index = listwise.open_index("shop", model)      # made if new
    index.add("photos")
    hits = index.search("chair.jpg", k=10)

Nothing heavy is imported until a name is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from listwise.api import load
    from listwise.descriptors import Model
    from listwise.search import Added, Entry, Hit, Index, open_index

__version__ = "0.1.0"
__all__ = ["Added", "Entry", "Hit", "Index", "Model", "__version__", "load", "open_index"]

_HOMES = {
    "listwise.api": ("load",),
    "listwise.descriptors": ("Model",),
    "listwise.search": ("Added", "Entry", "Hit", "Index", "open_index"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(home), name)
            return value
    raise AttributeError(f"module 'listwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
