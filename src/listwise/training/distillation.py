"""Distillation: a small network learns to compute the descriptors of a large one, its teacher."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor, nn

from listwise.errors import InputError
from listwise.evaluation import JudgedQueries, evaluate_descriptors
from listwise.files import write_tensors
from listwise.models import RetrievalNet
from listwise.models.storage import read_tensors
from listwise.training.loading import Batches
from listwise.training.parts import (
    Described,
    ModelFolder,
    PhotoBatches,
    Session,
    TrainingParts,
    Validator,
)
from listwise.training.sampling import Indices
from listwise.training.weights import make_net

TEACHER_FILE = "teacher.safetensors"
# Strength of the ridge regression of the first projection, relative to the mean variance.
RIDGE = 0.1

TeacherDescriptors = Callable[[], Mapping[str, Described]]
"""Returns the teacher's descriptors of the photos for "train" and for "validation"."""


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


def distillation_parts(session: Session) -> TrainingParts:
    """Create a network that is trained to compute the descriptors of a teacher from random crops.

    A projection to the dimensions of the teacher starts as the ridge regression from the network's
    descriptors of whole photos. Validation measures asymmetric search: queries by the network,
    database by the teacher.
    """
    if session.processes > 1:
        raise InputError("`teacher` works in one process only: start one process")
    plan = session.plan
    net = make_net(plan.config, plan.parts.modules).to(session.device)
    known, loss = cache(partial(_teacher_descriptors, session, net)), DistillationLoss()
    return TrainingParts(
        net,
        net,
        loss,
        StudentBatches(session, net, known, loss),
        StudentValidator(session, net, known),
        ModelFolder(session, net, plan.sizes),
        partial(_fit_projection, session, net, known),
    )


def _teacher_descriptors(session: Session, net: RetrievalNet) -> dict[str, Described]:
    """Return the teacher's descriptors of the photos for "train" and for "validation".

    They are computed once and kept in the folder of the run, so a resumed run needs no teacher.
    """
    path, teacher = session.run / TEACHER_FILE, session.teacher
    parts = {"train": session.plan.train, "validation": session.plan.validation}
    if not path.exists():
        if teacher is None:
            raise InputError(f"{path} is missing: start a new run, and give `teacher` as a model")
        tensors = {}
        for part, images in parts.items():
            count = session.counter("describing with the teacher", len(images))
            found = teacher.describe(images, on_progress=count)
            session.report_unreadable(found.errors, "it is left out")
            tensors[part] = torch.from_numpy(found.descriptors)
            tensors[f"{part}.kept"] = torch.tensor(found.kept)
        write_tensors(path, tensors, {"teacher": teacher.fingerprint})
        session.teacher = None  # it may be large
    read, metadata = read_tensors(path)
    net.config = net.config.model_copy(update={"teacher": metadata["teacher"]})
    return {part: Described(read[f"{part}.kept"].tolist(), read[part].numpy()) for part in parts}


class StudentBatches(PhotoBatches):
    """Crops of the photos that the teacher has described, labelled by their numbers."""

    def __init__(
        self, session: Session, net: RetrievalNet, known: TeacherDescriptors, loss: DistillationLoss
    ) -> None:
        super().__init__(session, net)
        self.known, self.loss = known, loss

    def draw(self, update: int) -> Indices:
        """Return the numbers of the described photos in the batch of an update."""
        return self.draw_whole(self.images.labels[self.known()["train"].kept], update)

    def load(self, stop: int) -> Batches:
        """Start to load batches."""
        kept, targets = self.known()["train"]
        self.loss.targets = torch.from_numpy(targets).to(self.session.device)
        names = tuple(f"{number:09d}" for number in range(len(kept)))
        readable = self.images.subset(kept)
        numbered = replace(readable, labels=np.arange(len(kept)), class_names=names)
        return self.load_crops(numbered, stop)


class StudentValidator(Validator):
    """Validates asymmetric search: queries by the network, database by the teacher."""

    def __init__(self, session: Session, net: RetrievalNet, known: TeacherDescriptors) -> None:
        super().__init__(session, net)
        self.known = known

    def measure(self, found: Described) -> float:
        """Return the asymmetric mAP of described validation photos."""
        known = self.known()["validation"]
        _, mine, theirs = np.intersect1d(found.kept, known.kept, return_indices=True)
        judged = JudgedQueries.labelled(self.images.labels[np.array(found.kept)[mine]])
        rows = found.descriptors[mine], known.descriptors[theirs]
        (result,) = evaluate_descriptors(*rows, judged).values()
        return result.mAP


def _fit_projection(session: Session, net: RetrievalNet, known: TeacherDescriptors) -> None:
    """Set the projection to the ridge regression from pooled vectors to the teacher's [n, D]."""
    described, targets = known()["train"]
    images = session.plan.train.subset(described)
    kept, vectors = session.describe_pooled(net, images, "describing the photos")
    x, y = torch.from_numpy(vectors).double(), torch.from_numpy(targets[kept]).double()
    gram = x.T @ x
    gram += RIDGE * len(x) / len(gram) * torch.eye(len(gram), dtype=gram.dtype)
    assert net.projection is not None
    with torch.no_grad():
        net.projection.weight.copy_(torch.linalg.solve(gram, x.T @ y).T)
        net.projection.bias.zero_()
