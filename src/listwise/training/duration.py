"""Estimate how long a run takes, and plan a run that ends within a given time.

The time of a run is the time of its updates, which is proportional to their images, and of its
validations, which is proportional to their photos. A trial measures both on this machine.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from listwise.data import CropDataset, Decoding, LabelledImages, decode_photos
from listwise.data.gpu_photos import gpu_decodes
from listwise.machine import core_count, shared_cores
from listwise.models import RetrievalNet
from listwise.models.embed import PhotoNet, embed_decoded, example_image
from listwise.settings import TrainConfig
from listwise.training.forward import Forward
from listwise.training.projection import PHOTOS

# The least that a planned run has, if the user does not set less.
MIN_UPDATES, MIN_CROP, MIN_BATCH = 20, 96, 64
# Validations of a planned run after training has started; by default there are about 15.
FEW_VALIDATIONS = 5
# The part of the time that is planned. Other programs may slow down the rest of the run.
PLANNED_PART = 0.8
# Seconds of what is not measured: starting workers, and saving model and pictures.
START_SECONDS, VALIDATION_SECONDS = 5.0, 1.0
# The last update and validation of a limited run may take this many times as long as the ones
# before.
STOP_PART = 1.5
# Images and photos of a trial: few on a CPU, where a large network takes seconds for each, and many
# on a GPU, which takes as long for a few.
TRIAL_IMAGES = {"cpu": 8, "cuda": 256}
TRIAL_PIXELS = {"cpu": 2**19, "cuda": 2**24}
TRIAL_PHOTOS = {"cpu": 4, "cuda": 128}
# A CPU cuts so many crops in a trial, at most.
TRIAL_CROPS = 8
# Trials are repeated until they have taken this many seconds, because other programs may disturb
# some of them.
TRIAL_SECONDS, MAX_TRIALS = 1.0, 4


class Effort(NamedTuple):
    """What the duration of a run depends on: updates, crop size, batch size, validations."""

    updates: int
    crop: int
    batch: int
    validate_every: int

    @property
    def validations(self) -> int:
        """Number of validations, without the one before the first update."""
        return math.ceil(self.updates / self.validate_every)


class Speed(NamedTuple):
    """Seconds per image of an update, and per validation photo, at a crop size."""

    crop: int
    image: float
    photo: float


@dataclass(frozen=True)
class Workload:
    """The parts of a run that do not change: the photos that it describes.

    Attributes:
        validation: number of validation photos.
        mined: number of photos that are described for each round of mining.
        mining_period: number of updates between two rounds; 0 without mining.
        start: number of photos that are described before the first update, for a projection.
    """

    validation: int
    mined: int = 0
    mining_period: int = 0
    start: int = 0


def run_seconds(effort: Effort, speed: Speed, work: Workload) -> float:
    """Return the expected duration of a run."""
    validation = VALIDATION_SECONDS + work.validation * speed.photo
    rounds = math.ceil(effort.updates / work.mining_period) if work.mining_period else 0
    return (
        START_SECONDS
        + effort.updates * effort.batch * speed.image
        + (1 + effort.validations) * validation
        + (work.start + rounds * work.mined) * speed.photo
    )


def between(large: Speed, small: Speed, crop: int) -> Speed:
    """Interpolate two measured speeds by the number of pixels of a crop."""
    if large.crop == small.crop:
        return large
    part = (crop**2 - small.crop**2) / (large.crop**2 - small.crop**2)
    part = min(1.0, max(0.0, part))

    def mix(high: float, low: float) -> float:
        low = min(low, high)  # a measurement may be disturbed
        return low + part * (high - low)

    return Speed(crop, mix(large.image, small.image), mix(large.photo, small.photo))


def efforts(default: Effort, fixed: frozenset[str] = frozenset()) -> Iterator[Effort]:
    """Yield the default and ever smaller efforts, in the order of what is reduced first.

    First there are fewer validations, then fewer updates, then smaller crops, then smaller batches.
    Fields in `fixed` keep their values.
    """
    yield default
    current = default
    every = default.validate_every
    if "validate_every" not in fixed and default.validations > FEW_VALIDATIONS:
        every = math.ceil(default.updates / FEW_VALIDATIONS)
        current = current._replace(validate_every=every)
        yield current
    if "updates" not in fixed:
        for updates in range(default.updates - 1, min(MIN_UPDATES, default.updates) - 1, -1):
            if "validate_every" not in fixed:
                every = max(default.validate_every, math.ceil(updates / FEW_VALIDATIONS))
                every = min(every, current.validate_every)
            current = current._replace(updates=updates, validate_every=every)
            yield current
    if "crop" not in fixed:
        for crop in smaller_crops(default.crop):
            current = current._replace(crop=crop)
            yield current
    if "batch" not in fixed:
        while current.batch > MIN_BATCH:
            current = current._replace(batch=max(MIN_BATCH, current.batch // 2))
            yield current


def smaller_crops(size: int) -> Iterator[int]:
    """Yield smaller crop sizes, about a fifth smaller each time; multiples of 32 suit networks."""
    while size > MIN_CROP:
        size = max(MIN_CROP, min(size - 1, round(0.8 * size / 32) * 32))
        yield size


def fit_effort(
    default: Effort,
    fixed: frozenset[str],
    limit: float,
    seconds_of: Callable[[Effort], float],
) -> Effort | None:
    """Return the largest effort that takes at most `limit` seconds; None if none does."""
    return next((each for each in efforts(default, fixed) if seconds_of(each) <= limit), None)


def effort_of(config: TrainConfig) -> Effort:
    """Return the effort of a run with these settings."""
    return Effort(
        config.updates, config.crops.size, config.images_per_update, config.validate_every
    )


def workload_of(
    config: TrainConfig, parts: Mapping[str, Any], train: int, validation: int
) -> Workload:
    """Return the workload of a run on this many photos; `parts` are those of its plan."""
    if config.ema:
        validation *= 2  # the weights and their average
    # The projection of an index's model is trained already, and a teacher is counted elsewhere.
    new = config.projection is not None and "model" not in parts and not config.teacher
    start = min(train, PHOTOS) if new else 0
    if config.mined is None:
        return Workload(validation, start=start)
    period = max(1, config.mined.refresh // config.mined.tuples)
    return Workload(validation, min(train, config.mined.pool), period, start)


class Trial:
    """Measures the speed of a network on some photos.

    Args:
        forward: the network.
        train: the training photos.
        validation: the validation photos.
    """

    def __init__(self, forward: Forward, train: LabelledImages, validation: LabelledImages) -> None:
        self.forward = forward
        self.train = train
        self.validation = validation

    @staticmethod
    def of_settings(
        config: TrainConfig,
        parts: dict[str, Any],
        train: LabelledImages,
        validation: LabelledImages,
    ) -> "Trial":
        """Return a trial of the network of a config, with random weights."""
        backbone, pooling = (
            copy.deepcopy(parts.get(kind, getattr(config, kind)))
            for kind in ("backbone", "pooling")
        )
        random = "random" if isinstance(backbone, str) else "auto"
        with torch.random.fork_rng([]):
            net = RetrievalNet(backbone, pooling, config.projection, random)
        half = torch.bfloat16 if config.precision == "bfloat16" else None
        return Trial(Forward(net.to(config.device), half), train, validation)

    @shared_cores()
    def measure(self, config: TrainConfig) -> Speed:
        """Measure the speed of training and validation with these settings."""
        random_state = self.forward.random_state()
        crops = self._crops(config)
        # On a CPU, the workers that decode photos take their share of the cores.
        workers = min(core_count(), max(1, config.workers or 0))
        self._pass(crops.images[:1])  # the first pass copies the network
        image = _shortest(lambda: self._pass(crops.images)) / len(crops.images)
        decode, photo = self._photo_seconds(config, workers)
        if gpu_decodes(self.forward.device):  # while the network computes
            image = max(image, decode)
        else:
            image += crops.seconds / workers
        self.forward.set_random_state(random_state)
        return Speed(config.crops.size, image, decode + photo)

    def _crops(self, config: TrainConfig) -> "_Crops":
        """Cut a micro-batch of crops, and measure the seconds that one takes."""
        dataset = CropDataset(self.train, config.crops, config.seed)
        kind = self.forward.device.type
        count = max(1, min(TRIAL_IMAGES[kind], TRIAL_PIXELS[kind] // config.crops.size**2))
        crops = min(count, TRIAL_CROPS)
        step = max(1, len(self.train) // crops)
        keys = [(0, index) for index in range(0, len(self.train), step)][:crops]
        dataset[keys[0]]  # the first call imports libraries
        started = time.perf_counter()
        images = torch.stack([dataset[key].image for key in keys])
        seconds = (time.perf_counter() - started) / len(keys)
        images = images.repeat(max(1, count // len(images)), 1, 1, 1)
        return _Crops(images.to(self.forward.device), seconds)

    def _pass(self, images: torch.Tensor) -> None:
        """Compute what an update computes for a micro-batch: forward, and forward and backward."""
        forward = self.forward
        earlier = [parameter.grad for parameter in forward.net.parameters()]
        forward.net.train()
        forward.refresh()
        with torch.no_grad():
            forward(images)
        descriptors = forward(images)
        forward.backward(descriptors, descriptors.detach().roll(1, dims=1))
        forward.add_gradients()
        for parameter, gradient in zip(forward.net.parameters(), earlier, strict=True):
            parameter.grad = gradient

    def _photo_seconds(self, config: TrainConfig, workers: int) -> tuple[float, float]:
        """Measure the seconds of a validation photo: to decode it, and to describe it."""
        device = self.forward.device
        count = min(TRIAL_PHOTOS[device.type], len(self.validation))
        some = self.validation.subset(list(range(count)))
        on_gpu = gpu_decodes(device)
        readers = workers if on_gpu else 0  # processes that decode would take long to start
        how = Decoding(config.val_max_side)
        photos = list(decode_photos(some.files(), how, readers, device))
        decode = _shortest(lambda: list(decode_photos(some.files(), how, readers, device)))
        decode /= len(photos) if on_gpu else len(photos) * workers
        net = cast(RetrievalNet, self.forward.net)
        half = self.forward.autocast
        # As in the validations of a run.
        fast = self.forward.evaluation_module(example_image(net))
        network = PhotoNet(net, half, cast(RetrievalNet, fast))
        describe = _shortest(
            lambda: embed_decoded(photos, network, net.dim, device, half, mixed=network.mixed)
        )
        return decode, describe / len(photos)


class _Crops(NamedTuple):
    images: torch.Tensor
    seconds: float


def _shortest(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest of some calls; the first may have to prepare something."""
    taken: list[float] = []
    while len(taken) < 2 or (sum(taken) < TRIAL_SECONDS and len(taken) < MAX_TRIALS):
        started = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return min(taken)


