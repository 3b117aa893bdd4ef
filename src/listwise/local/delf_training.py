"""Train deep local features from image labels, in two steps (Noh et al. 2017)."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from listwise import __version__
from listwise.data import (
    CropBatch,
    CropDataset,
    CropSettings,
    LabelledImages,
    check_images,
    decode_photos,
)
from listwise.data.catalog import labelled_of
from listwise.data.pipeline import batch_by_shape
from listwise.data.workers import explain_lost_workers
from listwise.descriptors.whitening import Whitening
from listwise.errors import InputError
from listwise.local.delf import (
    DEFAULT,
    Delf,
    DelfConfig,
    batch_sizes,
    decoding,
    find_locations,
    resize,
    resnet,
)
from listwise.machine import Machine, seeded, shared_cores
from listwise.models import RetrievalNet
from listwise.models.storage import MODEL_FILE
from listwise.settings import DelfTraining
from listwise.training.loading import load_batches
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


class Fitter:
    """Trains classifiers of labelled photos, some of which are held out to measure accuracy."""

    def __init__(
        self,
        settings: DelfTraining,
        images: LabelledImages,
        on_progress: Callable[[DelfProgress], object],
        on_note: Callable[[str], object],
    ) -> None:
        machine = Machine.detect(settings.device)
        half = (
            machine.bfloat16 if settings.precision == "auto" else settings.precision == "bfloat16"
        )
        self.settings, self.images, self.on_progress = settings, images, on_progress
        self.on_note = cache(on_note)  # show each note once
        self.train, self.held_out = hold_out_photos(images, settings.val_fraction, settings.seed)
        self.device = torch.device(machine.device)
        self.workers = machine.workers() if settings.workers is None else settings.workers
        self.autocast = torch.bfloat16 if half else None

    @explain_lost_workers()
    def fit(
        self,
        model: nn.Module,
        classify: Callable[[Tensor], Tensor],
        step: str,
        updates: int,
        groups: list[dict[str, Any]],
        min_scale: float = 1.0,
    ) -> float:
        """Train a model, and keep the weights that were best on the held-out photos.

        Args:
            model: the layers to train, and those below them.
            classify: maps images float [B, 3, H, W] in [0, 1] to logits [B, K] with the model.
            step: name of the step, "fine-tuning" or "attention".
            updates: number of updates.
            groups: parameter groups of Adam; their learning rates fall to zero.
            min_scale: all crops of an update are resized by one random factor from this to 1.

        Returns:
            The best accuracy on the held-out photos.
        """
        model.to(self.device).to(memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(groups, weight_decay=self.settings.weight_decay)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, updates)
        best, best_accuracy = model.state_dict(), -1.0
        crops, size, seed = self.settings.crops, self.settings.batch_size, self.settings.seed
        # Each pass takes all photos once, in random order.
        shuffled = [
            np.random.default_rng([seed, number]).permutation(self.train)
            for number in range(-(-updates * size // len(self.train)))
        ]
        rows = np.split(np.concatenate(shuffled)[: updates * size], updates)
        model.train()
        for done, batch in enumerate(self._batches(crops, rows), 1):
            drawn = np.random.default_rng([seed, done]).uniform(min_scale, 1)
            side = round(crops.size * float(drawn))
            loss = F.cross_entropy(*self._logits(classify, batch, side))
            if not math.isfinite(loss.item()):
                raise InputError(f"the loss of {step} is not a number: lower the learning rate")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            accuracy = None
            if done % self.settings.validate_every == 0 or done == updates:
                model.eval()
                accuracy = self._accuracy(classify)
                model.train()
                if accuracy > best_accuracy:
                    best, best_accuracy = deepcopy(model.state_dict()), accuracy
            self.on_progress(DelfProgress(step, done, updates, loss.item(), accuracy))
        model.load_state_dict(best)
        return best_accuracy

    @torch.inference_mode()
    def _accuracy(self, classify: Callable[[Tensor], Tensor]) -> float:
        """Return the share of held-out photos, as square crops, that are classified correctly."""
        right = 0
        for batch in self._held_out_crops:
            logits, labels = self._logits(classify, batch, self.settings.crops.size)
            right += int((logits.argmax(dim=1) == labels).sum())
        return right / len(self.held_out)

    @cached_property
    def _held_out_crops(self) -> list[CropBatch]:
        """The held-out photos, at most 1000, decoded once and kept in memory."""
        parts = -(-len(self.held_out) // self.settings.batch_size)
        whole = {"min_area": 1, "max_area": 1, "max_ratio": 1, "rotation": 0}
        colors = dict.fromkeys(("brightness", "contrast", "saturation", "hue"), 0)
        plain = CropSettings(size=self.settings.crops.size, **whole, **colors)
        return list(self._batches(plain, np.array_split(self.held_out, parts)))

    def _batches(self, crops: CropSettings, rows: Sequence[Indices]) -> Iterator[CropBatch]:
        """Yield the crops of the photos in each of these rows."""
        batches = load_batches(
            CropDataset(self.images, crops, self.settings.seed),
            rows.__getitem__,
            range(len(rows)),
            self.workers,
            pin_memory=self.device.type == "cuda",
        )
        with closing(batches):
            for batch in batches:
                for error in batch.errors:
                    self.on_note(f"{error}; another photo of its class is used instead")
                yield batch

    def _logits(
        self, classify: Callable[[Tensor], Tensor], batch: CropBatch, side: int
    ) -> tuple[Tensor, Tensor]:
        """Return logits [B, K] of crops resized to `side`, and their labels [B]."""
        images = resize(batch.images.to(self.device, non_blocking=True), (side, side))
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            logits = classify(images)
        return logits.float(), batch.labels.to(self.device)


def hold_out_photos(images: LabelledImages, fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Divide photos at random into training photos, at least one of each class, and held-out ones.

    Returns:
        The positions of both, in ascending order.
    """
    order = np.random.default_rng(seed).permutation(len(images))
    _, first = np.unique(images.labels[order], return_index=True)
    spare = np.delete(order, first)
    if len(first) < 2 or not len(spare):
        raise InputError(
            f"{len(images)} photos of {len(first)} classes are too few to train local features: "
            "give two classes or more, and one class with two photos or more"
        )
    held_out = spare[: min(max(1, round(fraction * len(images))), MAX_HELD_OUT)]
    return np.setdiff1d(order, held_out), np.sort(held_out)


