"""Distillation: a small network learns to compute the descriptors of a large one, its teacher."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from listwise.data import CropDataset, Images, LabelledImages
from listwise.errors import InputError
from listwise.evaluation import average_precision
from listwise.files import write_tensors
from listwise.models import RetrievalNet
from listwise.training.loading import Batches, load_batches
from listwise.training.sampling import Indices, draw_batch
from listwise.training.trainer import Trainer

TEACHER_FILE = "teacher.safetensors"
# Strength of the ridge regression of the first projection, relative to the mean variance.
RIDGE = 0.1


class Teacher(Protocol):
    """The model to learn from; `listwise.descriptors.Model` is one."""

    @property
    def dim(self) -> int:
        """Number of dimensions of a descriptor."""

    @property
    def fingerprint(self) -> str:
        """Identifies network and whitening."""

    def describe(self, images: Images, *, on_progress: Callable[[int], object]) -> Any:
        """Return the descriptors [n, dim] of the photos that can be read, and their positions."""


class DistillationLoss(nn.Module):
    """The mean of 1 - cosine between descriptors [B, C] and the teacher's of the same photos.

    The labels [B] are the numbers of the photos. `targets` [N, C] has the teacher's unit
    descriptors of all N photos.
    """

    def __init__(self) -> None:
        super().__init__()
        self.targets = torch.empty(0)

    def forward(self, descriptors: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss, a scalar."""
        self.targets = self.targets.to(descriptors)
        return 1 - (descriptors * self.targets[labels]).sum(dim=1).mean()


def asymmetric_map(
    queries: npt.NDArray[np.float32],
    database: npt.NDArray[np.float32],
    labels: npt.NDArray[np.int64],
) -> float:
    """Compute the mAP of searching each photo among the others, described by another model.

    Shapes: queries [N, C], database [N, C] and labels [N] of the same photos.
    """
    values = []
    for number, scores in enumerate(queries @ database.T):
        others = np.arange(len(labels)) != number
        relevant = labels[others] == labels[number]
        if relevant.any():
            values.append(average_precision(scores[others], relevant))
    return float(np.mean(values))


class DistillationTrainer(Trainer):
    """Trains a network to compute the descriptors of a teacher from random crops.

    The teacher describes each photo once; the descriptors are kept in the run folder. A projection
    to the dimensions of the teacher starts as the ridge regression from the network's descriptors
    of whole photos. Validation measures asymmetric search: queries by the network, database by the
    teacher.
    """

    def _make_net(self) -> RetrievalNet:
        self._known: dict[str, Tensor] = {}
        return super()._make_net()

    def _make_loss(self) -> DistillationLoss:
        if self.processes > 1:
            raise InputError("`teacher` works in one process only: start one process")
        return DistillationLoss()

    def _start_projection(self) -> None:
        """Do nothing: `_fit_projection` does it when the teacher's descriptors are known."""

    def _start_loading(self) -> Batches:
        known = self._teacher_descriptors()
        kept, targets = known["train.kept"].tolist(), known["train"]
        readable = self.plan.train.subset(kept)
        assert isinstance(self.loss, DistillationLoss)
        self.loss.targets = targets.to(self.device)
        if self.progress.update == 0:
            self._fit_projection(readable, targets)
        names = tuple(f"{number:09d}" for number in range(len(readable)))
        numbered = replace(readable, labels=np.arange(len(readable)), class_names=names)
        config = self.plan.config

        def draw(update: int) -> Indices:
            size, classes = config.batch_size, config.classes_per_batch
            return draw_batch(readable.labels, size, config.seed, update, classes)

        return load_batches(
            CropDataset(numbered, config.crops, config.seed),
            draw,
            range(self.progress.update, config.updates),
            self.workers,
            pin_memory=self.device.type == "cuda",
            device=self.device,
            kept=self.kept,
        )

    def _validation_map(self, kept: list[int], descriptors: npt.NDArray[np.float32]) -> float:
        known = self._teacher_descriptors()
        rows = {photo: row for row, photo in enumerate(known["validation.kept"].tolist())}
        both = [place for place, photo in enumerate(kept) if photo in rows]
        photos = [kept[place] for place in both]
        database = known["validation"].numpy()[[rows[photo] for photo in photos]]
        return asymmetric_map(descriptors[both], database, self.plan.validation.labels[photos])

    def _teacher_descriptors(self) -> dict[str, Tensor]:
        """Return the teacher's descriptors and their photos; compute them once per run."""
        if self._known:
            return self._known
        path = self.run / TEACHER_FILE
        if path.exists():
            try:
                with safe_open(path, framework="pt") as file:
                    fingerprint = file.metadata()["teacher"]
                    self._known = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            except (OSError, SafetensorError, KeyError, TypeError) as error:
                raise InputError(f"{path} is damaged ({error}): start a new run") from error
        else:
            if "teacher" not in self.plan.parts:
                raise InputError(
                    f"{path} is missing: start a new run, and give `teacher` as a model"
                )
            teacher: Teacher = self.plan.parts["teacher"]
            fingerprint = teacher.fingerprint
            for name, images in (("train", self.plan.train), ("validation", self.plan.validation)):
                count = self._counter("describing with the teacher", len(images))
                found = teacher.describe(images, on_progress=count)
                self._report_unreadable(found.errors, "it is left out")
                self._known[name] = torch.from_numpy(found.descriptors)
                self._known[f"{name}.kept"] = torch.tensor(found.kept)
            write_tensors(path, self._known, {"teacher": fingerprint})
            # The teacher is not needed any more, and may be large.
            others = {name: part for name, part in self.plan.parts.items() if name != "teacher"}
            self.plan = replace(self.plan, parts=others)
        self.net.config = self.net.config.model_copy(update={"teacher": fingerprint})
        return self._known

    def _fit_projection(self, images: LabelledImages, targets: Tensor) -> None:
        """Set the projection to the ridge regression from pooled vectors to the targets [n, D]."""
        found = self._describe_pooled(images, "describing the photos")
        x, y = found.descriptors.double(), targets[found.kept].double()
        gram = x.T @ x
        gram += RIDGE * len(x) / len(gram) * torch.eye(len(gram), dtype=gram.dtype)
        layer = self.net.projection
        assert layer is not None
        with torch.no_grad():
            layer.weight.copy_(torch.linalg.solve(gram, x.T @ y).T)
            layer.bias.zero_()
