"""What most people need, as functions: the package's top level offers them under these names."""

from pathlib import Path

from listwise.descriptors import Model, load_model


def load(name_or_folder: str | Path, device: str = "auto") -> Model:
    """Open a model to encode photos with.

    Args:
        name_or_folder: a model folder, a run folder of `listwise.train`, or the name of any timm
            backbone: off the shelf, with released weights and GeM pooling.
        device: cpu, cuda, cuda:1 ...; auto takes a GPU if there is one.

    Example:
        >>> model = listwise.load("resnet50")               # doctest: +SKIP
        >>> model.encode(["a.jpg", "b.jpg"]).shape          # doctest: +SKIP
        (2, 2048)
    """
    return load_model(name_or_folder, device)