NEW_LAYER = 10.0  # learning rate of a new layer, relative to the pretrained layers below it
USUAL = DelfTraining()


@dataclass(frozen=True)
class DelfResult:
    """Result of `train_delf`: accuracies on held-out photos; None for a step that was skipped."""

    folder: Path
    fine_tuned_accuracy: float | None
    attention_accuracy: float
    fingerprint: str


@shared_cores()
def train_delf(
    images: LabelledImages,
    out: str | Path,
    settings: DelfTraining = USUAL,
    *,
    on_progress: Callable[[DelfProgress], object] = lambda progress: None,
    on_note: Callable[[str], object] = lambda note: None,
) -> DelfResult:
    """Train deep local features from labelled photos into a folder that `Delf.load` opens.

    Some of the photos are held out to choose the best weights.

    Args:
        images: labelled photos.
        out: folder to write.
        settings: settings of the training.
        on_progress: called after every update, and after every photo of the PCA.
        on_note: called with sentences for the user, such as unreadable photos.
    """
    out = Path(out)
    if (out / MODEL_FILE).exists():
        raise InputError(f"{out} already holds a network: give another folder")
    fitter = Fitter(settings, images, on_progress, on_note)
    with seeded(settings.seed, fitter.device):
        net = _starting_network(settings)
    with seeded(settings.seed, fitter.device):
        tuned = _fine_tune(fitter, net) if settings.fine_tune else None
    about = net.config.model_dump(include={"backbone", "mean", "std"})
    delf = Delf(DelfConfig(**about, hidden=settings.hidden, dim=settings.dim), net.backbone)
    with seeded(settings.seed, fitter.device):
        accuracy = _learn_attention(fitter, delf)
    _learn_pca(fitter, delf)
    delf.config.provenance = {
        "start": net.config.provenance.get("weights"),
        "settings": settings.model_dump(mode="json"),
        "photos": len(images),
        "classes": len(images.class_names),
        "fine_tuned_accuracy": tuned,
        "attention_accuracy": accuracy,
        "listwise": __version__,
    }
    delf.save(out)
    return DelfResult(out, tuned, accuracy, delf.fingerprint())


