"""The training loop: batches, the three-stage step, validation, checkpoints."""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from listwise.data import CropBatch
from listwise.data.workers import explain_lost_workers
from listwise.errors import InputError
from listwise.losses import class_balanced_weights
from listwise.machine import core_count, seeded, shared_cores
from listwise.models import RetrievalNet
from listwise.models.pooling import GeM
from listwise.plugins import CUSTOM, custom_name
from listwise.progress import count_of, readable_time
from listwise.settings import TrainConfig
from listwise.training.choices import TrainPlan, size_text
from listwise.training.distillation import distillation_parts
from listwise.training.distributed import failing_together, world
from listwise.training.duration import TimeLeft, measure_speed, validations
from listwise.training.forward import free_bytes
from listwise.training.loading import keep_photos
from listwise.training.objective import CrossBatchMemory, Loss, loss_module
from listwise.training.parts import (
    Described,
    Session,
    TrainingParts,
    adapter_parts,
    photo_parts,
)
from listwise.training.plan import prepare
from listwise.training.run import (
    CHECKPOINT_FILE,
    MODEL_FOLDER,
    RunFiles,
    add_to_run,
    check_unused,
    checkpoint_tensors,
    is_index_run,
    load_checkpoint,
    read_run_settings,
    reopen_run,
    start_run,
)
from listwise.training.step import Counts, MultistageStep
from listwise.training.view import TrainView
from listwise.training.weights import WeightAverage, make_optimizer, set_learning_rate

# Compiling takes a minute or two; on a large GPU it saves about as much time in this many pixels.
COMPILED_PIXELS = 5e10


@dataclass(frozen=True)
class TrainResult:
    """The result of a training run.

    Attributes:
        model: the folder of the network with the best validation mAP.
        first_map: the validation mAP before training.
        best_map: the best validation mAP.
        best_update: the update after which it was measured.
        updates: the number of updates.
        counts: the images that went forward and backward.
        seconds: the duration of the run.
        max_side: the longer side that the model reduces larger photos to; 0 keeps their size.
    """

    model: Path
    first_map: float
    best_map: float
    best_update: int
    updates: int
    counts: Counts
    seconds: float
    max_side: int = 0


