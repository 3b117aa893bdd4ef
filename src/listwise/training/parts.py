"""What a run consists of: network, loss, batches, validation, and the model that it writes.

A `Session` is what these parts share: plan, device, progress and messages.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import JsonValue
from torch import Tensor, nn

from listwise import __version__
from listwise.calibration import Calibration, fit_calibration
from listwise.data import (
    CropBatch,
    CropDataset,
    DecodedPhoto,
    Decoding,
    ImageError,
    LabelledImages,
    decode_photos,
)
from listwise.data.kept_photos import KeptPhotos
from listwise.data.labelled import label_levels
from listwise.errors import InputError
from listwise.evaluation import mean_average_precision
from listwise.models import RetrievalNet
from listwise.models.embed import PhotoNet, embed_decoded, embed_photos
from listwise.models.folding import sharing_copy
from listwise.models.storage import ModelFile, ModelInfo, ModelSettings, read_model, write_model
from listwise.progress import counted
from listwise.training.choices import Sizes, TrainPlan
from listwise.training.distributed import failing_together, gather_numbers, gather_rows
from listwise.training.loading import Batches, load_batches
from listwise.training.objective import Loss, check_processes, make_loss, with_lengths
from listwise.training.run import MODEL_FOLDER, Progress, Task, copy_to_host
from listwise.training.sampling import Indices, Miner, draw_batch, make_miner
from listwise.training.view import TrainView
from listwise.training.weights import (
    PCA_PHOTOS,
    Teacher,
    half_precision,
    make_net,
    start_projection,
)


class Described(NamedTuple):
    """Descriptors [n, C] of the photos at some positions."""

    kept: list[int]
    descriptors: NDArray[np.float32]


@dataclass
class Session:
    """A run in this process.

    Attributes:
        plan: photos and settings.
        run: the folder of the run.
        view: shows the progress to the user.
        device: the device of the network.
        rank: the number of this process; the first validates and writes the files.
        processes: the number of processes.
        teacher: the model to learn from, until it has described the photos.
        kept: where decoded photos are kept: those for training, then those for validation.
        progress: the progress of the run.
    """

    plan: TrainPlan
    run: Path
    view: TrainView
    device: torch.device
    rank: int
    processes: int
    teacher: Teacher | None = None
    kept: KeptPhotos | None = None
    progress: Progress = field(default_factory=Progress)
    _shown: set[str] = field(default_factory=set)

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype in which the network runs; None for its own."""
        return half_precision(self.plan.config)

    @property
    def workers(self) -> int:
        """The number of processes that decode photos."""
        return self.plan.config.workers or 0

    def describe(
        self, net: RetrievalNet, images: LabelledImages, max_side: int | None, what: str
    ) -> Described:
        """Describe whole photos by a network; the task is shown as `what`."""
        found = embed_photos(
            net,
            images,
            max_side=max_side,
            workers=self.workers,
            autocast=self.autocast,
            on_progress=self.counter(what, len(images)),
        )
        self.report_unreadable(found.errors, "it is left out")
        return Described(found.kept, found.descriptors)

    def describe_pooled(self, net: RetrievalNet, images: LabelledImages, what: str) -> Described:
        """Describe whole photos as in validation, by a network without its projection."""
        trunk = sharing_copy(net)
        assert isinstance(trunk, RetrievalNet)
        trunk.projection = None
        return self.describe(trunk, images, self.plan.val_max_side, what)

    def counter(self, what: str, total: int) -> Callable[[int], None]:
        """Return a function that shows the progress when it is called with a number of photos."""
        return counted(what, total, self.view.progress)

    def report_unreadable(self, errors: Sequence[str], instead: str) -> None:
        """Report each photo that could not be read, once; with `strict`, raise an error."""
        for error in errors:
            if self.plan.config.strict:
                raise InputError(error)
            self.message_once(error, f"{error}; {instead}")

    def message_once(self, key: str, line: str) -> None:
        """Show a message unless one with this key was shown."""
        if key not in self._shown:
            self._shown.add(key)
            self.view.message(line)

    def from_first(self, value: float) -> float:
        """Return the value of the first process in all processes."""
        if self.processes == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(shared, 0)
        return float(shared)


