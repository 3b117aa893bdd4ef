"""Losses of pytorch-metric-learning, trained with the recipe that their papers and users share."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as F

from listwise.data import CropDataset, Decoding, LabelledImages
from listwise.data.workers import explain_lost_workers
from listwise.errors import InputError
from listwise.evaluation import evaluate_labelled
from listwise.machine import shared_cores
from listwise.models import RetrievalNet
from listwise.models.embed import Describe, PhotoNet, embed_parts
from listwise.models.net import Network
from listwise.optional import requires
from listwise.settings import CropSettings, TrainConfig
from listwise.training import Counts, MultistageStep
from listwise.training.loading import keep_photos, load_batches
from listwise.training.sampling import Indices
from listwise.training.trainer import worth_compiling
from listwise.training.view import TrainView

RATES = {"multi-similarity": 3e-5, "proxy-anchor": 1e-4}
"""The losses, and the learning rates that they use by default."""

_REPORT_EVERY = 10  # reading the loss waits for the GPU


@dataclass(frozen=True)
class PeerRecipe:
    """How the losses of pytorch-metric-learning are trained.

    Attributes:
        epochs: number of passes over the training photos.
        batch_size: images per update.
        per_class: images of a class in a batch.
        crop: side of the crops in training and test, in pixels.
        min_area: minimum area of a training crop, as a fraction of the largest crop that fits.
        weight_decay: weight decay of AdamW.
        proxy_factor: learning rate of the proxies, as a multiple of the learning rate.
        halve_every: number of epochs after which the learning rate is halved.
        proxy_warmup: number of epochs at the start during which proxy-anchor trains only its
            proxies and the projection, without which the network may collapse; at most half of the
            epochs.
    """

    epochs: int = 30
    batch_size: int = 120
    per_class: int = 4
    crop: int = 224
    min_area: float = 0.16
    weight_decay: float = 1e-4
    proxy_factor: float = 100.0
    halve_every: int = 10
    proxy_warmup: int = 5

    @property
    def crops(self) -> CropSettings:
        """Random resized crops that are flipped with probability 0.5, and nothing else."""
        plain = dict.fromkeys(("rotation", "brightness", "contrast", "saturation", "hue"), 0.0)
        return CropSettings(size=self.crop, min_area=self.min_area, flip=0.5, **plain)

    @property
    def resize(self) -> int:
        """Short side of a test photo before its center is cropped: 256 for crops of 224."""
        return round(self.crop * 8 / 7)

    def updates_per_epoch(self, photos: int) -> int:
        """Return the number of updates per pass over `photos` photos."""
        return max(1, photos // self.batch_size)


@dataclass(frozen=True)
class PeerResult:
    """A trained network, the duration of its training, and the images it has seen."""

    net: RetrievalNet
    seconds: float
    counts: Counts


class PeerLoss(nn.Module):
    """A loss of pytorch-metric-learning with its miner, if it has one.

    Call it as loss(descriptors [B, C], labels [B]) -> scalar.

    Args:
        name: a name in `RATES`.
        classes: number of training classes.
        dim: length of the descriptors.
    """

    def __init__(self, name: str, classes: int, dim: int) -> None:
        super().__init__()
        with requires("compare", "the comparison"):
            from pytorch_metric_learning import losses, miners
        self.miner = None
        if name == "multi-similarity":
            self.loss = losses.MultiSimilarityLoss(alpha=2, beta=50, base=0.5)
            self.miner = miners.MultiSimilarityMiner(epsilon=0.1)
        else:
            self.loss = losses.ProxyAnchorLoss(classes, dim, margin=0.1, alpha=32)

    def forward(self, descriptors: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of a batch."""
        pairs = None if self.miner is None else self.miner(descriptors, labels)
        value: Tensor = self.loss(descriptors, labels, pairs)
        return value


def draw_balanced(
    labels: Indices, batch_size: int, per_class: int, seed: int, update: int
) -> Indices:
    """Draw a batch with equally many images of each class in it: [N] -> [batch_size].

    A class has `per_class` images in the batch, or more if there are too few classes to fill it.
    A class with fewer images than that has some of them several times.
    """
    generator = np.random.default_rng([seed, update])
    classes = generator.permutation(int(labels.max()) + 1)
    each = max(per_class, math.ceil(batch_size / len(classes)))
    batch: list[Indices] = []
    for kind in classes[: math.ceil(batch_size / each)]:
        members = generator.permutation(np.flatnonzero(labels == kind))
        batch.append(np.resize(members, each))
    return np.concatenate(batch)[:batch_size]