class Trainer:
    """Train a network on the photos and settings of a plan, and write a run folder.

    The folder has the settings, `metrics.jsonl`, TensorBoard files, a checkpoint, and `model`:
    the network with the best mAP on the validation classes so far.

    Args:
        plan: photos and settings, from `prepare`.
        run: the folder of the run.
        view: shows the progress to the user; by default nothing is shown.
        resume: resume the run in the folder instead of starting a new one.
        make_parts: creates the network of the run, and what trains, validates and saves it; by
            default for the settings of the plan.

    Examples:
        >>> plan = prepare("photos", {"backbone": "resnet18"})  # doctest: +SKIP
        >>> Trainer(plan, "runs/first").fit().best_map          # doctest: +SKIP
    """

    def __init__(
        self,
        plan: TrainPlan,
        run: str | Path,
        view: TrainView | None = None,
        *,
        resume: bool = False,
        make_parts: Callable[[Session], TrainingParts] | None = None,
    ) -> None:
        config, (rank, processes) = plan.config, world()
        device = torch.device(config.device)
        if processes > 1 and device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        # Together: a slow process would find the run folder that the first has created meanwhile.
        with failing_together(device):
            if not resume:
                check_unused(run)
        # The session frees a teacher, which may be large, once it is not needed any more.
        teacher, plan = plan.parts.teacher, replace(plan, parts=replace(plan.parts, teacher=None))
        self.view = (view if rank == 0 else None) or TrainView()
        session = Session(plan, Path(run), self.view, device, rank, processes, teacher)
        self.session, self.plan, self.run = session, plan, session.run
        if make_parts is None:
            make_parts = photo_parts
            if config.adapter or config.teacher:
                make_parts = adapter_parts if config.adapter else distillation_parts
        with seeded(config.seed, device):
            self.parts = make_parts(session)
        self.net, self.loss = self.parts.net, self.parts.loss
        of_loss = loss_module(self.loss).to(device)
        self.optimizer = make_optimizer(config, self.net, of_loss)
        self.average = WeightAverage(self.net, self.optimizer, config.ema) if config.ema else None
        self._saved: dict[str, nn.Module | CrossBatchMemory] = {"net": self.net, "loss": of_loss}
        self.memory = None
        if config.memory:
            self.memory = CrossBatchMemory(config.memory, config.memory_warmup)
            self._saved["memory"] = self.memory
        checkpoint = self.run / CHECKPOINT_FILE
        self._random: list[Tensor] = []
        self._state: tuple[list[Tensor], Counts] | None = None
        if resume and checkpoint.exists():
            loaded = load_checkpoint(checkpoint, self._saved, self.optimizer)
            session.progress, self._random = loaded
        self.progress = session.progress
        self.step = self._make_step()
        count = len(plan.train) + len(plan.validation)
        session.kept, keeping = keep_photos(count, plan.decoded_bytes, device)
        if keeping:
            self.view.message(keeping)
        self._time_left = TimeLeft(plan, self.parts.model.sizes.cost())
        self._started = time.perf_counter()
        if rank == 0 and resume:
            reopen_run(self.run, plan)
        elif rank == 0:
            start_run(self.run, plan, keeping)

    @explain_lost_workers()
    @shared_cores()
    def fit(self) -> TrainResult:
        """Train until the last update, or until validation mAP has stopped rising."""
        progress = self.progress
        files = None
        with ExitStack() as stack:
            stack.enter_context(seeded(self.plan.config.seed, self.session.device, self._random))
            stack.callback(self.view.close)
            if self.session.rank == 0:
                files = stack.enter_context(closing(RunFiles(self.run, progress)))
                for note in files.notes:
                    self.view.message(note)
            self._announce_time()
            self.view.start(progress.update, self.plan.config.updates)
            self._started = time.perf_counter() - progress.seconds
            try:
                self._train(files)
            except KeyboardInterrupt:
                self._save_interrupted(files)
                raise
            self._report_end()
            if progress.max_side is None:
                self._choose_size(files)
        return TrainResult(
            self.run / MODEL_FOLDER,
            progress.first_map,
            progress.best_map,
            progress.best_update,
            progress.update,
            self.step.counts,
            progress.seconds,
            progress.max_side or 0,
        )

    def _train(self, files: RunFiles | None) -> None:
        config, progress = self.plan.config, self.progress
        if progress.pending:
            self._end_update(files)
        if self._finished():
            return
        if progress.update == 0:
            self.parts.start()
        with closing(self.parts.batches.load(config.updates)) as batches:
            if progress.update == 0:  # while the first batch is loaded
                value = self._validate(files)
                if files:
                    files.write_metrics(0, validation_map=value)
            self._note_state()
            mark = time.perf_counter()
            for batch in batches:
                self.session.report_unreadable(
                    batch.errors, "another photo of its class is used instead"
                )
                rate = set_learning_rate(config, self.optimizer, progress.update)
                loss = self._update(batch)
                progress.update += 1
                seconds = time.perf_counter() - mark
                self._time_left.note_update(seconds)
                progress.out_of_time = self._over(self._time_left.until_stopped())
                self.view.advance(progress.update, self._time_left.seconds(progress.update))
                metrics = {
                    "loss": loss,
                    "learning_rate": rate,
                    "images_per_second": len(batch.images) * self.session.processes / seconds,
                    "forwards": self.step.counts.forwards,
                    "backwards": self.step.counts.backwards,
                }
                if isinstance(self.net, RetrievalNet) and isinstance(self.net.pooling, GeM):
                    metrics["gem_power"] = float(self.net.pooling.p.detach())
                progress.pending = metrics
                self._note_state()
                self.view.update(progress.update, metrics)
                self._end_update(files)
                if self._finished():
                    break
                mark = time.perf_counter()

    def _end_update(self, files: RunFiles | None) -> None:
        """Validate if it is time to, and write the metrics of the update, and a checkpoint."""
        config, progress = self.plan.config, self.progress
        if progress.update % config.validate_every == 0 or self._finished():
            progress.pending["validation_map"] = self._validate(files)
        metrics, progress.pending = progress.pending, {}
        if files:
            files.write_metrics(progress.update, **metrics)
        # The first update fixes the micro-batch; a new best must match `model`.
        due = progress.update in (1, progress.best_update)
        if due or progress.update % config.checkpoint_every == 0 or self._finished():
            self._save(files)

    def _note_state(self) -> None:
        """Note what a checkpoint needs if the next update is interrupted."""
        self._state = self.step.forward().random_state(), replace(self.step.counts)

    def _save_interrupted(self, files: RunFiles | None) -> None:
        """Write a checkpoint of the last update, unless the weights were just being changed."""
        if self._state is not None and self.progress.update:
            random_state, self.progress.counts = self._state
            self.step.forward().set_random_state(random_state)
            self._save(files)

    def _report_end(self) -> None:
        """Tell the user why training stopped early, and if no update was better than the start."""
        config, progress = self.plan.config, self.progress
        if progress.best_update == 0:
            self.view.message(
                "no update has a better validation mAP than the network before training: the model "
                "is that network"
            )
        if progress.update < config.updates:
            reason = f"no better mAP in the last {progress.validations_since_best} validations"
            if progress.out_of_time:
                reason = f"the {config.minutes:g} minutes are nearly over"
            self.view.message(f"stopped after update {progress.update}: {reason}")

    def _choose_size(self, files: RunFiles | None) -> None:
        """Choose the photo size with the best validation mAP, and store it with the model."""
        progress, session, model = self.progress, self.session, self.parts.model
        sizes, validator = model.sizes, self.parts.validator
        maps = {sizes.start: progress.best_map}
        described: dict[int, Described] = {}
        net = None
        if files and (sizes.larger or sizes.smaller):  # the first process validates
            net = model.net
            if self.average or progress.best_update < progress.update:
                files.wait()  # the best network is complete then
                net = model.load()

        def measure(size: int) -> float:
            pixels = (size / sizes.start) ** 2
            if size not in maps and not self._over(self._time_left.of_size(pixels)):
                value = 0.0
                try:
                    if net is not None:
                        what = f"validating at {size} pixels"
                        described[size] = session.describe(net, validator.images, size, what)
                        value = validator.measure(described[size])
                except InputError as error:  # the memory of the GPU is too small
                    self.view.message(f"photos of {size} pixels are not tried: {error}")
                maps[size] = session.from_first(value)
            return maps.get(size, 0.0)

        progress.max_side = chosen = sizes.best(measure)
        if files and chosen in described:
            files.wait()
            model.write_size(described[chosen], chosen, progress.best_map, maps[chosen])
        if files:
            add_to_run(self.run, max_side=chosen, max_side_maps=maps)
            files.wait()
            if model.not_calibrated:
                self.view.message(f"the model is not calibrated: {model.not_calibrated}")
        self.view.message(size_text(chosen, maps, self.plan.val_sides[1]))
        self._save(files)
        self.view.advance(progress.update, 0.0)

    def _announce_time(self) -> None:
        """Print how long the run will take; on a CPU a short trial measures its speed."""
        plan, config, progress = self.plan, self.plan.config, self.progress
        if not self.view.wants_estimate or progress.update >= config.updates:
            return
        # A trial of an adapter takes longer than its updates, and compiling another size too.
        device, quick = self.session.device, config.adapter or self.step.compile
        alone_on_cpu = device.type == "cpu" and self.session.processes == 1
        if plan.speed is None and alone_on_cpu and not quick:
            plan = replace(plan, speed=measure_speed(self.step.forward(), plan))
            self._time_left = TimeLeft(plan, self.parts.model.sizes.cost())
        seconds = self._time_left.seconds(progress.update)
        if seconds is None:
            return
        cores = f"{core_count()} cores" if device.type == "cpu" else "with its GPU"
        self.view.message(
            f"about {readable_time(seconds)} on this machine ({cores}): "
            f"{count_of(config.updates - progress.update, 'update')} of "
            f"{count_of(config.images_per_update, 'image')}, "
            f"{count_of(validations(config) + 1, 'validation')} of "
            f"{count_of(len(plan.validation), 'photo')}"
        )

    def _over(self, ahead: float) -> bool:
        """Return whether the maximum duration ends before what takes `ahead` more seconds."""
        minutes, spent = self.plan.config.minutes, self.plan.spent - self._started
        return minutes is not None and spent + time.perf_counter() + ahead > 60 * minutes

    def _note_part(self, part: float, started: float) -> None:
        """Show the progress inside an update."""
        done = self.progress.update + part
        self._time_left.note_update(time.perf_counter() - started, part)
        if part < 1:
            self.view.advance(done, self._time_left.seconds(done))

    def _make_step(self) -> MultistageStep:
        config, parts = self.plan.config, self.parts
        weighted = config.class_weights and config.mined is None and not config.teacher
        step = MultistageStep(
            parts.module,
            self.loss,
            self.progress.micro_batch or config.micro_batch,
            memory=self.memory,
            weighting=class_balanced_weights if weighted else None,
            autocast=None if config.adapter else self.session.autocast,
            compile=not config.adapter and worth_compiling(config, self.session.device),
        )
        step.counts = self.progress.counts
        return step

    def _update(self, batch: CropBatch) -> float:
        progress, cpu = self.progress, self.session.device.type == "cpu"
        self.net.train()
        self.optimizer.zero_grad(set_to_none=True)
        if cpu:  # a GPU is still computing when a call returns
            self.step.on_progress = partial(self._note_part, started=time.perf_counter())
        photos = None
        if self.memory is not None:
            photos = torch.from_numpy(self.parts.batches.draw(progress.update))
            self._state = None  # the step changes the memory
        loss = self.step(self._upload(batch.images), batch.labels, photos).item()
        if self.step.fallback:
            self.session.message_once(self.step.fallback, self.step.fallback)
        if progress.micro_batch is None:
            self.session.message_once(self.step.choice.partition(": ")[2], self.step.choice)
            if cpu:
                # Another micro-batch sums in another order, which changes the last bits, so a
                # resumed run keeps this one. On a GPU it chooses again, as free memory may differ.
                progress.micro_batch = self.step.keep_micro_batch()
        if not math.isfinite(loss):
            raise InputError(
                f"the loss is {loss} at update {progress.update + 1}: "
                'lower `learning_rate`, or use `precision="float32"`'
            )
        self._state = None  # until the weights and the progress fit together again
        self.optimizer.step()
        if self.average:
            self.average.update(progress.update)
        return loss

    def _upload(self, images: Tensor) -> Tensor:
        """Copy the crops to the GPU if they take at most a quarter of its free memory."""
        device = self.session.device
        if device.type == "cuda" and images.nbytes < free_bytes(device) // 4:
            return images.to(device, non_blocking=True)
        return images

    def _validate(self, files: RunFiles | None) -> float:
        """Validate the weights, and their average if there is one; return the better mAP."""
        progress = self.progress
        started = time.perf_counter()
        value = self._validate_weights(files, picture=True)
        if self.average and progress.update:
            with self.average.applied():
                value = max(value, self._validate_weights(files))
        best = progress.best_update == progress.update
        progress.validations_since_best = 0 if best else progress.validations_since_best + 1
        self._time_left.note_validation(time.perf_counter() - started)
        self.view.advance(progress.update, self._time_left.seconds(progress.update))
        self.view.validation(progress.update, value, best)
        return value

    def _validate_weights(self, files: RunFiles | None, picture: bool = False) -> float:
        """Measure mAP on the validation classes; save the network if it is the best so far."""
        progress, validator = self.progress, self.parts.validator
        value, found = 0.0, None
        if files:  # the first process
            found = validator.describe()
            value = validator.measure(found)
            if picture:
                seen = self.plan.validation.subset(found.kept)
                files.save_picture(progress.update, seen, found.descriptors)
        value = self.session.from_first(value)
        if progress.update == 0:
            progress.first_map = value
        if value > progress.best_map:
            if files and found:
                files.write("model", self.parts.model.writer(found, value))
            progress.best_map, progress.best_update = value, progress.update
        return value

    def _save(self, files: RunFiles | None) -> None:
        self.progress.seconds = time.perf_counter() - self._started
        if files:
            tensors = checkpoint_tensors(self._saved, self.optimizer, self.session.device)
            files.save_checkpoint(tensors, self.progress)

    def _finished(self) -> bool:
        config, progress = self.plan.config, self.progress
        out_of_patience = config.patience and progress.validations_since_best >= config.patience
        done = progress.update >= config.updates or progress.out_of_time
        return done or bool(out_of_patience)


