"""Learn the whitening of a model again, after its network was trained from an index."""

from pathlib import Path

from listwise.data.labelled import Images
from listwise.descriptors import Model
from listwise.descriptors.learning import learn_whitening, truncate_model
from listwise.feedback.run import IndexRun


def whiten_again(folder: Path, old: Model, record: IndexRun) -> None:
    """Give the trained network in a folder a whitening with the dimensions of the old one.

    It is a PCA of photos of the index, with the power of the old one if that was a PCA, and also
    with its shrinkage if there are enough photos; otherwise with the defaults of `listwise whiten`.
    """
    assert old.whitening is not None
    info = old.whitening.info
    if info.method == "prefix":
        truncate_model(folder, old.dim)
        return
    photos = _photos(record)
    same = info.method == "pca"
    # Without shrinkage, n photos give fewer than n dimensions.
    enough = len(photos) > old.dim
    learn_whitening(
        folder,
        photos,
        dim=old.dim,
        power=info.power if same and info.power is not None else 0.25,
        shrinkage=(info.shrinkage or 0.0) if same and enough else "ledoit-wolf",
        max_side=record.settings.max_side or 0,
        device=str(old.device),
    )


def _photos(record: IndexRun) -> Images:
    """Photos of the index that still exist."""
    found = [(path, box) for path, box in record.whitening if Path(path).is_file()]
    boxes = tuple(box for _, box in found)
    paths = tuple(path for path, _ in found)
    return Images(paths, paths, boxes if any(boxes) else None)