@explain_lost_workers()
@shared_cores()
def train_peer(
    name: str,
    rate: float,
    images: LabelledImages,
    config: TrainConfig,
    recipe: PeerRecipe,
    seed: int,
    view: TrainView | None = None,
    *,
    decoded_bytes: int = 0,
) -> PeerResult:
    """Train a network with a loss of pytorch-metric-learning.

    Args:
        name: a name in `RATES`.
        rate: learning rate.
        images: the training photos.
        config: settings whose network, device, precision and workers are used.
        recipe: everything else.
        seed: seed of the batches, the crops and the new layers.
        view: shows the progress; by default nothing is shown.
        decoded_bytes: memory that the decoded photos take. If it is given, they are kept in memory
            as `Trainer` keeps them.
    """
    view = view or TrainView()
    device = torch.device(config.device)
    torch.manual_seed(seed)  # as `Trainer` does: the network starts with the same weights
    net = RetrievalNet(config.backbone, config.pooling, config.projection, config.weights)
    net.to(device)
    loss = PeerLoss(name, len(images.class_names), net.dim).to(device)
    optimizer = _make_optimizer(net, loss, rate, recipe)
    epoch = recipe.updates_per_epoch(len(images))
    schedule = _make_schedule(optimizer, loss, recipe, epoch)
    updates = recipe.epochs * epoch
    size = min(recipe.batch_size, len(images))
    planned = {"updates": updates, "batch_size": size, "crops": recipe.crops}
    step = MultistageStep(
        net,
        loss,
        autocast=_autocast(config),
        compile=worth_compiling(config.model_copy(update=planned), device),
    )
    batches = load_batches(
        CropDataset(images, recipe.crops, seed),
        lambda update: draw_balanced(images.labels, size, recipe.per_class, seed, update),
        range(updates),
        config.workers or 0,
        pin_memory=device.type == "cuda",
        device=device,
        kept=keep_photos(len(images), decoded_bytes, device)[0] if decoded_bytes else None,
    )
    shown: set[str] = set()
    started = time.perf_counter()
    view.start(0, updates)
    try:
        with closing(batches):
            for update, batch in enumerate(batches, 1):
                for error in set(batch.errors) - shown:
                    view.message(f"{error}; another photo of its class is used instead")
                shown.update(batch.errors)
                optimizer.zero_grad(set_to_none=True)
                value = step(batch.images, batch.labels)
                optimizer.step()
                schedule.step()
                if update % _REPORT_EVERY == 0 or update == updates:
                    speed = update * size / (time.perf_counter() - started)
                    _report(view, update, {"loss": value.item(), "images_per_second": speed})
    finally:
        view.close()
    return PeerResult(net, time.perf_counter() - started, step.counts)


def _autocast(config: TrainConfig) -> torch.dtype | None:
    return torch.bfloat16 if config.precision == "bfloat16" else None


def _make_optimizer(
    net: RetrievalNet, loss: PeerLoss, rate: float, recipe: PeerRecipe
) -> torch.optim.Optimizer:
    new = [] if net.projection is None else list(net.projection.parameters())
    trained = [each for each in net.parameters() if all(each is not other for other in new)]
    groups: list[dict[str, Any]] = [{"params": trained}, {"params": new}]
    if proxies := list(loss.parameters()):
        groups.append({"params": proxies, "lr": recipe.proxy_factor * rate})
    fused = next(net.parameters()).is_cuda  # one kernel for all parameters
    return torch.optim.AdamW(groups, lr=rate, weight_decay=recipe.weight_decay, fused=fused)


def _make_schedule(
    optimizer: torch.optim.Optimizer, loss: PeerLoss, recipe: PeerRecipe, epoch: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Halve the learning rates every few epochs; proxy-anchor trains the first group later."""
    warmup = min(recipe.proxy_warmup * epoch, recipe.epochs * epoch // 2)
    warmup = warmup if list(loss.parameters()) else 0

    def rate(update: int) -> float:
        return float(0.5 ** (update // (recipe.halve_every * epoch)))

    others = [rate] * (len(optimizer.param_groups) - 1)
    first = [lambda update: rate(update) if update >= warmup else 0.0]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, first + others)


def _report(view: TrainView, update: int, metrics: dict[str, float]) -> None:
    if not math.isfinite(metrics["loss"]):
        raise InputError(f"the loss is {metrics['loss']} at update {update}: lower `rates`")
    view.update(update, metrics)


def evaluate_photos(
    net: RetrievalNet,
    images: LabelledImages,
    config: TrainConfig,
    recipe: PeerRecipe | None = None,
    on_progress: Callable[[int], object] = lambda count: None,
) -> dict[str, float]:
    """Search each test photo among all others, and return mAP, mAP@R and Recall@k.

    Args:
        net: the network.
        images: the test photos.
        config: settings whose photo size, precision and workers are used.
        recipe: crops the center of each photo as in this recipe; None describes whole photos, as
            the validation of a training run does.
        on_progress: called with the number of photos just described.
    """
    autocast = _autocast(config)
    describe, how = None, Decoding(config.val_max_side)
    if recipe is not None:
        describe, how = _center_cropped(PhotoNet(net, autocast).fastest, recipe), Decoding()
    (found,) = embed_parts(
        PhotoNet(net, autocast),
        images.files(),
        [len(images)],
        how,
        describe=describe,
        workers=config.workers or 0,
        on_progress=on_progress,
    )
    labels = images.labels[found.kept]
    return evaluate_labelled(found.descriptors, labels).figures


def _center_cropped(net: Network, recipe: PeerRecipe) -> Describe:
    """Return a function that describes the centers of photos uint8 [B, 3, H, W] of one shape."""

    def describe(photos: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
        resized = F.resize(photos, [recipe.resize], antialias=True)
        descriptors: Tensor = net(F.center_crop(resized, [recipe.crop, recipe.crop]))
        return descriptors

    return describe
