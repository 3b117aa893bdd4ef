"""Estimate how long a run takes, and plan a run that ends within a given time.

The time of a run is the time of its updates, which is proportional to their images, and of its
validations, which is proportional to their photos. A trial measures both on this machine.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from listwise.data import CropDataset
from listwise.data.gpu_photos import gpu_decodes
from listwise.errors import InputError
from listwise.machine import core_count, shared_cores
from listwise.models import RetrievalNet
from listwise.models.embed import embed_photos
from listwise.progress import readable_time
from listwise.settings import TrainConfig
from listwise.training.choices import Speed, TrainPlan
from listwise.training.distributed import world
from listwise.training.forward import Forward
from listwise.training.weights import PCA_PHOTOS, half_precision, make_net

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
# Photos that are cropped in a trial, and that a teacher describes.
TRIAL_CROPS = 8
# Trials are repeated until they have taken this many seconds, because other programs may disturb
# some of them.
TRIAL_SECONDS, MAX_TRIALS = 1.0, 4


def validations(config: TrainConfig) -> int:
    """Return the number of validations of a run after the one before the first update."""
    return math.ceil(config.updates / config.validate_every)


# What is reduced, and how the note says so.
REDUCED: dict[str, tuple[str, Callable[[TrainConfig], int]]] = {
    "updates": ("{} updates instead of {}", lambda config: config.updates),
    "crops.size": ("crops of {} pixels instead of {}", lambda config: config.crops.size),
    "batch_size": ("batches of {} images instead of {}", lambda config: config.batch_size),
    "validate_every": ("{} validations instead of {}", validations),
}


@shared_cores()
def measure_speed(forward: Forward, plan: TrainPlan) -> Speed:
    """Measure the speed of training and validation on a few photos.

    Args:
        forward: computes with the network, which is a `RetrievalNet`.
        plan: photos and settings.
    """
    config, train, validation = plan.config, plan.train, plan.validation
    random_state = forward.random_state()
    device, kind = forward.device, forward.device.type
    dataset = CropDataset(train, config.crops, config.seed)
    count = max(1, min(TRIAL_IMAGES[kind], TRIAL_PIXELS[kind] // config.crops.size**2))
    some = np.linspace(0, len(train) - 1, min(count, TRIAL_CROPS)).astype(int).tolist()
    crops = torch.stack([dataset[0, i].image for i in some])
    cut = 0.0
    if not gpu_decodes(device):  # it does so while the network computes
        # On a CPU, the workers that decode photos take their share of the cores.
        workers = min(core_count(), max(1, config.workers or 0))
        cut = _shortest(lambda: [dataset[0, i] for i in some]) / len(some) / workers
    images = crops.repeat(max(1, count // len(crops)), 1, 1, 1).to(device)
    image = _shortest(lambda: _pass(forward, images)) / len(images)

    net, photos = forward.net, validation.subset(range(min(TRIAL_PHOTOS[kind], len(validation))))
    assert isinstance(net, RetrievalNet)
    describe = partial(embed_photos, net, photos, max_side=plan.val_max_side)
    photo = _shortest(partial(describe, autocast=forward.autocast)) / len(photos)
    forward.set_random_state(random_state)
    return Speed(cut, image, photo)


def _pass(forward: Forward, images: torch.Tensor) -> None:
    """Compute what an update computes for a micro-batch: forward, and forward and backward."""
    parameters = [p for p in forward.net.train().parameters() if p.requires_grad]
    forward.refresh()
    with torch.no_grad():
        forward(images)
    descriptors = forward(images)
    gradient = descriptors.detach().roll(1, dims=1)
    torch.autograd.grad(descriptors, parameters, gradient, allow_unused=True)


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
    """The remaining time of a run, from a trial first and then from the run itself.

    Args:
        plan: settings and photos, and the speed that a trial measured, if there was one.
        choice: duration of the choice of the photo size, as a multiple of that of a validation.
    """

    def __init__(self, plan: TrainPlan, choice: float) -> None:
        config, speed, photos = plan.config, plan.speed, len(plan.train)
        self._updates, self._every, self._choice = config.updates, config.validate_every, choice
        self._usual: float | None = None
        self._start = self._validation = 0.0
        if speed is not None:
            self._usual = config.images_per_update * (speed.crop + speed.image)
            both = 2 if config.ema else 1  # the weights and their average
            self._validation = VALIDATION_SECONDS + both * len(plan.validation) * speed.photo
            described = min(photos, PCA_PHOTOS) if config.projection and not config.teacher else 0
            if config.mined:
                period = max(1, config.mined.refresh // config.mined.tuples)
                described += math.ceil(config.updates / period) * min(photos, config.mined.pool)
            self._start = START_SECONDS + self._validation + described * speed.photo
        self._update, self._longest = self._usual, self._validation

    def note_update(self, seconds: float, part: float = 1.0) -> None:
        """Take the time of an update into account, or of a part of it.

        The first part of a run is slower than the others, so the rest of an update is estimated
        from earlier updates or the trial, if there were any.
        """
        if part < 1 and self._usual is not None:
            self._update = seconds + (1 - part) * self._usual
        else:
            self._update = seconds / part
        if part == 1:
            self._usual = self._update

    def note_validation(self, seconds: float) -> None:
        """Take the time of a validation into account."""
        self._validation, self._longest = seconds, max(self._longest, seconds)
        self._start = 0.0  # the first validation is before the first update

    def seconds(self, updates: float) -> float | None:
        """Return the seconds that are left after this many updates; None if unknown.

        Until the first validation, this includes the start of the run.
        """
        if self._update is None:
            return None
        left = math.ceil(self._updates / self._every) - int(updates) // self._every
        ahead = left * self._validation + self._choice * self._longest
        return self._start + (self._updates - updates) * self._update + ahead

    def until_stopped(self) -> float:
        """Return the seconds of one more update and a validation, and of what follows them."""
        last = (self._update or 0.0) + self._validation
        return STOP_PART * last + self.of_size(self._choice) + START_SECONDS

    def of_size(self, pixels: float) -> float:
        """Return the seconds of a validation with this many times the pixels, at most."""
        return STOP_PART * pixels * self._longest


def plan_within_minutes(
    given: TrainConfig, choose: Callable[[TrainConfig], TrainPlan], spent: float
) -> TrainPlan:
    """Plan a run that ends within the minutes that the user gave.

    Args:
        given: the settings that the user gave; they are never changed.
        choose: chooses all other settings.
        spent: the seconds that have passed already.

    Raises:
        InputError: the shortest run takes longer, or there are several processes.
    """
    if world()[1] > 1:
        raise InputError("`minutes` works in a single process: give `updates` instead")
    fixed, minutes = given.model_fields_set, given.minutes
    assert minutes is not None
    if {"updates", "batch_size"} <= fixed and "size" in given.crops.model_fields_set:
        return choose(given)  # also in a resumed run
    if given.compile == "auto":  # it takes a minute or two, which no trial measures
        given = given.model_copy(update={"compile": "no"})
    default, seconds = choose(given), 0.0
    speed = measure_plan(default)
    spent += _teacher_seconds(default, speed)
    for config in reductions(given, default.config):
        plan = choose(config)
        scaled = speed.scaled((plan.config.crops.size / default.config.crops.size) ** 2)
        plan = replace(plan, speed=scaled)
        seconds = TimeLeft(plan, plan.sizes.cost()).seconds(0) or 0.0
        if seconds <= PLANNED_PART * (60 * minutes - spent):
            return _explained(plan, default.config, seconds)
    needed = math.ceil((seconds / PLANNED_PART + spent) / 60)
    raise InputError(
        f"the shortest training of these photos on this machine takes about {needed} min: "
        f"give `minutes` {needed} or more"
        + ("" if "backbone" in default.parts.modules else ", or a smaller `backbone`")
    )


def measure_plan(plan: TrainPlan) -> Speed:
    """Measure the speed of a network with the settings of a plan, which is created for this."""
    config, modules = plan.config, plan.parts.modules
    weights = {} if "backbone" in modules else {"weights": "random"}
    with torch.random.fork_rng([]):
        net = make_net(config.model_copy(update=weights), copy.deepcopy(modules))
    return measure_speed(Forward(net.to(config.device), half_precision(config)), plan)


def _teacher_seconds(plan: TrainPlan, speed: Speed) -> float:
    """Return the seconds in which a teacher describes all photos, and the network its own."""
    teacher, train = plan.parts.teacher, plan.train
    if teacher is None:
        return 0.0
    some = train.subset(range(min(TRIAL_CROPS, len(train))))
    photo = _shortest(lambda: teacher.describe(some, on_progress=lambda done: None)) / len(some)
    return photo * (len(train) + len(plan.validation)) + speed.photo * len(train)


def _explained(plan: TrainPlan, default: TrainConfig, seconds: float) -> TrainPlan:
    """Explain what is reduced, compared with the default settings."""
    within, less = f"{default.minutes:g} min", dict[str, str]()
    for name, (phrase, value) in REDUCED.items():
        before, now = value(default), value(plan.config)
        if before != now:
            less[name] = phrase.format(now, before)
    note = f"to end within {within}: {', '.join(less.values())}"
    if not less:
        part = f"{readable_time(seconds)} of the {within}"
        note = f"the run takes about {part}: nothing is reduced"
    reasons = {name: f"to end within {within}: {what}" for name, what in less.items()}
    return replace(plan, reasons=plan.reasons | reasons, notes=[*plan.notes, note])


def reductions(given: TrainConfig, default: TrainConfig) -> Iterator[TrainConfig]:
    """Yield settings of ever shorter runs, in the order of what is reduced first.

    First there are fewer validations, then fewer updates, then smaller crops, then smaller batches.

    Args:
        given: the settings that the user gave; they keep their values.
        default: all settings of the run if nothing is reduced.
    """
    fixed, every = given.model_fields_set, default.validate_every
    updates, size, batch = default.updates, default.crops.size, default.batch_size

    def shorter() -> TrainConfig:
        fewer = max(every, math.ceil(updates / FEW_VALIDATIONS))
        changed = {
            "updates": updates,
            "validate_every": every if "validate_every" in fixed else fewer,
            "batch_size": batch,
            "crops": given.crops.model_copy(update={"size": size}),
        }
        return given.model_copy(update=changed)

    yield given
    yield shorter()
    while "updates" not in fixed and updates > MIN_UPDATES:
        updates -= 1
        yield shorter()
    while "size" not in given.crops.model_fields_set and size > MIN_CROP:
        # About a fifth smaller; multiples of 32 suit networks.
        size = max(MIN_CROP, min(size - 1, round(0.8 * size / 32) * 32))
        yield shorter()
    # The tuples of a mined loss determine its batches.
    while "batch_size" not in fixed and not default.mined and batch > MIN_BATCH:
        batch = max(MIN_BATCH, batch // 2)
        yield shorter()