class PhotoBatches:
    """Random crops of training photos, all drawn from the seed.

    Args:
        session: the run.
        net: the network, which mining describes photos with.
    """

    def __init__(self, session: Session, net: RetrievalNet) -> None:
        self.session, self.net = session, net
        self.images = session.plan.train
        self.miner: Miner | None = make_miner(session.plan.config, self.images.labels)

    def draw(self, update: int) -> Indices:
        """Return the numbers of the photos in this process's part of the batch of an update."""
        if self.miner is None:
            return self.share(self.draw_whole(self.images.labels, update))
        first = update % self.miner.period * self.miner.per_update
        tuples = np.array(self.session.progress.tuples[first : first + self.miner.per_update])
        return self.share(tuples.reshape(-1))

    def share(self, batch: Indices) -> Indices:
        """Return this process's part of a batch."""
        session = self.session
        if len(batch) < session.processes:
            raise InputError(
                f"a batch has only {len(batch)} images, too few for {session.processes} processes: "
                "increase `batch_size`, `classes_per_batch` or the number of tuples, or start "
                "fewer processes"
            )
        return np.array_split(batch, session.processes)[session.rank]

    def draw_whole(self, labels: Indices, update: int) -> Indices:
        """Return the positions of the photos of a whole batch, from the labels of all photos."""
        config = self.session.plan.config
        few = config.classes_per_batch
        return draw_batch(labels, config.batch_size, config.seed, update, few, self._levels)

    @cached_property
    def _levels(self) -> Indices | None:
        """The levels of the classes, if the loss has levels."""
        if self.session.plan.config.loss != "hierarchical-ap":
            return None
        return label_levels(self.images.class_names)

    def load(self, stop: int) -> Batches:
        """Start to load batches, of those tuples that were mined if the loss needs tuples."""
        if self.miner is not None:
            return self._load_mined(self.miner, stop)
        return self.load_crops(self.images, stop)

    def load_crops(self, images: LabelledImages, stop: int) -> Batches:
        """Start to load batches of crops of images, from the next update of the run on."""
        session, config = self.session, self.session.plan.config
        return load_batches(
            CropDataset(images, config.crops, config.seed),
            self.draw,
            range(session.progress.update, stop),
            session.workers,
            pin_memory=session.device.type == "cuda",
            device=session.device,
            kept=session.kept,
        )

    def _load_mined(self, miner: Miner, stop: int) -> Generator[CropBatch, None, None]:
        """Load batches from one mining to the next, for which the trained network is needed."""
        progress = self.session.progress
        while progress.update < stop:
            if progress.update % miner.period == 0:
                self.mine(miner)
            until = min(stop, (progress.update // miner.period + 1) * miner.period)
            with closing(self.load_crops(self.images, until)) as batches:
                yield from batches

    def mine(self, miner: Miner) -> None:
        """Mine the tuples of the updates until the next mining.

        Each process embeds a share of the photos. As in the papers, photos are whole.
        """
        session, progress, device = self.session, self.session.progress, self.session.device
        share = self.share(miner.photos(progress.update))
        side = session.plan.config.crops.size
        with failing_together(device):
            found = session.describe(self.net, self.images.subset(share), side, "mining")
        parts = gather_numbers(len(found.kept), device)
        descriptors = gather_rows(torch.from_numpy(found.descriptors).to(device), parts)
        photos = gather_rows(torch.from_numpy(share[found.kept]).to(device), parts).cpu().numpy()
        with failing_together(device):
            tuples = torch.from_numpy(miner.tuples(progress.update, photos, descriptors))
        if session.processes > 1:
            # The last bits of scores may differ between machines, and with them the hardest tuples.
            tuples = tuples.to(device)
            dist.broadcast(tuples, 0)
        progress.tuples = tuples.tolist()
        progress.counts.forwards += sum(parts)


class Validator:
    """Validates a network by searching each validation photo among the others.

    Args:
        session: the run.
        net: its network.
    """

    def __init__(self, session: Session, net: RetrievalNet) -> None:
        self.session, self.net = session, net
        self.images = session.plan.validation
        self._decoded: list[DecodedPhoto | ImageError] = []
        self._network: PhotoNet | None = None

    def describe(self) -> Described:
        """Describe the validation photos with the current weights."""
        session, net, count = self.session, self.net, len(self.images)
        net.eval()
        if self._network is None:
            self._network = PhotoNet(net, session.autocast)
        else:
            self._network.refresh()
        found = embed_decoded(self._network, self._photos(), session.counter("validating", count))
        session.report_unreadable(found.errors, "validation leaves it out")
        return Described(found.kept, found.descriptors)

    def measure(self, found: Described) -> float:
        """Return the mAP of described validation photos."""
        return mean_average_precision(found.descriptors, self.images.labels[found.kept])

    def _photos(self) -> Iterator[DecodedPhoto | ImageError]:
        """Yield the photos, which are decoded once and kept if they fit."""
        session, kept = self.session, self.session.kept
        if len(self._decoded) == len(self.images):
            yield from self._decoded
            return
        decoded: list[DecodedPhoto | ImageError] = []
        how = Decoding(session.plan.val_max_side)
        files = self.images.files()
        with closing(decode_photos(files, how, session.workers, session.device)) as photos:
            for number, photo in enumerate(photos, len(session.plan.train)):
                if isinstance(photo, ImageError):
                    decoded.append(photo)
                elif kept is not None and kept.add(number, photo.pixels):
                    decoded.append(photo._replace(pixels=kept.photo(number)))
                yield photo
        self._decoded = decoded


class ModelFolder:
    """The folder of the best network of a run.

    Args:
        session: the run.
        net: its network.
        sizes: the photo size of the validations, and those to try after training.
    """

    def __init__(self, session: Session, net: RetrievalNet, sizes: Sizes) -> None:
        self.session, self.net, self.sizes = session, net, sizes
        self.folder, self.data = session.run / MODEL_FOLDER, str(session.plan.data.resolve())
        plan = session.plan
        trained = set(plan.train.class_names)
        self.held_out = trained.isdisjoint(plan.validation.class_names)
        self.source = f"{'validation' if self.held_out else 'training'} photos of {self.data}"
        self.not_calibrated = ""

    def writer(self, found: Described, value: float) -> Task:
        """Return a function that writes the network as it is now, with its validation mAP."""
        config = self.net.config.model_copy(update={"provenance": self.provenance(value)})
        state = copy_to_host(self.net.plain_state())

        def write() -> None:
            settings = self._settings(found, self.sizes.start, value, value)
            write_model(self.folder, ModelFile(ModelInfo(network=config, **settings), state()))

        return write

    def write_size(self, found: Described, max_side: int, start_map: float, value: float) -> None:
        """Write the size at which the saved network is best.

        Args:
            found: the validation photos at this size.
            max_side: the size.
            start_map: the mAP at the size of the validations.
            value: the mAP at this size.
        """
        settings = self._settings(found, max_side, start_map, value)
        write_model(self.folder, read_model(self.folder).with_info(**settings))

    def provenance(self, value: float) -> dict[str, JsonValue]:
        """Return the origin of the network as it is now, with its validation mAP."""
        training: dict[str, JsonValue] = {
            "data": self.data,
            "settings": self.session.plan.config.model_dump(),
            "update": self.session.progress.update,
            "validation_map": value,
            "listwise": __version__,
        }
        return {**self.net.config.provenance, "training": training}

    def _settings(
        self, found: Described, max_side: int, start_map: float, value: float
    ) -> dict[str, Any]:
        """Return the settings of the model, and a calibration if its validation photos allow it."""
        tuned = ModelSettings(
            max_side=max_side,
            source=self.source,
            photos=len(found.kept),
            start_map=start_map,
            validation_map=value,
        )
        return {"tuned": tuned, "calibration": self.calibrate(found)}

    def calibrate(self, found: Described) -> Calibration | None:
        """Calibrate on photos that are not trained on; `not_calibrated` is why that fails."""
        labels = self.session.plan.validation.labels[found.kept]
        self.not_calibrated = ""
        if not self.held_out:
            return None
        try:
            return fit_calibration(found.descriptors, labels, self.source)
        except InputError as error:
            self.not_calibrated = str(error)
            return None

    def load(self) -> RetrievalNet:
        """Return the best network of the run; that of the session is the last one."""
        with torch.random.fork_rng([]):
            modules = deepcopy(self.session.plan.parts.modules)
            return RetrievalNet.load(self.folder, self.session.device, **modules)


@dataclass
class TrainingParts:
    """The parts of a run.

    Attributes:
        net: the module with all weights that a checkpoint has.
        module: maps the images of a batch to descriptors; the network, or a part of it.
        loss: the loss.
        batches: draws and loads the batches.
        validator: validates the network.
        model: writes the best network.
        start: called before the first update of a new run.
    """

    net: nn.Module
    module: nn.Module
    loss: Loss
    batches: PhotoBatches
    validator: Validator
    model: ModelFolder
    start: Callable[[], None] = lambda: None


def photo_parts(session: Session) -> TrainingParts:
    """Create a network that is trained on crops of photos, with the loss of the settings."""
    plan = session.plan
    net = make_net(plan.config, plan.parts.modules).to(session.device)
    return TrainingParts(
        net,
        net,
        settings_loss(session, net.dim),
        PhotoBatches(session, net),
        Validator(session, net),
        ModelFolder(session, net, plan.sizes),
        partial(_start_projection, session, net),
    )


def settings_loss(session: Session, dim: int) -> Loss:
    """Create the loss of the settings, for descriptors of `dim` dimensions."""
    plan = session.plan
    loss = plan.parts.loss or make_loss(plan.config, plan.train.class_names, dim)
    loss = with_lengths(loss, plan.config.matryoshka, dim)
    check_processes(loss, session.processes)
    return loss


def _start_projection(session: Session, net: RetrievalNet) -> None:
    """Start the projection, if any, as a PCA of training photos; the same in all processes."""
    layer, train = net.projection, session.plan.train
    if layer is None:
        return
    with failing_together(session.device):
        if session.rank == 0:
            order = np.random.default_rng(session.plan.config.seed).permutation(len(train))
            some = train.subset(np.sort(order[:PCA_PHOTOS]))
            found = session.describe_pooled(net, some, "describing photos")
            start_projection(layer, torch.from_numpy(found.descriptors))
    if session.processes > 1:
        for weight in (layer.weight, layer.bias):
            dist.broadcast(weight.data, 0)


def adapter_parts(session: Session) -> TrainingParts:
    """Create a frozen network with a linear layer, which is trained.

    The network describes every photo once, as in validation: the whole photo, without random crops.
    Then each update takes a batch of these descriptors instead of crops, so it takes milliseconds.
    """
    plan = session.plan
    net = make_net(plan.config, plan.parts.modules).to(session.device).requires_grad_(False)
    head = Head(net.dim).to(net.mean)
    # The layer is the projection of the network, so the network is saved like any other.
    net.projection = head.layer
    net.config = net.config.model_copy(update={"projection": net.dim})
    describe = partial(session.describe_pooled, net)
    known = partial(describe, plan.train, "describing the photos")
    return TrainingParts(
        net,
        head,
        settings_loss(session, net.dim),
        DescriptorBatches(PhotoBatches(session, net), known),
        HeadValidator(session, head, partial(describe, plan.validation, "validating")),
        ModelFolder(session, net, plan.sizes),
    )


class Head(nn.Module):
    """Applies a linear layer to descriptors [b, C, 1, 1], in the shape of images for the step.

    The layer starts as the identity. It has no bias that is trained: the descriptors are the same
    whether its input is normalized or not.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layer = nn.Linear(dim, dim)
        nn.init.eye_(self.layer.weight)
        nn.init.zeros_(self.layer.bias).requires_grad_(False)

    def forward(self, vectors: Tensor) -> Tensor:
        """Compute unit descriptors [b, C]."""
        return F.normalize(self.layer(vectors.flatten(1)), dim=1)


class DescriptorBatches(PhotoBatches):
    """Batches of descriptors of training photos, instead of crops.

    Args:
        drawing: draws the photos of a batch.
        describe: returns the descriptors of the photos; called once.
    """

    def __init__(self, drawing: PhotoBatches, describe: Callable[[], Described]) -> None:
        self.drawing, self._known = drawing, cache(describe)

    def draw(self, update: int) -> Indices:
        """Return the numbers, among the described photos, of this process's part of a batch."""
        labels = self.drawing.images.labels[self._known().kept]
        return self.drawing.share(self.drawing.draw_whole(labels, update))

    def load(self, stop: int) -> Batches:
        """Return the batches from the next update on."""
        self._known()  # before the network is validated
        return self._batches(range(self.drawing.session.progress.update, stop))

    def _batches(self, updates: range) -> Generator[CropBatch, None, None]:
        kept, descriptors = self._known()
        labels = torch.from_numpy(self.drawing.images.labels[kept])
        for update in updates:
            rows = torch.from_numpy(self.draw(update))
            images = torch.from_numpy(descriptors)[rows, :, None, None]
            yield CropBatch(images, labels[rows], ())


class HeadValidator(Validator):
    """Validates a head on known descriptors of the validation photos.

    Args:
        session: the run.
        head: the head.
        describe: returns the descriptors of the photos; called once.
    """

    def __init__(self, session: Session, head: Head, describe: Callable[[], Described]) -> None:
        self.session, self.images = session, session.plan.validation
        self.head, self._known = head, cache(describe)

    def describe(self) -> Described:
        """Describe the validation photos with the current weights."""
        kept, descriptors = self._known()
        with torch.no_grad():
            rows = self.head(torch.from_numpy(descriptors).to(self.session.device))
        return Described(kept, rows.float().cpu().numpy())
