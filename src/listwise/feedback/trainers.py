"""Trainers that start from the model of an index: a linear layer, or its whole network."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from listwise import __version__
from listwise.data.labelled import LabelledImages
from listwise.descriptors import Model
from listwise.descriptors.whitening import Whitening, WhiteningInfo
from listwise.errors import InputError
from listwise.feedback.photos import MarkedPhotos
from listwise.feedback.ranking import Ranking
from listwise.feedback.run import (
    DESCRIPTOR_FILE,
    IndexRun,
    read_index_run,
    read_tensor,
    write_layer,
)
from listwise.models import RetrievalNet
from listwise.models.calibration import fit_calibration
from listwise.models.lora import add_lora
from listwise.models.storage import write_network
from listwise.search.entries import Float32
from listwise.training.adapter import AdapterTrainer, KnownDescriptors
from listwise.training.plan import TrainPlan
from listwise.training.run.folder import MODEL_FOLDER
from listwise.training.run.view import TrainView
from listwise.training.sampling import Indices
from listwise.training.trainer import Trainer


def make_index_trainer(
    plan: TrainPlan, run: Any, view: TrainView | None = None, *, resume: bool = False
) -> Trainer:
    """Create the trainer of a run from an index; `plan.parts` has its `model` and `record`."""
    kind = LayerTrainer if plan.config.adapter else NetworkTrainer
    return kind(plan, run, view, resume=resume)


def keep_together(
    batch: Indices, labels: Indices, together: Mapping[int, Sequence[int]], size: int
) -> Indices:
    """Add the photos that were marked for the queries of a batch, in place of its last photos.

    Args:
        batch: [B] positions of photos.
        labels: [N] labels of all photos.
        together: for the position of a query, the positions of the photos marked for it.
        size: the maximum number of photos.

    Returns:
        [B'] positions without repetition: the photos of each class of the batch, followed by those
        that were marked for them. Classes of one photo come last, so that a query with many marks
        leaves no batch without positives. B' is at most `size`.
    """
    members: dict[int, list[int]] = {}
    for photo in batch.tolist():
        members.setdefault(int(labels[photo]), []).append(photo)
    order: list[int] = []
    for drawn in sorted(members.values(), key=lambda photos: len(photos) == 1):
        order += [*drawn, *(other for photo in drawn for other in together.get(photo, ()))]
    return np.array(list(dict.fromkeys(order))[:size], np.int64)


def marked_together(
    images: LabelledImages, queries: Sequence[MarkedPhotos]
) -> dict[int, list[int]]:
    """Return the positions of the photos marked for each query, by the position of the query."""
    place = {photo: i for i, photo in enumerate(images.ids)}
    return {
        place[each.query]: [place[p] for p in (*each.same, *each.different) if p in place]
        for each in queries
        if each.query in place
    }


class _OfIndex(Trainer):
    """Draws batches in which a query is together with the photos that were marked for it."""

    @property
    def record(self) -> IndexRun:
        """What the run took from the index."""
        found: IndexRun = self.plan.parts["record"]
        return found

    @property
    def model(self) -> Model:
        """The model of the index."""
        found: Model = self.plan.parts["model"]
        return found

    def _start_projection(self) -> None:
        """Do nothing: the projection is that of the model of the index."""

    def _draw_batch(self, labels: Indices, update: int) -> Indices:
        batch = super()._draw_batch(labels, update)
        if len(batch) == len(labels):  # it has all photos
            return batch
        return keep_together(batch, labels, self._together, self.plan.config.batch_size)

    @cached_property
    def _together(self) -> dict[int, list[int]]:
        return marked_together(self.plan.train, self.record.queries)


class NetworkTrainer(_OfIndex):
    """Trains the network of the model of an index."""

    def _make_net(self) -> RetrievalNet:
        net = deepcopy(trainable(self.model)).requires_grad_(True).train()
        config = self.plan.config
        if config.lora:
            add_lora(net, config.lora, config.lora_alpha)
        return net


class LayerTrainer(_OfIndex, AdapterTrainer):
    """Trains a linear layer on the descriptors that an index has stored.

    The descriptors have the whitening of the model, so the layer follows it: the product of the two
    is the whitening of the new model. Its network does not change.
    """

    def _make_net(self) -> RetrievalNet:
        self._train_photos: KnownDescriptors | None = None
        self._known_validation: KnownDescriptors | None = None
        self._ranked: LabelledImages | None = None
        self._rows = read_tensor(self.run, DESCRIPTOR_FILE, "descriptors")
        return _Layer(trainable(self.model), self.model.dim)

    def _describe(self, images: LabelledImages, what: str) -> KnownDescriptors:
        rows = self._rows[self._places(images)]
        return KnownDescriptors(list(range(len(images))), torch.from_numpy(rows))

    def _places(self, images: LabelledImages) -> list[int]:
        """The rows of photos among all descriptors of the run."""
        place = {photo: row for row, photo in enumerate(self.record.ids)}
        return [place[photo] for photo in images.ids]

    def _validation_map(self, kept: list[int], descriptors: npt.NDArray[np.float32]) -> float:
        """Return the mAP of the validation photos, each ranked among all photos of the run."""
        images = read_index_run(self.run)[1] if self._ranked is None else self._ranked
        self._ranked = images
        ranking = Ranking.of(self._rows, images.labels, self._layer())
        return float(np.nanmean([ranking.ap(row) for row in self._places(self.plan.validation)]))

    def _layer(self) -> Float32:
        assert self.net.projection is not None
        found: Float32 = self.net.projection.weight.detach().cpu().numpy().copy()
        return found

    def _save_model(
        self, value: float, descriptors: npt.NDArray[np.float32], labels: Indices
    ) -> None:
        """Save the layer, and the model with it."""
        layer = self._layer()
        training: dict[str, Any] = {
            "data": self.record.index,
            "settings": self.plan.config.model_dump(),
            "update": self.progress.update,
            "validation_map": value,
            "listwise": __version__,
        }
        count, source = len(self.plan.train), f"validation photos of {self.plan.data.resolve()}"

        def write() -> None:
            write_layer(self.run, layer)
            model = with_layer(self.model, layer, count)
            with suppress(InputError):
                fitted = fit_calibration(descriptors, labels, model.fingerprint, source)
                model = replace(model, calibration=fitted)
            self._write_model(model, training)

        self._writer.submit_model(write)

    def _write_model(self, model: Model, training: dict[str, Any]) -> None:
        folder, net = self.run / MODEL_FOLDER, trainable(model)
        assert model.whitening is not None
        # The config of the network comes last, because it marks a complete model.
        model.whitening.save(folder, net.fingerprint())
        if model.calibration is not None:
            model.calibration.save(folder)
        if model.tuned is not None:
            model.tuned.save(folder)
        provenance = {**net.config.provenance, "training": training}
        config = net.config.model_copy(update={"provenance": provenance})
        write_network(folder, config, net.plain_state())


class _Layer(RetrievalNet):
    """Stands for a network of which only a linear layer after its descriptors [n, C] is trained."""

    def __init__(self, net: RetrievalNet, dim: int) -> None:
        nn.Module.__init__(self)
        self.config, self.dim = net.config, dim
        self.pooling = nn.Identity()
        self.projection = nn.Linear(dim, dim)
        nn.init.eye_(self.projection.weight)
        nn.init.zeros_(self.projection.bias)
        self.projection.bias.requires_grad_(False)
        self._register_preprocessing()


def with_layer(model: Model, layer: Float32, learned_from: int) -> Model:
    """Return a model whose descriptors are those of another one, multiplied by a layer [C, C].

    L2(A · L2(P · (x − m))) is L2((A · P) · (x − m)), so the layer becomes a part of the whitening.
    """
    before = model.whitening or Whitening.prefix(model.dim, model.dim)
    product = layer.astype(np.float64) @ before.projection.astype(np.float64)
    product /= np.abs(product).max()  # a common factor has no effect after L2
    info = WhiteningInfo(method="adapter", learned_from=learned_from)
    whitening = Whitening(before.mean, product.astype(np.float32), info)
    return replace(model, whitening=whitening, folder=None, name="", calibration=None)


def trainable(model: Model) -> RetrievalNet:
    """Return the network of a model, or refuse that of an ONNX file."""
    if not isinstance(model.net, RetrievalNet):
        raise InputError(
            f"{model.folder} is an ONNX file and cannot be trained: upgrade the index to the model "
            "that it was exported from"
        )
    return model.net
