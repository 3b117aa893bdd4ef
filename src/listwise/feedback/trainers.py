"""Train from the model of an index: a linear layer, or its whole network."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch

from listwise.data.labelled import LabelledImages
from listwise.descriptors import Model
from listwise.descriptors.whitening import Whitening
from listwise.feedback.comparison import Ranking
from listwise.feedback.photos import (
    DESCRIPTOR_FILE,
    LAYER_FILE,
    IndexRun,
    MarkedPhotos,
    read_tensor,
)
from listwise.files import write_tensors
from listwise.models import RetrievalNet
from listwise.models.lora import add_lora
from listwise.models.storage import ModelSettings, WhiteningInfo, write_model
from listwise.search.entries import Float32
from listwise.training.choices import Sizes
from listwise.training.parts import (
    Described,
    DescriptorBatches,
    Head,
    HeadValidator,
    ModelFolder,
    PhotoBatches,
    Session,
    TrainingParts,
    Validator,
    settings_loss,
)
from listwise.training.run import Task
from listwise.training.sampling import Indices


@dataclass(frozen=True)
class IndexTraining:
    """What a run trains from an index: a linear layer or the network of its model.

    Attributes:
        model: the model of the index.
        record: what the run took from the index.
        images: all photos of the run with their labels, as in `record.ids`.
    """

    model: Model
    record: IndexRun
    images: LabelledImages

    def parts(self, session: Session) -> TrainingParts:
        """Create the parts of the run."""
        net = self.model.trainable("trained")
        # A new model keeps the size of the index.
        size, config = self.record.settings.max_side or 0, session.plan.config
        if config.adapter:
            return self._layer_parts(session, net, size)
        net = deepcopy(net).requires_grad_(True).train()
        if config.lora:
            add_lora(net, config.lora, config.lora_alpha)
        net.to(session.device)
        return TrainingParts(
            net,
            net,
            settings_loss(session, net.dim),
            MarkedBatches(session, net, self.record),
            Validator(session, net),
            ModelFolder(session, net, Sizes(size)),
        )

    def _layer_parts(self, session: Session, net: RetrievalNet, size: int) -> TrainingParts:
        """Create a linear layer on the descriptors that an index has stored.

        The descriptors have the whitening of the model, so the layer follows it: the product of the
        two is the whitening of the new model. Its network does not change.
        """
        rows = read_tensor(session.run, DESCRIPTOR_FILE, "descriptors")
        place = {photo: row for row, photo in enumerate(self.record.ids)}

        def known(images: LabelledImages) -> Described:
            chosen = [place[photo] for photo in images.ids]
            return Described(list(range(len(images))), rows[chosen])

        head = Head(self.model.dim).to(session.device)
        train, validation = session.plan.train, session.plan.validation
        validator = LayerValidator(session, head, partial(known, validation))
        validator.ranked, validator.labels = rows, self.images.labels
        validator.places = [place[photo] for photo in validation.ids]
        model = LayerFolder(session, net, Sizes(size), self.model, head)
        model.data = self.record.index
        return TrainingParts(
            head,
            head,
            settings_loss(session, self.model.dim),
            DescriptorBatches(MarkedBatches(session, net, self.record), partial(known, train)),
            validator,
            model,
        )


class MarkedBatches(PhotoBatches):
    """Batches in which a query is together with the photos that were marked for it."""

    def __init__(self, session: Session, net: RetrievalNet, record: IndexRun) -> None:
        super().__init__(session, net)
        self.record = record

    def draw_whole(self, labels: Indices, update: int) -> Indices:
        """Return the positions of the photos of a whole batch, from the labels of all photos."""
        batch = super().draw_whole(labels, update)
        if len(batch) == len(labels):  # it has all photos
            return batch
        return keep_together(batch, labels, self._together, self.session.plan.config.batch_size)

    @cached_property
    def _together(self) -> dict[int, list[int]]:
        return marked_together(self.images, self.record.queries)


class LayerValidator(HeadValidator):
    """Validates a layer by ranking each validation photo among all photos of the run."""

    ranked: Float32
    labels: Indices
    places: list[int]

    def measure(self, found: Described) -> float:
        """Return the mAP of the validation photos."""
        ranking = Ranking.of(self.ranked, self.labels, layer_of(self.head))
        return float(np.nanmean([ranking.ap(row) for row in self.places]))


class LayerFolder(ModelFolder):
    """The folder of a model of which a linear layer is trained."""

    def __init__(
        self, session: Session, net: RetrievalNet, sizes: Sizes, model: Model, head: Head
    ) -> None:
        super().__init__(session, net, sizes)
        self.model, self.head = model, head

    def writer(self, found: Described, value: float) -> Task:
        """Return a function that writes the layer as it is now, and the model with it."""
        layer, provenance = layer_of(self.head), self.provenance(value)
        photos = self.session.plan.train
        settings = self.model.tuned or ModelSettings(source=self.source)
        settings = settings.model_copy(update={"max_side": self.sizes.start})

        def write() -> None:
            write_tensors(self.session.run / LAYER_FILE, {"layer": torch.from_numpy(layer)})
            model = with_layer(self.model, layer, len(photos))
            assert model.whitening is not None
            learned = model.whitening.learned_at(settings.max_side, settings.scales)
            calibration = self.calibrate(found)
            model = replace(model, whitening=learned, tuned=settings, calibration=calibration)
            content = model.content()
            config = content.info.network.model_copy(update={"provenance": provenance})
            write_model(self.folder, content.with_info(network=config))

        return write


def layer_of(head: Head) -> Float32:
    """Return a copy of the layer [C, C] of a head."""
    found: Float32 = head.layer.weight.detach().cpu().numpy().copy()
    return found


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
