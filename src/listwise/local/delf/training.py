"""Train deep local features from image labels, in two steps (Noh et al. 2017)."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from listwise import __version__
from listwise.data import LabelledImages, check_images, decode_photos
from listwise.data.catalog import labelled_of
from listwise.data.pipeline import batch_by_shape
from listwise.data.workers import explain_lost_workers
from listwise.descriptors.whitening import Whitening
from listwise.errors import InputError
from listwise.files import write_text
from listwise.local.delf.extractor import DEFAULT, decoding, find_locations, photos_at_once
from listwise.local.delf.fit import DelfProgress, Fitter, ParameterGroup, Step, hold_out_photos
from listwise.local.delf.net import Delf, DelfConfig, resnet
from listwise.local.delf.settings import DelfTraining
from listwise.machine import Machine, shared_cores
from listwise.models import RetrievalNet
from listwise.models.storage import CONFIG_FILE

PARTIAL_FOLDER = "training"
KEY_FILE = "listwise.key"
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

    Checkpoints stay in `OUT/training` until the end, and the same call resumes from them. Some of
    the photos are held out to choose the best weights.

    Args:
        images: labelled photos.
        out: folder to write.
        settings: settings of the training.
        on_progress: called after every update, and after every photo of the PCA.
        on_note: called with sentences for the user, such as unreadable photos.
    """
    out = Path(out)
    note = cache(on_note)  # show each note once
    machine = Machine.detect(settings.device)
    half = machine.bfloat16 if settings.precision == "auto" else settings.precision == "bfloat16"
    photos = hold_out_photos(images, settings.val_fraction, settings.seed)
    torch.manual_seed(settings.seed)
    net = _starting_network(settings)
    fitter = Fitter(
        settings,
        photos,
        _open_partial(out, _key(images, settings), note),
        torch.device(machine.device),
        machine.workers() if settings.workers is None else settings.workers,
        torch.bfloat16 if half else None,
        on_progress,
        note,
    )
    tuned = _fine_tune(fitter, net) if settings.fine_tune else None
    about = net.config.model_dump(include={"backbone", "mean", "std"})
    delf = Delf(DelfConfig(**about, hidden=settings.hidden, dim=settings.dim), net.backbone)
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
    shutil.rmtree(fitter.folder)
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


class _PooledClassifier(nn.Module):
    """Classifies the mean of the features of a network: [B, 3, H, W] -> logits [B, K]."""

    def __init__(self, net: RetrievalNet, classes: int) -> None:
        super().__init__()
        self.net = net
        self.classifier = nn.Linear(
            int(resnet(net.backbone, net.config.backbone).num_features), classes
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.net.features(images).mean(dim=(2, 3)))
        return logits


class _AttentionClassifier(nn.Module):
    """Classifies features weighted by attention, with a frozen backbone: -> logits [B, K]."""

    def __init__(self, delf: Delf, classes: int) -> None:
        super().__init__()
        self.delf = delf
        self.classifier = nn.Linear(delf.channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.delf.features(images)
            # Unit vectors, scaled to values near 1, which suit a new layer.
            units = F.normalize(features, dim=1) * math.sqrt(self.delf.channels)
        weights = self.delf.scores(features)
        # The mean, not the sum, because crops have different sizes.
        logits: Tensor = self.classifier((units * weights[:, None]).mean(dim=(2, 3)))
        return logits


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
    torch.manual_seed(settings.seed)
    model = _PooledClassifier(net, len(fitter.photos.images.class_names))
    model.to(fitter.device).to(memory_format=torch.channels_last)
    rate = settings.fine_tune_learning_rate
    groups = [
        ParameterGroup(list(net.backbone.parameters()), rate),
        ParameterGroup(list(model.classifier.parameters()), rate * NEW_LAYER),
    ]
    return fitter.fit(model, Step("fine-tuning", settings.fine_tune_updates, groups, 1.0))


def _learn_attention(fitter: Fitter, delf: Delf) -> float:
    """Step 2: train the attention with a frozen backbone; returns the accuracy."""
    settings = fitter.settings
    torch.manual_seed(settings.seed)
    model = _AttentionClassifier(delf, len(fitter.photos.images.class_names))
    model.to(fitter.device).to(memory_format=torch.channels_last)
    learned = [*delf.attention.parameters(), *model.classifier.parameters()]
    groups = [ParameterGroup(learned, settings.attention_learning_rate)]
    step = Step("attention", settings.attention_updates, groups, settings.min_scale)
    accuracy = fitter.fit(model, step)
    delf.eval()
    return accuracy


def _learn_pca(fitter: Fitter, delf: Delf) -> None:
    """Learn the PCA from features to descriptors."""
    with explain_lost_workers():
        whitening = Whitening.learn(_locations(fitter, delf), delf.config.dim, power=0)
    delf.pca_mean.copy_(torch.from_numpy(whitening.mean))
    delf.pca_projection.copy_(torch.from_numpy(whitening.projection))


def _locations(fitter: Fitter, delf: Delf) -> Iterator[npt.NDArray[np.float32]]:
    """Yield unit features of the locations with the highest attention, per photo: [n, C]."""
    images, settings = fitter.photos.images, fitter.settings
    drawn = np.random.default_rng(settings.seed).permutation(fitter.photos.train)
    rows = drawn[: settings.pca_photos].tolist()
    done = 0
    files = [images.file(row) for row in rows]
    with closing(decode_photos(files, decoding(DEFAULT), fitter.workers)) as photos:
        for batch in batch_by_shape(
            photos, lambda width, height: photos_at_once(width, height, DEFAULT, fitter.device)
        ):
            for error in batch.errors.values():
                fitter.on_note(f"{error}; the PCA is learned without this photo")
                done += 1
                fitter.on_progress(DelfProgress("pca", done, len(rows)))
            if batch.photos:
                pixels = batch.pixels.to(fitter.device)
                for found in find_locations(delf, pixels, autocast=fitter.autocast):
                    yield F.normalize(found.features.float(), dim=1).cpu().numpy()
                    done += 1
                    fitter.on_progress(DelfProgress("pca", done, len(rows)))


def _key(images: LabelledImages, settings: DelfTraining) -> str:
    """Return a key of photos and settings; a training with the same key can be resumed."""
    fields = settings.model_dump(mode="json", exclude={"device", "workers"})
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for index, (name, label) in enumerate(zip(images.ids, images.labels, strict=True)):
        entry = f"{name}\t{images.class_names[label]}\t{images.box(index)}\n"
        digest.update(entry.encode())
    return digest.hexdigest()


def _open_partial(out: Path, key: str, on_note: Callable[[str], object]) -> Path:
    """Open the folder of checkpoints, or create it."""
    if (out / CONFIG_FILE).exists():
        raise InputError(f"{out} already holds a network: give another folder")
    partial = out / PARTIAL_FOLDER
    name = partial / KEY_FILE
    try:
        if name.exists():
            if name.read_text(encoding="utf-8") != key:
                raise InputError(
                    f"{out} holds an unfinished training with other photos or settings: "
                    "resume it with those, or give another folder"
                )
            on_note(f"resuming the unfinished training in {out}")
        partial.mkdir(parents=True, exist_ok=True)
        write_text(name, key)
    except OSError as error:
        raise InputError(f"cannot write {partial}: {error.strerror or error}") from error
    return partial
