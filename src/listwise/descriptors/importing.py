"""Model folders of networks that others have released."""

from pathlib import Path

from listwise.descriptors.whitening import Whitening, WhiteningInfo
from listwise.errors import InputError
from listwise.models.imported import WHITEN_POWER, ImportedModel, import_model


def import_to_folder(
    file: str | Path,
    folder: str | Path,
    whitening: str | None = None,
    whiten_power: float = WHITEN_POWER,
) -> ImportedModel:
    """Make a model folder of a released checkpoint; nothing in the file is run.

    Args:
        file: as for `listwise.models.imported.import_model`, like the next two after `folder`.
        folder: the model folder to make; it must be new or empty.
        whitening: the name of one in the file, "none", or None for the one the authors use.
        whiten_power: power of the variances that a PCA divides by.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists already: give a new folder")
    model = import_model(file, whitening, whiten_power)
    folder.mkdir(parents=True, exist_ok=True)
    # The network's config is written last: a folder that has it is complete.
    if model.whitening_mean is not None and model.whitening_projection is not None:
        info = WhiteningInfo(method="imported", power=model.whitening_power)
        learned = Whitening(model.whitening_mean, model.whitening_projection, info)
        learned.save(folder, model.net.fingerprint())
    model.net.save(folder)
    return model
