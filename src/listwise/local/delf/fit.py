"""Learning to tell classes apart: the loop that both steps of training local features share."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from listwise.data import CropBatch, CropDataset, CropSettings, LabelledImages
from listwise.data.workers import explain_lost_workers
from listwise.errors import InputError
from listwise.files import write_tensors
from listwise.local.delf.net import resized
from listwise.local.delf.settings import DelfTraining
from listwise.models.storage import read_weights
from listwise.training.loading import load_batches
from listwise.training.run.checkpoint import Progress, load_checkpoint, save_checkpoint
from listwise.training.sampling import Indices

MOST_HELD_OUT = 1000  # photos; accuracy is then known to a percent or two


class DelfProgress(NamedTuple):
    """How far a step of the training is; `accuracy` on held-out photos where it was just measured.

    `step` is "fine-tuning" or "attention", which count updates, or "pca", which counts photos.
    """

    step: str
    done: int
    total: int
    loss: float | None = None
    accuracy: float | None = None


class Photos(NamedTuple):
    """Labelled images, and the positions of those to learn from and of those to choose by."""

    images: LabelledImages
    train: Indices
    held_out: Indices


class Group(NamedTuple):
    """Parameters with a learning rate of their own, from which it falls to zero."""

    parameters: list[nn.Parameter]
    learning_rate: float


class Step(NamedTuple):
    """One of the steps: what learns in how many updates.

    All crops of an update are reduced by one random factor, from `min_scale` to 1.
    """

    name: str
    updates: int
    groups: Sequence[Group]
    min_scale: float


@dataclass(frozen=True, eq=False)
class Fitter:
    """Trains classifiers of photos; what is done is kept in `folder`, and resumed from there."""

    settings: DelfTraining
    photos: Photos
    folder: Path
    device: torch.device
    workers: int
    autocast: torch.dtype | None
    on_progress: Callable[[DelfProgress], object]
    on_note: Callable[[str], object]

    @explain_lost_workers()
    def fit(self, model: nn.Module, step: Step) -> float:
        """Train a model, and leave it as it was when it was best on the held-out photos.

        Returns the share of held-out photos whose class it told then. The model makes logits [B, K]
        of images float [B, 3, H, W] in [0, 1].
        """
        checkpoint = self.folder / f"{step.name}.safetensors"
        best = self.folder / f"{step.name}-best.safetensors"
        optimizer = torch.optim.Adam(
            [{"params": group.parameters} for group in step.groups],
            weight_decay=self.settings.weight_decay,
        )
        progress = Progress()
        if checkpoint.exists():
            progress = load_checkpoint(checkpoint, model, optimizer)
        crops, seed = self.settings.crops, self.settings.seed
        model.train()
        for batch in self._batches(
            crops,
            lambda update: draw_rows(self.photos.train, self.settings.batch_size, seed, update),
            range(progress.update, step.updates),
        ):
            left = 1 - progress.update / step.updates
            for group, learned in zip(step.groups, optimizer.param_groups, strict=True):
                learned["lr"] = group.learning_rate * left
            drawn = np.random.default_rng([seed, progress.update]).uniform(step.min_scale, 1)
            loss = F.cross_entropy(*self._logits(model, batch, round(crops.size * float(drawn))))
            if not math.isfinite(loss.item()):
                raise InputError(f"the loss of the {step.name} is not a number: learn more slowly")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            progress.update += 1
            accuracy = None
            due = progress.update % self.settings.validate_every == 0
            if due or progress.update == step.updates:
                accuracy = self._accuracy(model)
                # A checkpoint has one place for the figure that chooses, whatever it measures.
                if progress.best_map is None or accuracy > progress.best_map:
                    progress.best_map, progress.best_update = accuracy, progress.update
                    write_tensors(best, model.state_dict())
                save_checkpoint(checkpoint, model, optimizer, progress)
            self.on_progress(
                DelfProgress(step.name, progress.update, step.updates, loss.item(), accuracy)
            )
        model.load_state_dict(read_weights(best)[0])
        return progress.best_map or 0.0

    @torch.inference_mode()
    def _accuracy(self, model: nn.Module) -> float:
        """The share of held-out photos, cropped square, that are classified correctly."""
        model.eval()
        right = sum(
            (logits.argmax(dim=1) == labels).sum()
            for logits, labels in (
                self._logits(model, batch, self.settings.crops.size) for batch in self._held_out
            )
        )
        model.train()
        return float(right / len(self.photos.held_out))

    @cached_property
    def _held_out(self) -> list[CropBatch]:
        """The held-out photos, which are the same every time: 1000 at most are decoded once."""
        rows = self.photos.held_out
        parts = np.array_split(rows, math.ceil(len(rows) / self.settings.batch_size))
        whole = {"min_area": 1, "max_area": 1, "max_ratio": 1, "rotation": 0}
        colours = dict.fromkeys(("brightness", "contrast", "saturation", "hue"), 0)
        plain = CropSettings(size=self.settings.crops.size, **whole, **colours)
        return list(self._batches(plain, lambda number: parts[number], range(len(parts))))

    def _batches(
        self, crops: CropSettings, draw: Callable[[int], Indices], updates: range
    ) -> Iterator[CropBatch]:
        batches = load_batches(
            CropDataset(self.photos.images, crops, self.settings.seed),
            draw,
            updates,
            self.workers,
            pin_memory=self.device.type == "cuda",
        )
        with closing(batches):
            for batch in batches:
                for error in batch.errors:
                    self.on_note(f"{error}; another photo of its class stands in")
                yield batch

    def _logits(self, model: nn.Module, batch: CropBatch, side: int) -> tuple[Tensor, Tensor]:
        """Logits [B, K] of crops reduced to a side, and their labels [B]."""
        images = resized(batch.images.to(self.device, non_blocking=True), (side, side))
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            logits: Tensor = model(images)
        return logits.float(), batch.labels.to(self.device)


def hold_out_photos(images: LabelledImages, fraction: float, seed: int) -> Photos:
    """Choose photos to hold out, by seed; each class keeps at least one to learn from."""
    order = np.random.default_rng(seed).permutation(len(images))
    _, first = np.unique(images.labels[order], return_index=True)
    spare = np.delete(order, first)
    if len(first) < 2 or not len(spare):
        raise InputError(
            "local features are learned from two or more classes, one of them with two photos or "
            f"more; there are {len(images)} photos of {len(first)} classes"
        )
    held_out = spare[: min(max(1, round(fraction * len(images))), MOST_HELD_OUT)]
    train = np.setdiff1d(order, held_out)
    return Photos(images, train.astype(np.int64), np.sort(held_out).astype(np.int64))


def draw_rows(
    rows: npt.NDArray[np.int64], batch_size: int, seed: int, update: int
) -> npt.NDArray[np.int64]:
    """The batch of an update: all rows come once, in random order, before one comes again: [B]."""
    places = np.arange(update * batch_size, (update + 1) * batch_size)
    passes, places = np.divmod(places, len(rows))
    return np.concatenate(
        [
            np.random.default_rng([seed, number]).permutation(rows)[places[passes == number]]
            for number in np.unique(passes)
        ]
    )