def read_training_photos(
    source: str, split: str | None = None, on_note: Callable[[str], object] = lambda note: None
) -> LabelledImages:
    """Read labelled photos to train on, without those that cannot be read.

    If the photos have splits, use only `split`; by default "train", if it exists.
    """
    images = labelled_of(source)
    if split is None and images.splits is not None and "train" in images.splits:
        split = "train"
    images, report = check_images(images if split is None else images.of_split(split))
    for line in report.lines():
        on_note(line)
    return images


def _starting_network(settings: DelfTraining) -> RetrievalNet:
    """Load the network to start from."""
    if Path(settings.weights).is_dir():
        net = RetrievalNet.load(settings.weights)
        net.config.provenance["weights"] = net.fingerprint()
    else:
        net = RetrievalNet(settings.backbone, weights=settings.weights)
    resnet(net.backbone, net.config.backbone)
    return net


def _fine_tune(fitter: Fitter, net: RetrievalNet) -> float:
    """Step 1: fine-tune the whole network as a classifier; returns the accuracy."""
    settings = fitter.settings
    channels = int(resnet(net.backbone, net.config.backbone).num_features)
    classifier = nn.Linear(channels, len(fitter.images.class_names))

    def classify(images: Tensor) -> Tensor:
        logits: Tensor = classifier(net.features(images).mean(dim=(2, 3)))
        return logits

    rate = settings.fine_tune_learning_rate
    groups = [
        {"params": [*net.backbone.parameters()], "lr": rate},
        {"params": [*classifier.parameters()], "lr": rate * NEW_LAYER},
    ]
    model = nn.ModuleList([net, classifier])
    return fitter.fit(model, classify, "fine-tuning", settings.fine_tune_updates, groups)


def _learn_attention(fitter: Fitter, delf: Delf) -> float:
    """Step 2: train the attention with a frozen backbone; returns the accuracy."""
    settings = fitter.settings
    classifier = nn.Linear(delf.channels, len(fitter.images.class_names))

    def classify(images: Tensor) -> Tensor:
        with torch.no_grad():
            features = delf.features(images)
            # Unit vectors, scaled to values near 1, which suit a new layer.
            units = F.normalize(features, dim=1) * math.sqrt(delf.channels)
        weights = delf.scores(features)
        # The mean, not the sum, because crops have different sizes.
        logits: Tensor = classifier((units * weights[:, None]).mean(dim=(2, 3)))
        return logits

    learned = [*delf.attention.parameters(), *classifier.parameters()]
    groups = [{"params": learned, "lr": settings.attention_learning_rate}]
    model, updates = nn.ModuleList([delf, classifier]), settings.attention_updates
    accuracy = fitter.fit(model, classify, "attention", updates, groups, settings.min_scale)
    delf.eval()
    return accuracy


def _learn_pca(fitter: Fitter, delf: Delf) -> None:
    """Learn the PCA from features to descriptors."""
    with explain_lost_workers():
        whitening = Whitening.learn(_locations(fitter, delf), delf.config.dim, power=0)
    delf.pca_mean.copy_(torch.from_numpy(whitening.mean))
    delf.pca_projection.copy_(torch.from_numpy(whitening.projection))


def _locations(fitter: Fitter, delf: Delf) -> Iterator[npt.NDArray[np.float32]]:
    """Yield unit features of the locations with the highest attention, per batch: [n, C]."""
    images, settings = fitter.images, fitter.settings
    drawn = np.random.default_rng(settings.seed).permutation(fitter.train)
    files = [images.file(row) for row in drawn[: settings.pca_photos].tolist()]
    done = 0
    with closing(decode_photos(files, decoding(DEFAULT), fitter.workers)) as photos:
        for batch in batch_by_shape(photos, batch_sizes(DEFAULT, fitter.device)):
            for error in batch.errors.values():
                fitter.on_note(f"{error}; the PCA is learned without this photo")
            if batch.photos:
                pixels = batch.pixels.to(fitter.device)
                found = find_locations(delf, pixels, autocast=fitter.autocast)
                yield F.normalize(found.features[found.kept].float(), dim=1).cpu().numpy()
            done += len(batch.errors) + len(batch.photos)
            fitter.on_progress(DelfProgress("pca", done, len(files)))
