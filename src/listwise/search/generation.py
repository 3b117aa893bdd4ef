"""One generation of an index: a store, and the model of its descriptors."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from listwise.calibration import Calibration
from listwise.data.images import Box
from listwise.data.photos import Photo, open_photo
from listwise.errors import InputError
from listwise.search.entries import Float32
from listwise.search.store import IndexHeader, Store
from listwise.settings import ExtractSettings

if TYPE_CHECKING:
    from listwise.descriptors import Model


class Generation:
    """A store of entries and the model that computes their descriptors [n, C].

    An upgrade replaces both together. Whoever computes descriptors and then searches for them takes
    both from one generation. The model is loaded when it is first needed. Several threads may use
    one generation.

    Args:
        store: the store of an index.
        model: the model of the index; by default it is loaded from where the index remembers it.
        device: the device that the model is loaded to.
    """

    def __init__(self, store: Store, model: "Model | None" = None, device: str = "auto") -> None:
        # The queries of a model may be compared with the descriptors of its teacher.
        if model is not None and model.teacher != store.header.model:
            store.header.check(model.fingerprint, store.uri)
        self.store = store
        self.device = device
        self._model = model
        self._opening = threading.Lock()

    @property
    def header(self) -> IndexHeader:
        """The model and the settings of the descriptors."""
        return self.store.header

    @property
    def model(self) -> "Model":
        """The model that computes the descriptors."""
        with self._opening:
            if self._model is None:
                self._model = _remembered_model(self.store, self.device)
            return self._model

    @property
    def calibration(self) -> Calibration | None:
        """The calibration of the model: as it is now if it is loaded, else as it was stored.

        A model that was tuned to other settings since is calibrated for other scores than those of
        this index, so the stored calibration applies.
        """
        stored, model = self.header.calibration, self._model
        if model is not None and model.fingerprint != self.header.model:
            return None  # both are calibrated for other scores than those of a student's queries
        if model is None or model.calibration is None:
            return stored
        ours = self.header.settings.arguments()
        same = all(ours[name] == value for name, value in model.recorded if name in ours)
        return model.calibration if same else stored

    @property
    def settings(self) -> ExtractSettings:
        """The settings with which this machine computes descriptors for the index.

        They are those of the index, whatever the model was tuned to since.
        """
        settings = self.header.settings
        return self.model.settings(settings.max_side or 0, settings.scales, settings.power)

    def describe(self, photos: Sequence[Image.Image]) -> Float32:
        """Compute descriptors of n upright RGB photos: float32 [n, C].

        `open_photo` with the `max_side` of the index returns files with the pixels that were
        described when they were added.
        """
        return self.model.describe_photos(photos, self.settings)

    def describe_given(self, photos: Sequence[Photo], boxes: Sequence[Box | None]) -> Float32:
        """Compute descriptors of n photos as users give them, or boxes in them: [n, C]."""
        side = self.header.settings.max_side
        return self.describe(
            [open_photo(photo, box, side) for photo, box in zip(photos, boxes, strict=True)]
        )

    def reopened(self, model: "Model | None" = None) -> "Generation":
        """The generation that is the current one now."""
        generations = self.store.generations
        current = generations.open(generations.record().current)
        return Generation(current, model, self.device)


def header_of(
    model: "Model",
    *,
    max_side: int | None = None,
    scales: Sequence[float] | None = None,
    power: float | None = None,
) -> IndexHeader:
    """Make the header of a new index of the descriptors of a model.

    The settings are those of `listwise.descriptors.extract`. The precision of the network depends
    on the machine and is not part of the header.
    """
    return IndexHeader(
        model=model.fingerprint,
        model_folder="" if model.folder is None else str(model.folder),
        # A backbone with a whitening cannot be loaded by name.
        model_name="" if model.folder or model.whitening else model.name,
        whitened=model.whitening is not None,
        dim=model.dim,
        settings=model.settings(max_side, scales, power, "float32"),
        calibration=model.calibration,
        expansion=None if model.tuned is None else model.tuned.expansion,
    )


def open_model(model: "Model | str | Path", device: str) -> "Model":
    """Load a model from its folder or by its name; a loaded one is returned as it is."""
    from listwise.descriptors import Model, load_model  # PyTorch, which takes seconds to import

    return model if isinstance(model, Model) else load_model(model, device)


def _remembered_model(store: Store, device: str) -> "Model":
    """Load the model of an index from its folder or by its name."""
    header = store.header
    source = header.model_folder or header.model_name
    if not source:
        raise InputError(f"the model of {store.uri} was never saved: give it as `model`")
    if header.model_folder and not Path(source).exists():
        raise InputError(
            f"no model at {source}, where the model of {store.uri} was: give its folder as `model`"
        )
    model = open_model(source, device)
    if model.fingerprint != header.model:
        raise InputError(
            f"the model in {source} has changed since {store.uri} was created: give the original "
            "model as `model`, or build another index"
        )
    return model
