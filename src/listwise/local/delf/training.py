"""Training deep local features from image labels, in two steps (Noh et al. 2017)."""

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
from listwise.local.delf.extractor import DEFAULT, attend, decoding, photos_at_once
from listwise.local.delf.fit import DelfProgress, Fitter, Group, Step, hold_out_photos
from listwise.local.delf.net import Delf, DelfConfig, resnet
from listwise.local.delf.settings import DelfTraining
from listwise.machine import Machine, shared_cores
from listwise.models import RetrievalNet
from listwise.models.storage import CONFIG_FILE

PARTIAL_FOLDER = "training"
KEY_FILE = "listwise.key"
NEW_LAYER = 10.0  # times the learning rate of the layers below, which know something already
USUAL = DelfTraining()


@dataclass(frozen=True)
class DelfResult:
    """What a training came to; accuracies are on held-out photos, None of a step left out."""

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

    What is done is kept in `OUT/training` until the end; the same call again resumes there. Some of
    the photos are held out to choose by. `on_progress` is called after every update, and with every
    photo of the PCA; `on_note` with sentences about unreadable photos and about earlier work.
    """
    out = Path(out)
    note = cache(on_note)  # once is enough
    machine = Machine.detect(settings.device)
    half = machine.bfloat16 if settings.precision == "auto" else settings.precision == "bfloat16"
    photos = hold_out_photos(images, settings.val_fraction, settings.seed)
    torch.manual_seed(settings.seed)
    net = _start(settings)
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
    """Labelled photos to train on, without those that cannot be read.

    Of photos in splits those of `split` are used, or of "train" if there is such a split.
    """
    images = labelled_of(source)
    if split is None and images.splits is not None and "train" in images.splits:
        split = "train"
    images, report = check_images(images if split is None else images.of_split(split))
    for line in report.lines():
        on_note(line)
    return images


class _Pooled(nn.Module):
    """A network whose mean features are classified: [B, 3, H, W] -> logits [B, K]."""

    def __init__(self, net: RetrievalNet, classes: int) -> None:
        super().__init__()
        self.net = net
        self.classifier = nn.Linear(
            int(resnet(net.backbone, net.config.backbone).num_features), classes
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.net.features(images).mean(dim=(2, 3)))
        return logits


class _Attentive(nn.Module):
    """A frozen network whose features, weighted by attention, are classified: -> logits [B, K]."""

    def __init__(self, delf: Delf, classes: int) -> None:
        super().__init__()
        self.delf = delf
        self.classifier = nn.Linear(delf.channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.delf.features(images)
            # Of unit rows, but with values near 1, as a new layer wants them.
            units = F.normalize(features, dim=1) * math.sqrt(self.delf.channels)
        weights = self.delf.scores(features)
        # A mean and not the sum: crops come in many sizes.
        logits: Tensor = self.classifier((units * weights[:, None]).mean(dim=(2, 3)))
        return logits


def _start(settings: DelfTraining) -> RetrievalNet:
    """The network to start from."""
    if Path(settings.weights).is_dir():
        net = RetrievalNet.load(settings.weights)
        net.config.provenance["weights"] = net.fingerprint()
    else:
        net = RetrievalNet(settings.backbone, weights=settings.weights)
    resnet(net.backbone, net.config.backbone)
    return net


def _fine_tune(fitter: Fitter, net: RetrievalNet) -> float:
    """The first step: the whole network learns to tell the classes apart."""
    settings = fitter.settings
    torch.manual_seed(settings.seed)
    model = _Pooled(net, len(fitter.photos.images.class_names))
    model.to(fitter.device).to(memory_format=torch.channels_last)
    rate = settings.fine_tune_learning_rate
    groups = [
        Group(list(net.backbone.parameters()), rate),
        Group(list(model.classifier.parameters()), rate * NEW_LAYER),
    ]
    return fitter.fit(model, Step("fine-tuning", settings.fine_tune_updates, groups, 1.0))


def _learn_attention(fitter: Fitter, delf: Delf) -> float:
    """The second step: the backbone is frozen, the attention learns what tells classes apart."""
    settings = fitter.settings
    torch.manual_seed(settings.seed)
    model = _Attentive(delf, len(fitter.photos.images.class_names))
    model.to(fitter.device).to(memory_format=torch.channels_last)
    learned = [*delf.attention.parameters(), *model.classifier.parameters()]
    groups = [Group(learned, settings.attention_learning_rate)]
    step = Step("attention", settings.attention_updates, groups, settings.min_scale)
    accuracy = fitter.fit(model, step)
    delf.eval()
    return accuracy


def _learn_pca(fitter: Fitter, delf: Delf) -> None:
    """The last step: a projection of the features to the dimensions of a descriptor."""
    with explain_lost_workers():
        whitening = Whitening.learn(_locations(fitter, delf), delf.config.dim, power=0)
    delf.pca_mean.copy_(torch.from_numpy(whitening.mean))
    delf.pca_projection.copy_(torch.from_numpy(whitening.projection))


def _locations(fitter: Fitter, delf: Delf) -> Iterator[npt.NDArray[np.float32]]:
    """Unit features of the locations of most attention, photo by photo: [n, C]."""
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
                fitter.on_note(f"{error}; the PCA is learned without it")
                done += 1
                fitter.on_progress(DelfProgress("pca", done, len(rows)))
            if batch.photos:
                pixels = batch.pixels.to(fitter.device)
                for found in attend(delf, pixels, autocast=fitter.autocast):
                    yield F.normalize(found.features.float(), dim=1).cpu().numpy()
                    done += 1
                    fitter.on_progress(DelfProgress("pca", done, len(rows)))


def _key(images: LabelledImages, settings: DelfTraining) -> str:
    """Names a training: a training with the same key resumes it."""
    fields = settings.model_dump(mode="json", exclude={"device", "workers"})
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for index, (name, label) in enumerate(zip(images.ids, images.labels, strict=True)):
        entry = f"{name}\t{images.class_names[label]}\t{images.box(index)}\n"
        digest.update(entry.encode())
    return digest.hexdigest()


def _open_partial(out: Path, key: str, on_note: Callable[[str], object]) -> Path:
    """The folder of what is done so far, made if there is none."""
    if (out / CONFIG_FILE).exists():
        raise InputError(f"{out} holds a network already: give another folder")
    partial = out / PARTIAL_FOLDER
    name = partial / KEY_FILE
    try:
        if name.exists():
            if name.read_text(encoding="utf-8") != key:
                raise InputError(
                    f"{out} holds an unfinished training with other photos or settings: "
                    "resume with those, or give another folder"
                )
            on_note(f"resuming the unfinished training in {out}")
        partial.mkdir(parents=True, exist_ok=True)
        write_text(name, key)
    except OSError as error:
        raise InputError(f"cannot write {partial}: {error.strerror or error}") from error
    return partial
