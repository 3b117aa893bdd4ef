"""Learn the whitening of a model from photos or from a descriptor file."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from listwise.data import Images, LabelledImages
from listwise.data.catalog import labelled_of, photos_of
from listwise.descriptors.extract import extract
from listwise.descriptors.loading import find_model_folder, load_network
from listwise.descriptors.model import Model
from listwise.descriptors.storage import DescriptorFile, is_descriptor_file
from listwise.descriptors.whitening import WHITENING_FILE, Whitening, matching_pairs
from listwise.errors import InputError


def whitening_source(source: str | Path, supervised: bool = False) -> Images | DescriptorFile:
    """Open the source of a whitening: a descriptor file, or photos (labelled if supervised)."""
    if Path(source).is_file() and is_descriptor_file(source):
        return DescriptorFile.open(source)
    return labelled_of(source) if supervised else photos_of(source)


def learn_whitening(
    folder: str | Path,
    source: str | Path | Images | DescriptorFile,
    *,
    dim: int | None = None,
    power: float | None = None,
    supervised: bool = False,
    max_side: int | None = None,
    device: str = "auto",
    on_progress: Callable[[int], object] = lambda count: None,
    on_note: Callable[[str], object] = lambda note: None,
    on_unreadable: Callable[[Sequence[str]], object] = lambda errors: None,
) -> Whitening:
    """Learn a whitening for the network of a model folder, and save it in the folder.

    Args:
        folder: the model folder, or the folder of a run; an existing whitening is replaced.
        source: photos, or a file of descriptors of this network that are not whitened.
        dim: number of output dimensions; by default all dimensions that vary.
        power: exponent of the variances that the PCA divides by; 0.25 by default.
        supervised: learn from pairs of photos with the same label.
        max_side: long side that larger photos are reduced to; their original size by default.
        device: "cpu", "cuda", "cuda:1" ...; "auto" uses a GPU if PyTorch finds one.
        on_progress: called with the number of photos just described.
        on_note: called with a sentence when earlier parts are used or discarded.
        on_unreadable: called with the errors of the photos that were left out.

    Returns:
        The whitening: [n, C] -> [n, dim].
    """
    if supervised and power is not None:
        raise InputError("`power` is for PCA: leave it out with `supervised`")
    exponent = 0.25 if power is None else power
    if isinstance(source, str | Path):
        source = whitening_source(source, supervised)
    folder = find_model_folder(folder)
    net = load_network(folder, device)
    if isinstance(source, DescriptorFile):
        _check_descriptors(source, net.fingerprint(), supervised, max_side)
        learned = Whitening.learn(source.batches(), dim, exponent)
    elif supervised and not isinstance(source, LabelledImages):
        raise InputError("`supervised` needs labels: give the photos as LabelledImages")
    else:
        # A source may list a photo several times with different boxes, so ids are positions.
        numbered = replace(source, ids=tuple(map(str, range(len(source)))))
        kept = folder / "whitening.parquet"
        file = extract(
            Model(net), numbered, kept, max_side=max_side, on_progress=on_progress, on_note=on_note
        )
        try:
            on_unreadable(file.header.unreadable)
            if supervised and isinstance(source, LabelledImages):
                learned = _learn_supervised(file, source, dim)
            else:
                learned = Whitening.learn(file.batches(), dim, exponent)
        finally:
            kept.unlink()
    learned.save(folder, net.fingerprint())
    return learned


def remove_whitening(folder: str | Path) -> None:
    """Remove the whitening from a model folder."""
    path = find_model_folder(folder) / WHITENING_FILE
    if not path.exists():
        raise InputError(f"{folder} has no whitening to remove")
    path.unlink()


def _check_descriptors(
    file: DescriptorFile, network: str, supervised: bool, max_side: int | None
) -> None:
    if supervised or max_side:
        raise InputError(
            f"{file.path} is a descriptor file, without labels and photos: with `supervised` or "
            "`max_side`, give the photos instead"
        )
    if file.header.whitened:
        raise InputError(
            f"{file.path} contains whitened descriptors, but a whitening is learned from "
            "descriptors without whitening: give the photos instead"
        )
    file.require(network)


def _learn_supervised(file: DescriptorFile, images: LabelledImages, dim: int | None) -> Whitening:
    labels = images.labels[np.array([int(position) for position in file.ids])]
    # The differences of pairs must span all dimensions, with several pairs per dimension.
    enough = math.ceil(8 * file.dim / len(images.class_names))
    return Whitening.learn_supervised(file.read(), matching_pairs(labels, enough, seed=0), dim)
