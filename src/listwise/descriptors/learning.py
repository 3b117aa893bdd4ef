"""Learn the whitening of a model from photos or from a descriptor file."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from listwise.data import Images, LabelledImages
from listwise.data.catalog import labelled_of, photos_of
from listwise.descriptors.choosing import (
    Float32,
    Positions,
    WhiteningChoice,
    choose_whitening,
    learn_directions,
    validation_folds,
    without_test_split,
)
from listwise.descriptors.extract import extract
from listwise.descriptors.loading import find_model_folder, load_network
from listwise.descriptors.model import Model
from listwise.descriptors.storage import DescriptorFile, is_descriptor_file
from listwise.descriptors.tuned import TunedSettings
from listwise.descriptors.whitening import WHITENING_FILE, Shrinkage, Whitening, WhiteningInfo
from listwise.errors import InputError

NOT_VALIDATED = (
    "the whitening is not validated, because {reason}: it uses the power 0.25 of the paper and the "
    "shrinkage of Ledoit and Wolf unless you give others"
)

_TRAINED_LAYER = "a linear layer that was trained from an index"


def whitening_source(source: str | Path, supervised: bool = False) -> Images | DescriptorFile:
    """Open the source of a whitening: a descriptor file, or photos, with labels if they have any.

    With `supervised`, photos without labels are an error.
    """
    if Path(source).is_file() and is_descriptor_file(source):
        return DescriptorFile.open(source)
    try:
        return labelled_of(source)
    except InputError:
        if supervised:
            raise
        return photos_of(source)


def learn_whitening(
    folder: str | Path,
    source: str | Path | Images | DescriptorFile,
    *,
    dim: int | None = None,
    power: float | None = None,
    shrinkage: Shrinkage | None = None,
    supervised: bool = False,
    max_side: int | None = None,
    device: str = "auto",
    on_progress: Callable[[int], object] = lambda count: None,
    on_note: Callable[[str], object] = lambda note: None,
    on_choice: Callable[[WhiteningChoice], object] = lambda choice: None,
    on_unreadable: Callable[[Sequence[str]], object] = lambda errors: None,
) -> Whitening | None:
    """Learn a whitening for the network of a model folder, and save it in the folder.

    With labels, `dim`, `power` and `shrinkage` are chosen by mAP on validation photos: the split
    "val" of a table, or classes that the whitening is not learned from. If you give none of the
    three and no whitening is better than none by more than two standard errors, nothing is saved.
    The model then keeps an earlier whitening, which is not compared: `remove_whitening` removes it.
    Without labels, the defaults below are used.

    Args:
        folder: the model folder, or the folder of a run; an existing whitening is replaced.
        source: photos, or a file of descriptors of this network that are not whitened.
        dim: number of output dimensions; without labels all dimensions by default.
        power: exponent of the variances that the PCA divides by; without labels 0.25 by default.
        shrinkage: how far variances are moved towards their mean, from 0 to 1, or "ledoit-wolf",
            which is the default without labels.
        supervised: learn from pairs of photos with the same label.
        max_side: long side that larger photos are reduced to; by default that of the model's tuned
            settings, or the original size.
        device: "cpu", "cuda", "cuda:1" ...; "auto" uses a GPU if PyTorch finds one.
        on_progress: called with the number of photos just described.
        on_note: called with a sentence when earlier parts are used or discarded, if the
            whitening is not validated, and if it replaces a layer that was trained from an index.
        on_choice: called with the result of the validation.
        on_unreadable: called with the errors of the photos that were left out.

    Returns:
        The whitening: [n, C] -> [n, dim]; None if no whitening helps.
    """
    if supervised and (power is not None or shrinkage is not None):
        name = "power" if power is not None else "shrinkage"
        raise InputError(f"`{name}` is for PCA: leave it out with `supervised`")
    if isinstance(source, str | Path):
        source = whitening_source(source, supervised)
    folder = find_model_folder(folder)
    net = load_network(folder, device)
    if _has_trained_layer(folder):
        on_note(f"{folder} has {_TRAINED_LAYER}; a new whitening replaces it")
    how = _Settings(dim, power, shrinkage, supervised, on_choice, on_note)
    if isinstance(source, DescriptorFile):
        _check_descriptors(source, net.fingerprint(), supervised, max_side)
        learned: Whitening | None = how.learn_unvalidated(source.batches(), "it has no labels")
    elif supervised and not isinstance(source, LabelledImages):
        raise InputError("`supervised` needs labels: give the photos as LabelledImages")
    else:
        if isinstance(source, LabelledImages) and not how.complete:
            source = without_test_split(source)
        # A source may list a photo several times with different boxes, so ids are positions.
        numbered = replace(source, ids=tuple(map(str, range(len(source)))))
        kept = folder / "whitening.parquet"
        model = Model(net, tuned=TunedSettings.load(folder, net))
        file = extract(
            model, numbered, kept, max_side=max_side, on_progress=on_progress, on_note=on_note
        )
        try:
            on_unreadable(file.header.unreadable)
            learned = how.learn(file, source)
        finally:
            kept.unlink()
    if learned is not None:
        learned.save(folder, net.fingerprint())
    return learned


def truncate_model(folder: str | Path, dim: int) -> Whitening:
    """Make the model in a folder keep only the first dimensions of its descriptors.

    Args:
        folder: the model folder, or the folder of a run.
        dim: number of dimensions to keep.

    Returns:
        The whitening that is now in the folder: the earlier one with fewer dimensions, or one that
        only cuts the descriptors of the network.
    """
    folder = find_model_folder(folder)
    net = load_network(folder, "cpu")
    whole = Whitening.load(folder, net.fingerprint()) or Whitening.prefix(net.dim, net.dim)
    cut = whole.truncate(dim)
    cut.save(folder, net.fingerprint())
    return cut


@dataclass(frozen=True)
class _Settings:
    """What the user fixed of a whitening, and the functions that receive the other choices."""

    dim: int | None
    power: float | None
    shrinkage: Shrinkage | None
    supervised: bool
    on_choice: Callable[[WhiteningChoice], object]
    on_note: Callable[[str], object]

    @property
    def complete(self) -> bool:
        """Whether nothing is left to choose."""
        scaled = self.power is not None and self.shrinkage is not None
        return self.dim is not None and (scaled or self.supervised)

    def learn(self, file: DescriptorFile, source: Images) -> Whitening | None:
        """Learn from the descriptors of a source; validate if there are labels and choices."""
        if not isinstance(source, LabelledImages):
            return self.learn_unvalidated(file.batches(), "the photos have no labels")
        images = source.subset(np.array([int(position) for position in file.ids]))
        if self.complete:
            return self._learn_from(file.batches(), images)
        try:
            folds, everything = validation_folds(images)
        except InputError as error:
            if self.supervised:
                return self._learn_from(file.batches(), images)
            return self.learn_unvalidated(file.batches(), str(error))
        batches = partial(_batches_at, file)
        choice = choose_whitening(
            folds,
            batches,
            images.labels,
            dim=self.dim,
            power=self.power,
            shrinkage=self.shrinkage,
            supervised=self.supervised,
        )
        self.on_choice(choice)
        fixed = self.dim is not None or self.power is not None or self.shrinkage is not None
        if not choice.helps and not fixed:
            return None
        labels = images.labels[everything] if self.supervised else None
        return choice.best.whitening(learn_directions(batches(everything), labels))

    def learn_unvalidated(self, batches: Iterable[Float32], reason: str) -> Whitening:
        """Learn with what the user gave and the defaults."""
        if not self.complete:
            self.on_note(NOT_VALIDATED.format(reason=reason))
        power = 0.25 if self.power is None else self.power
        shrinkage = "ledoit-wolf" if self.shrinkage is None else self.shrinkage
        return Whitening.learn(batches, self.dim, power, shrinkage)

    def _learn_from(self, batches: Iterable[Float32], images: LabelledImages) -> Whitening:
        if not self.supervised:
            return Whitening.learn(batches, self.dim, self.power or 0.0, self.shrinkage or 0.0)
        return learn_directions(batches, images.labels).whitening(self.dim)


def _batches_at(file: DescriptorFile, positions: Positions) -> Iterator[Float32]:
    """Read the descriptors at some positions, in ascending order, in batches [n, C].

    The file is read from the start each time: it may be larger than memory.
    """
    start = 0
    for batch in file.batches():
        first, stop = np.searchsorted(positions, [start, start + len(batch)])
        if first < stop:
            yield batch[positions[first:stop] - start]
        start += len(batch)


def has_whitening(folder: str | Path) -> bool:
    """Whether a model folder, or the model of a run, contains a whitening."""
    return (find_model_folder(folder) / WHITENING_FILE).exists()


def _has_trained_layer(folder: str | Path) -> bool:
    """Whether the whitening in a model folder contains a layer that was trained from an index."""
    try:
        with safe_open(find_model_folder(folder) / WHITENING_FILE, framework="numpy") as file:
            text = (file.metadata() or {})["whitening"]
        return WhiteningInfo.model_validate_json(text).method == "adapter"
    except (OSError, SafetensorError, KeyError, ValueError):  # a new whitening replaces it
        return False


def remove_whitening(
    folder: str | Path, on_note: Callable[[str], object] = lambda note: None
) -> None:
    """Remove the whitening from a model folder; `on_note` is as in `learn_whitening`."""
    path = find_model_folder(folder) / WHITENING_FILE
    if not path.exists():
        raise InputError(f"{folder} has no whitening to remove")
    if _has_trained_layer(folder):
        on_note(f"{folder} had {_TRAINED_LAYER}, which is removed too")
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
