"""The training loop of both steps of DELF: a classifier of photos."""

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
from listwise.local.delf.net import resize
from listwise.local.delf.settings import DelfTraining
from listwise.models.storage import read_weights
from listwise.training.loading import load_batches
from listwise.training.run.checkpoint import Progress, load_checkpoint, save_checkpoint
from listwise.training.sampling import Indices

MAX_HELD_OUT = 1000  # photos; enough to measure accuracy to a percent or two


class DelfProgress(NamedTuple):
    """Progress of a training step: `done` of `total`.

    `step` is "fine-tuning" or "attention", which count updates, or "pca", which counts photos.
    `accuracy` is that of the held-out photos, if it was measured after this update.
    """

    step: str
    done: int
    total: int
    loss: float | None = None
    accuracy: float | None = None


class PhotoSplit(NamedTuple):
    """Labelled photos, and the positions of the training photos and of the held-out photos."""

    images: LabelledImages
    train: Indices
    held_out: Indices


class ParameterGroup(NamedTuple):
    """Parameters and their initial learning rate, which falls to zero."""

    parameters: list[nn.Parameter]
    learning_rate: float


class Step(NamedTuple):
    """A training step: its name, its number of updates, and the parameters it trains.

    All crops of an update are resized by one random factor from `min_scale` to 1.
    """

    name: str
    updates: int
    groups: Sequence[ParameterGroup]
    min_scale: float


@dataclass(frozen=True, eq=False)
class Fitter:
    """Trains classifiers of photos; keeps checkpoints in `folder` and resumes from them."""

    settings: DelfTraining
    photos: PhotoSplit
    folder: Path
    device: torch.device
    workers: int
    autocast: torch.dtype | None
    on_progress: Callable[[DelfProgress], object]
    on_note: Callable[[str], object]

    @explain_lost_workers()
    def fit(self, model: nn.Module, step: Step) -> float:
        """Train a model and restore the weights that were best on the held-out photos.

        Args:
            model: maps images float [B, 3, H, W] in [0, 1] to logits [B, K].
            step: what to train.

        Returns:
            The best accuracy on the held-out photos.
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
                raise InputError(
                    f"the loss of {step.name} is not a number: lower the learning rate"
                )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            progress.update += 1
            accuracy = None
            due = progress.update % self.settings.validate_every == 0
            if due or progress.update == step.updates:
                accuracy = self._accuracy(model)
                # A checkpoint has one field for the best metric; here it is the accuracy.
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
        """Return the share of held-out photos, as square crops, that are classified correctly."""
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
        """The held-out photos, at most 1000, decoded once and kept in memory."""
        rows = self.photos.held_out
        parts = np.array_split(rows, math.ceil(len(rows) / self.settings.batch_size))
        whole = {"min_area": 1, "max_area": 1, "max_ratio": 1, "rotation": 0}
        colors = dict.fromkeys(("brightness", "contrast", "saturation", "hue"), 0)
        plain = CropSettings(size=self.settings.crops.size, **whole, **colors)
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
                    self.on_note(f"{error}; another photo of its class is used instead")
                yield batch

    def _logits(self, model: nn.Module, batch: CropBatch, side: int) -> tuple[Tensor, Tensor]:
        """Return logits [B, K] of crops resized to `side`, and their labels [B]."""
        images = resize(batch.images.to(self.device, non_blocking=True), (side, side))
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            logits: Tensor = model(images)
        return logits.float(), batch.labels.to(self.device)


def hold_out_photos(images: LabelledImages, fraction: float, seed: int) -> PhotoSplit:
    """Choose held-out photos at random; each class keeps at least one training photo."""
    order = np.random.default_rng(seed).permutation(len(images))
    _, first = np.unique(images.labels[order], return_index=True)
    spare = np.delete(order, first)
    if len(first) < 2 or not len(spare):
        raise InputError(
            f"{len(images)} photos of {len(first)} classes are too few to train local features: "
            "give two classes or more, and one class with two photos or more"
        )
    held_out = spare[: min(max(1, round(fraction * len(images))), MAX_HELD_OUT)]
    train = np.setdiff1d(order, held_out)
    return PhotoSplit(images, train.astype(np.int64), np.sort(held_out).astype(np.int64))


def draw_rows(
    rows: npt.NDArray[np.int64], batch_size: int, seed: int, update: int
) -> npt.NDArray[np.int64]:
    """Draw the batch of an update [B]: each pass takes all rows once, in random order."""
    places = np.arange(update * batch_size, (update + 1) * batch_size)
    passes, places = np.divmod(places, len(rows))
    return np.concatenate(
        [
            np.random.default_rng([seed, number]).permutation(rows)[places[passes == number]]
            for number in np.unique(passes)
        ]
    )
