"""Learn the whitening of a model again, after its network was trained from an index."""

from pathlib import Path

import numpy as np

from listwise.data.labelled import Images
from listwise.descriptors import Model
from listwise.descriptors.learning import learn_whitening, truncate_model
from listwise.feedback.run import IndexRun
from listwise.search.opening import open_index

PHOTOS = 5000
"""Maximum number of photos of the index that the whitening is learned from."""


def whiten_again(folder: Path, old: Model, record: IndexRun) -> None:
    """Give the trained network in a folder a whitening with the dimensions of the old one.

    It is a PCA of photos of the index, with the power and shrinkage of the old one if that was a
    PCA, and with the defaults of `listwise whiten` otherwise.
    """
    assert old.whitening is not None
    info = old.whitening.info
    if info.method == "prefix":
        truncate_model(folder, old.dim)
        return
    same = info.method == "pca"
    learn_whitening(
        folder,
        _photos(record),
        dim=old.dim,
        power=info.power if same and info.power is not None else 0.25,
        shrinkage=(info.shrinkage or 0.0) if same else "ledoit-wolf",
        max_side=record.settings.max_side or 0,
        device=str(old.device),
    )


def _photos(record: IndexRun) -> Images:
    """Photos of the index, drawn evenly from those that exist."""
    with open_index(record.index, create=False) as index:
        # Keys are hashes, so those at even distances are a random sample.
        keys = np.sort(index.store.versions()[0])
        places = np.linspace(0, len(keys) - 1, min(PHOTOS, len(keys))).astype(np.int64)
        entries = index.store.get(keys[places].tolist())
    found = [entry for entry in entries.values() if entry.path and Path(entry.path).is_file()]
    boxes = tuple(entry.box for entry in found)
    return Images(
        tuple(entry.path for entry in found),
        tuple(entry.id for entry in found),
        boxes if any(boxes) else None,
    )
