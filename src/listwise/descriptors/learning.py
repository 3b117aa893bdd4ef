"""Learn the whitening of a model from photos or from a descriptor file."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

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
from listwise.descriptors.loading import find_model_folder, load_folder, stored_whitening
from listwise.descriptors.storage import DescriptorFile, is_descriptor_file
from listwise.descriptors.whitening import Shrinkage, Whitening
from listwise.errors import InputError
from listwise.models.storage import read_model, write_model

NOT_VALIDATED = (
    "the whitening is not validated, because {reason}: it uses the power 0.25 of the paper and the "
    "shrinkage of Ledoit and Wolf unless you give others"
)

_TRAINED_LAYER = "a linear layer that was trained from an index"


class LearnedWhitening(NamedTuple):
    """The result of `learn_whitening`.

    Attributes:
        whitening: the whitening, [n, C] -> [n, dim]; None if no whitening helps.
        choice: how it was chosen; None without a validation.
        unreadable: the errors of the photos that were left out.
    """

    whitening: Whitening | None
    choice: WhiteningChoice | None = None
    unreadable: tuple[str, ...] = ()


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
    scales: Sequence[float] | None = None,
    device: str = "auto",
    on_progress: Callable[[int], object] = lambda count: None,
    on_note: Callable[[str], object] = lambda note: None,
) -> LearnedWhitening:
    """Learn a whitening for the network of a model folder, and save it in the folder.

    With labels, `dim`, `power` and `shrinkage` are chosen by mAP on validation photos: the split
    "val" of a table, or classes that the whitening is not learned from. If you give none of the
    three and no whitening is better than none by more than two standard errors, nothing is saved.
    The model then keeps an earlier whitening, which is not compared: `remove_whitening` removes it.
    Without labels, the defaults below are used.

    Args:
        folder: the model folder, or the folder of a run; an existing whitening is replaced.
        source: photos, or a file of descriptors of this network that are not whitened.
        dim: number of dimensions to keep; by default chosen by validation, or all without labels.
        power: power of the variances that the whitening divides by, from 0 to 1: 0.25 is the
            paper's square-rooted PCA, 0.5 is full whitening. By default chosen by validation, or
            0.25 without labels.
        shrinkage: how far the variances are moved towards their mean: 0 leaves them, 1 makes them
            equal. By default chosen by validation; without labels, the estimate of Ledoit and Wolf.
        supervised: learn from pairs of photos with the same label.
        max_side: reduce photos whose longer side has more pixels than this; 0 keeps the original
            size. By default the size that the model records, or 1024 on a GPU and 512 on a CPU.
        scales: scales at which each photo is described, such as 1,0.7071,0.5; by default those of a
            tuned model, or 1.
        device: device: cpu, cuda, cuda:1, or auto, which uses a GPU if one is available.
        on_progress: called with the number of photos just described.
        on_note: called with a sentence when earlier parts are used or discarded, if the
            whitening is not validated, and if it replaces a layer that was trained from an index.
    """
    if supervised and (power is not None or shrinkage is not None):
        name = "power" if power is not None else "shrinkage"
        raise InputError(f"`{name}` is for PCA: leave it out with `supervised`")
    if isinstance(source, str | Path):
        source = whitening_source(source, supervised)
    folder = find_model_folder(folder)
    whole = load_folder(folder, device)
    model = replace(whole, whitening=None, calibration=None)
    if _has_trained_layer(whole.whitening):
        on_note(f"{folder} has {_TRAINED_LAYER}; a new whitening replaces it")
    given = {"dim": dim} if supervised else {"dim": dim, "power": power, "shrinkage": shrinkage}
    if isinstance(source, DescriptorFile):
        _check_descriptors(source, model.fingerprint, supervised, max_side or scales)
        used, learned = source.settings, _learn(source, None, supervised, given, on_note)
    elif supervised and not isinstance(source, LabelledImages):
        raise InputError("`supervised` needs labels: give the photos as LabelledImages")
    else:
        if isinstance(source, LabelledImages) and None in given.values():
            source = without_test_split(source)
        # A source may list a photo several times with different boxes, so ids are positions.
        numbered = replace(source, ids=tuple(map(str, range(len(source)))))
        kept = folder / "whitening.parquet"
        how: dict[str, Any] = {"max_side": max_side, "scales": scales}
        file = extract(model, numbered, kept, **how, on_progress=on_progress, on_note=on_note)
        found = source.subset([int(position) for position in file.ids])
        images = found if isinstance(found, LabelledImages) else None
        try:
            used, learned = file.settings, _learn(file, images, supervised, given, on_note)
        finally:
            kept.unlink()
        learned = learned._replace(unreadable=file.header.unreadable)
    if learned.whitening is not None:
        # The model is used with the size and the scales that its whitening was learned at.
        size = {"max_side": used.max_side or 0, "scales": used.scales, "power": used.power}
        now = model.recorded.model_copy(update=size)
        if now != model.tuned:
            on_note(f"{folder} is used with {used.size_text()} from now on")
        whitening = learned.whitening.learned_at(used.max_side, used.scales)
        learned = learned._replace(whitening=whitening)
        replace(model, whitening=whitening, tuned=now).save(folder)
    return learned


def _learn(
    file: DescriptorFile,
    images: LabelledImages | None,
    supervised: bool,
    given: dict[str, Any],
    on_note: Callable[[str], object],
) -> LearnedWhitening:
    """Learn from the descriptors of photos; validate if there are labels and choices."""
    reason = "there are no labels"
    pairs = images.labels if supervised and images is not None else None
    if images is not None and None in given.values():
        try:
            folds, everything = validation_folds(images)
        except InputError as error:
            reason = str(error)
        else:
            batches = partial(_batches_at, file)
            choice = choose_whitening(folds, batches, images.labels, supervised=supervised, **given)
            if not choice.gain.clear and set(given.values()) == {None}:
                return LearnedWhitening(None, choice)
            directions = learn_directions(
                batches(everything), None if pairs is None else pairs[everything]
            )
            return LearnedWhitening(choice.best.whitening(directions), choice)
    if None in given.values() and not supervised:
        on_note(NOT_VALIDATED.format(reason=reason))
    chosen: dict[str, Any] = {"power": 0.25, "shrinkage": "ledoit-wolf"}
    chosen |= {name: value for name, value in given.items() if value is not None}
    return LearnedWhitening(learn_directions(file.batches(), pairs).whitening(**chosen))


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
    model = load_folder(folder, "cpu").truncate(dim)
    write_model(folder, model.content())
    assert model.whitening is not None
    return model.whitening


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
    return read_model(find_model_folder(folder)).whitening is not None


def _has_trained_layer(whitening: Whitening | None) -> bool:
    """Whether a whitening contains a layer that was trained from an index."""
    return whitening is not None and whitening.info.method == "adapter"


def remove_whitening(
    folder: str | Path, on_note: Callable[[str], object] = lambda note: None
) -> None:
    """Remove the whitening from a model folder; `on_note` is as in `learn_whitening`.

    A calibration, which is for the scores with the whitening, is removed too.
    """
    path = find_model_folder(folder)
    content = read_model(path)
    if content.whitening is None:
        raise InputError(f"{folder} has no whitening to remove")
    if _has_trained_layer(stored_whitening(content)):
        on_note(f"{folder} had {_TRAINED_LAYER}, which is removed too")
    write_model(path, content._replace(whitening=None).with_info(whitening=None, calibration=None))


def _check_descriptors(
    file: DescriptorFile, network: str, supervised: bool, resized: object
) -> None:
    if supervised or resized:
        raise InputError(
            f"{file.path} is a descriptor file, without labels and photos: with `supervised`, "
            "`max_side` or `scales`, give the photos instead"
        )
    if file.header.whitened:
        raise InputError(
            f"{file.path} contains whitened descriptors, but a whitening is learned from "
            "descriptors without whitening: give the photos instead"
        )
    file.require(network)
