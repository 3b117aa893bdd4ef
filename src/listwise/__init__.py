"""Listwise: image retrieval trained on average precision.

    run = listwise.train("photos")                      # labelled photos -> a network
    model = listwise.load("runs/photos/model")          # or the name of any timm backbone
    vectors = model.encode(["a.jpg", "b.jpg"])          # [2, dim], unit rows
    index = listwise.open_index("shop", model)          # created if it does not exist
    index.add("photos")
    hits = index.search("chair.jpg", k=10)
    results = listwise.evaluate(model, "roxford5k")
    tuning = listwise.tune("runs/photos/model", "validation")

PyTorch and other large packages are imported when one of these names is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from listwise.api import Evaluation, Labels, Run, Tuning, evaluate, label, load, train, tune
    from listwise.descriptors import Model
    from listwise.search import Added, Entry, Hit, Index, open_index

__version__ = "0.1.0"
__all__ = ["Added", "Entry", "Evaluation", "Hit", "Index", "Labels", "Model", "Run", "Tuning"]
__all__ += ["__version__", "evaluate", "label", "load", "open_index", "train", "tune"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'listwise' has no attribute {name!r}")
    from listwise import api

    globals().update({each: getattr(api, each) for each in api.__all__})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