def resume(
    run: str | Path,
    view: TrainView | None = None,
    *,
    loss: Loss | None = None,
    backbone: nn.Module | None = None,
    pooling: nn.Module | None = None,
) -> Trainer:
    """Create the trainer of an interrupted run, with the data and settings of that run.

    Args:
        run: the folder of the run.
        view: shows the progress to the user; by default nothing is shown.
        loss: the loss object that the run was started with, if it was your own.
        backbone: the backbone module that the run was started with, if it was your own.
        pooling: the pooling module that the run was started with, if it was your own.

    Examples:
        >>> resume("runs/first").fit().best_map  # doctest: +SKIP
    """
    about, settings = read_run_settings(run)
    if is_index_run(run, about):
        raise InputError(
            f'{run} trains from an index: resume it with listwise.train(resume="{run}")'
        )
    given = {"loss": loss, "backbone": backbone, "pooling": pooling}
    for kind, part in given.items():
        if part is None:
            continue
        recorded, name = str(settings.get(kind)), custom_name(part)
        # Compare class names only: a class may have moved, as when a script becomes a package.
        if not recorded.startswith(CUSTOM) or recorded.split(".")[-1] != name.split(".")[-1]:
            raise InputError(
                f"{run} was started with the {kind} {recorded!r}, not {name!r}: pass that one"
            )
        settings[kind] = part
    return Trainer(prepare(about["data"], settings, preset="paper"), run, view, resume=True)


def worth_compiling(config: TrainConfig, device: torch.device) -> bool:
    """Return whether to compile the network: if set so, or if it makes the whole run shorter."""
    if config.compile != "auto":
        return config.compile == "yes"
    pixels = config.updates * config.images_per_update * config.crops.size**2
    return device.type == "cuda" and pixels >= COMPILED_PIXELS
