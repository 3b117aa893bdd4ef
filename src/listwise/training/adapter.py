"""Train a linear layer on the descriptors of a frozen network, which are computed only once."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from listwise.data import CropBatch, LabelledImages
from listwise.models import RetrievalNet
from listwise.training.loading import Batches
from listwise.training.sampling import Indices
from listwise.training.step import Counts, MultistageStep
from listwise.training.trainer import Trainer


def add_adapter(net: RetrievalNet) -> RetrievalNet:
    """Freeze a network and add a linear layer after its pooling, which starts as the identity.

    The layer is the projection of the network, so the network is saved like any other. It has no
    bias that is trained: the descriptors are the same whether its input is normalized or not.
    """
    net.requires_grad_(False)
    layer = nn.Linear(net.dim, net.dim)
    nn.init.eye_(layer.weight)
    nn.init.zeros_(layer.bias)
    layer.bias.requires_grad_(False)
    net.projection = layer.to(net.mean)
    net.config = net.config.model_copy(update={"projection": net.dim})
    return net


class _Head(nn.Module):
    """Applies the layer to descriptors [b, C, 1, 1], in the shape of images for the step."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, vectors: Tensor) -> Tensor:
        return F.normalize(self.layer(vectors.flatten(1)), dim=1)


class KnownDescriptors(NamedTuple):
    """Descriptors [n, C] of the photos at some positions."""

    kept: list[int]
    vectors: Tensor


class AdapterTrainer(Trainer):
    """Trains a linear layer after a frozen network, on the loss and with the settings of a plan.

    The network describes every photo once, as in validation: the whole photo, without random crops.
    Then each update takes a batch of these descriptors instead of crops, so it takes milliseconds.
    Batches, loss, validation and the files of the run are those of `Trainer`.
    """

    def _make_net(self) -> RetrievalNet:
        self._train_photos: KnownDescriptors | None = None
        self._known_validation: KnownDescriptors | None = None
        return add_adapter(super()._make_net())

    def _trained_module(self) -> nn.Module:
        assert self.net.projection is not None
        return _Head(self.net.projection)

    def _make_step(self, counts: Counts) -> MultistageStep:
        self.progress.micro_batch = self.plan.config.batch_size
        step = super()._make_step(counts)
        step.autocast, step.compile = None, False
        return step

    def _announce_time(self) -> None:
        """Print nothing: a trial would take longer than the updates."""

    def _start_loading(self) -> Batches:
        first, last = self.progress.update, self.plan.config.updates
        if self._train_photos is None:
            self._train_photos = self._describe(self.plan.train, "describing the photos")
        return _Drawn(self._draw_known(range(first, last), *self._train_photos))

    def _draw_known(self, updates: range, kept: list[int], vectors: Tensor) -> Iterator[CropBatch]:
        for update in updates:
            rows = self._draw_rows(kept, update)
            images = vectors[torch.from_numpy(rows)][:, :, None, None]
            labels = torch.from_numpy(self.plan.train.labels[kept][rows])
            yield CropBatch(images, labels, ())

    def _draw_rows(self, kept: list[int], update: int) -> Indices:
        """Return the rows of the known descriptors in this process's part of an update's batch."""
        batch = self._draw_batch(self.plan.train.labels[kept], update)
        return np.array_split(batch, self.processes)[self.rank]

    def _draw(self, update: int) -> Indices:
        assert self._train_photos is not None  # the photos are described before the first batch
        kept = self._train_photos.kept
        return np.array(kept)[self._draw_rows(kept, update)]

    def _describe_validation(self) -> tuple[list[int], npt.NDArray[np.float32]]:
        if self._known_validation is None:
            self._known_validation = self._describe(self.plan.validation, "validating")
        kept, vectors = self._known_validation
        with torch.no_grad():
            descriptors = self._trained_module()(vectors.to(self.device))
        return kept, descriptors.float().cpu().numpy()

    def _describe(self, images: LabelledImages, what: str) -> KnownDescriptors:
        found = self._describe_pooled(images, what)
        return KnownDescriptors(found.kept, found.descriptors.float())


class _Drawn(Batches):
    """Batches that need no loading."""

    def __init__(self, batches: Iterator[CropBatch]) -> None:
        self._batches = batches

    def __next__(self) -> CropBatch:
        return next(self._batches)