class TimeLeft:
    """The remaining time of a run, from the trial first and then from the run itself.

    Args:
        effort: updates, batch and validations of the run.
        speed: the speed that a trial measured, if there was one.
        work: the workload of the run.
    """

    def __init__(self, effort: Effort, speed: Speed | None, work: Workload) -> None:
        self._effort = effort
        self._update = speed and effort.batch * speed.image
        self._before = self._update
        self._validation = speed and VALIDATION_SECONDS + work.validation * speed.photo

    def note_update(self, seconds: float, part: float = 1.0) -> None:
        """Take the time of an update into account, or of a part of it.

        The first part of a run is slower than the others, so the rest of an update is estimated
        from earlier updates or the trial, if there were any.
        """
        if part < 1 and self._before is not None:
            self._update = seconds + (1 - part) * self._before
        else:
            self._update = seconds / part
        if part == 1:
            self._before = self._update

    def note_validation(self, seconds: float) -> None:
        """Take the time of a validation into account."""
        self._validation = seconds

    def seconds(self, updates: float) -> float | None:
        """Return the seconds that are left after this many updates; None if unknown."""
        if self._update is None:
            return None
        validations = self._effort.validations - int(updates) // self._effort.validate_every
        ahead = validations * (self._validation or 0.0)
        return (self._effort.updates - updates) * self._update + ahead

    def until_stopped(self) -> float:
        """Return the seconds of one more update and a validation, and of what follows them."""
        return STOP_PART * ((self._update or 0.0) + (self._validation or 0.0)) + START_SECONDS


def reductions(default: Effort, chosen: Effort) -> list[str]:
    """Return a phrase for each part of the default that was reduced."""
    wording = {
        "updates": "{1} updates instead of {0}",
        "crop": "crops of {1} pixels instead of {0}",
        "batch": "batches of {1} images instead of {0}",
    }
    found = [
        text.format(getattr(default, name), getattr(chosen, name))
        for name, text in wording.items()
        if getattr(default, name) != getattr(chosen, name)
    ]
    if chosen.validations != default.validations:
        found.append(f"{chosen.validations} validations instead of {default.validations}")
    return found
