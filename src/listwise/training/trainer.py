"""The training loop: batches, the three-stage step, validation, checkpoints."""

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from listwise import __version__
from listwise.data import CropBatch, CropDataset, LabelledImages
from listwise.data.labelled import label_levels
from listwise.data.workers import explain_lost_workers
from listwise.errors import InputError
from listwise.evaluation import mean_average_precision
from listwise.losses import class_balanced_weights
from listwise.machine import core_count, shared_cores
from listwise.models import RetrievalNet
from listwise.models.calibration import fit_calibration
from listwise.models.embed import (
    EmbeddedPhotos,
    PhotoNet,
    embed_decoded,
    embed_photos,
    example_image,
)
from listwise.models.folding import sharing_copy
from listwise.models.lora import add_lora
from listwise.models.pooling import GeM
from listwise.models.storage import write_network
from listwise.settings import TrainConfig
from listwise.training.adam import Adam
from listwise.training.averaging import WeightAverage
from listwise.training.compiling import compile_loss
from listwise.training.cross_batch import CrossBatchMemory
from listwise.training.distributed import failing_together, world
from listwise.training.duration import (
    Speed,
    TimeLeft,
    Trial,
    Workload,
    effort_of,
    run_seconds,
    workload_of,
)
from listwise.training.keeping import DecodedOnce, keep_photos
from listwise.training.layers import RATE_FACTOR, layer_groups
from listwise.training.loading import Batches, load_batches
from listwise.training.memory import free_bytes
from listwise.training.mining.miners import make_miner
from listwise.training.mining.pool import mine_tuples
from listwise.training.objective import (
    Loss,
    check_processes,
    loss_module,
    make_loss,
    with_lengths,
)
from listwise.training.plan import TrainPlan
from listwise.training.projection import PHOTOS, start_projection
from listwise.training.run.checkpoint import (
    Progress,
    checkpoint_tensors,
    load_checkpoint,
    write_checkpoint,
)
from listwise.training.run.folder import (
    CHECKPOINT_FILE,
    MODEL_FOLDER,
    check_unused,
    reopen_run,
    start_run,
)
from listwise.training.run.record import (
    METRICS_FILE,
    Record,
    choose_queries,
    ranked_list_picture,
)
from listwise.training.run.view import (
    TrainView,
    UpdateReport,
    ValidationReport,
    readable_time,
)
from listwise.training.run.writer import FileWriter
from listwise.training.sampling import Indices, draw_batch
from listwise.training.step import Counts, MultistageStep

PICTURED_QUERIES = 5
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
    """

    model: Path
    first_map: float
    best_map: float
    best_update: int
    updates: int
    counts: Counts
    seconds: float


class Trainer:
    """Train a network on the photos and settings of a plan, and write a run folder.

    The folder has the settings, `metrics.jsonl`, TensorBoard files, a checkpoint, and `model`:
    the network with the best mAP on the validation classes so far.

    Args:
        plan: photos and settings, from `prepare`.
        run: the folder of the run.
        view: shows the progress to the user; by default nothing is shown.
        resume: resume the run in the folder instead of starting a new one.

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
    ) -> None:
        self.plan = plan
        self.run = Path(run)
        self.rank, self.processes = world()
        self.view: TrainView = (view if self.rank == 0 else None) or TrainView()
        config = plan.config
        if type(self) is Trainer and (config.adapter or config.teacher):
            name = "adapter" if config.adapter else "teacher"
            raise InputError(
                f"`{name}` needs a trainer of its own: call listwise.train, or make_trainer of "
                "listwise.training.starting instead of Trainer"
            )
        self.device = torch.device(config.device)
        if self.processes > 1 and self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        # Together: a slow process would find the run folder that the first has created meanwhile.
        with failing_together(self.device):
            if not resume:
                check_unused(self.run)
        self._check_processes()
        torch.manual_seed(config.seed)
        self.net = self._make_net().to(self.device)
        self.loss = self._make_loss()
        self.optimizer = self._make_optimizer()
        self.memory = _make_memory(config)
        self.average = WeightAverage(self.net, self.optimizer, config.ema) if config.ema else None
        self.progress = Progress()
        if resume and (self.run / CHECKPOINT_FILE).exists():
            parts = (self.net, self.optimizer, loss_module(self.loss), self.memory)
            self.progress = load_checkpoint(self.run / CHECKPOINT_FILE, *parts)
        self.miner = make_miner(config, plan.train.labels)
        self._tuples: Indices = np.array(self.progress.tuples, dtype=np.int64)
        self._autocast = torch.bfloat16 if config.precision == "bfloat16" else None
        self.step = self._make_step(Counts(**self.progress.counts))
        self.workers = config.workers or 0
        self._shown: set[str] = set()
        self._validating: tuple[RetrievalNet, PhotoNet] | None = None
        self._time_left = self._estimate_from(plan.speed)
        self._writer = FileWriter()
        count = len(plan.train) + len(plan.validation)
        self.kept, self._keeping = keep_photos(count, plan.decoded_bytes, self.device)
        self._validation_photos = DecodedOnce(
            plan.validation,
            config.val_max_side,
            self.workers,
            self.device,
            self.kept,
            first=len(plan.train),
        )
        if self.rank == 0 and resume:
            reopen_run(self.run, plan)
        elif self.rank == 0:
            start_run(self.run, plan, self._keeping)

    @explain_lost_workers()
    @shared_cores()
    def fit(self) -> TrainResult:
        """Train until the last update, or until validation mAP has stopped rising."""
        progress = self.progress
        record = Record(self.run, progress.update) if self.rank == 0 else None
        if record and record.damaged:
            lines = ", ".join(map(str, record.damaged))
            self.view.message(f"note: removed damaged lines of {METRICS_FILE}: {lines}")
        elif record and progress.metrics_sum not in (None, record.sum):
            self.view.message(
                f"note: {METRICS_FILE} is damaged or was edited: its lines up to update "
                f"{progress.update} may be wrong; the training itself does not use them"
            )
        try:
            if self._keeping:
                self.view.message(self._keeping)
            self._announce_time()
            self.view.start(progress.update, self.plan.config.updates)
            self._train(record)
        finally:
            try:
                self._writer.close()
            finally:
                self.view.close()
                if record:
                    record.close()
        assert progress.best_map is not None
        assert progress.first_map is not None
        return TrainResult(
            self.run / MODEL_FOLDER,
            progress.first_map,
            progress.best_map,
            progress.best_update,
            progress.update,
            self.step.counts,
            progress.seconds,
        )

    def _train(self, record: Record | None) -> None:
        config, progress = self.plan.config, self.progress
        started = time.perf_counter() - progress.seconds
        if progress.update == 0 and config.projection is not None:
            self._start_projection()
        with closing(self._start_loading()) as first, closing(self._batches(first)) as batches:
            self._compile_loss()
            if progress.update == 0:  # while the first batch is loaded
                value = self._validate(record)
                if record:
                    record.write(0, validation_map=value)
            mark = time.perf_counter()
            for batch in batches:
                self._report_unreadable(batch.errors, "another photo of its class is used instead")
                rate = self._set_learning_rate(progress.update)
                loss = self._update(batch)
                progress.update += 1
                seconds = time.perf_counter() - mark
                self._time_left.note_update(seconds)
                progress.out_of_time = self._over(time.perf_counter() - started)
                self.view.advance(progress.update, self._time_left.seconds(progress.update))
                speed = len(batch.images) * self.processes / seconds
                report = UpdateReport(progress.update, config.updates, loss, rate, speed)
                self.view.update(report)
                figures = self._figures(report)
                if progress.update % config.validate_every == 0 or self._finished():
                    figures["validation_map"] = self._validate(record)
                if record:
                    record.write(progress.update, **figures)
                progress.seconds = time.perf_counter() - started
                # The first update fixes the micro-batch; a new best must match `model`.
                due = progress.update in (1, progress.best_update)
                if due or progress.update % config.checkpoint_every == 0 or self._finished():
                    self._save(record)
                if self._finished():
                    break
                mark = time.perf_counter()
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

    def _start_projection(self) -> None:
        """Start the projection as a PCA of training photos; the same in all processes."""
        layer = self.net.projection
        assert isinstance(layer, nn.Linear)
        with failing_together(self.device):
            if self.rank == 0:
                order = np.random.default_rng(self.plan.config.seed).permutation
                chosen = np.sort(order(len(self.plan.train))[:PHOTOS])
                found = self._describe_pooled(self.plan.train.subset(chosen), "describing photos")
                start_projection(layer, found.descriptors.float())
        if self.processes > 1:
            for weight in (layer.weight, layer.bias):
                dist.broadcast(weight.data, 0)

    def _compile_loss(self) -> None:
        """Compile the kernels of the loss in a thread, for the first of the batches."""
        whole = self.memory is None and self.miner is None
        if self.device.type == "cuda" and whole and not self._finished():
            labels = self.plan.train.labels
            batch = torch.from_numpy(labels[self._draw_batch(labels, self.progress.update)])
            compile_loss(self.step, batch, self.net.dim, self.device)

    def _estimate_from(self, speed: Speed | None) -> TimeLeft:
        """Return the estimate of the remaining time."""
        config = self.plan.config
        return TimeLeft(effort_of(config), speed, self._workload())

    def _workload(self) -> Workload:
        plan = self.plan
        return workload_of(plan.config, plan.parts, len(plan.train), len(plan.validation))

    def _announce_time(self) -> None:
        """Print how long the run will take; on a CPU a short trial measures its speed."""
        plan, config = self.plan, self.plan.config
        if not self.view.wants_estimate or self.progress.update >= config.updates:
            return
        speed = plan.speed
        if speed is None and self.device.type == "cpu" and self.processes == 1:
            if worth_compiling(config, self.device):  # a trial would compile another size
                return
            speed = Trial(self.step.forward(), plan.train, plan.validation).measure(config)
            self._time_left = self._estimate_from(speed)
        if speed is None:
            return
        effort = effort_of(config)
        seconds = run_seconds(effort, speed, self._workload())
        if self.progress.update:
            seconds = self._time_left.seconds(self.progress.update) or seconds
        cores = f"{core_count()} cores" if self.device.type == "cpu" else "with its GPU"
        self.view.message(
            f"about {readable_time(seconds)} on this machine ({cores}): "
            f"{effort.updates - self.progress.update} updates of {effort.batch} images, "
            f"{effort.validations + 1} validations of {len(plan.validation)} photos"
        )

    def _over(self, seconds: float) -> bool:
        """Return whether one more update and a validation would exceed the maximum duration."""
        minutes = self.plan.config.minutes
        if minutes is None:
            return False
        return self.plan.spent + seconds + self._time_left.until_stopped() > 60 * minutes

    def _note_part(self, part: float, started: float) -> None:
        """Show the progress inside an update."""
        done = self.progress.update + part
        self._time_left.note_update(time.perf_counter() - started, part)
        if part < 1:
            self.view.advance(done, self._time_left.seconds(done))

    def _batches(self, batches: Batches) -> Generator[CropBatch, None, None]:
        """Yield the batches of the remaining updates; `batches` are the first of them."""
        while not self._finished():
            with closing(batches):
                yield from batches
            if not self._finished():
                batches = self._start_loading()

    def _start_loading(self) -> Batches:
        """Start to load the next batches; mine tuples first where a loss needs them."""
        config, progress = self.plan.config, self.progress
        end = progress.update if self._finished() else config.updates
        if self.miner is not None and not self._finished():
            if progress.update % self.miner.period == 0:
                self._mine()
            after = progress.update // self.miner.period + 1
            end = min(end, after * self.miner.period)
        return load_batches(
            CropDataset(self.plan.train, config.crops, config.seed),
            self._draw,
            range(progress.update, end),
            self.workers,
            pin_memory=self.device.type == "cuda",
            device=self.device,
            kept=self.kept,
        )

    def _check_processes(self) -> None:
        """Raise an `InputError` if a batch may have fewer images than there are processes."""
        config = self.plan.config
        smallest, advice = config.images_per_update, f"`{config.loss}.tuples`"
        if config.mined is None:
            sizes = self.plan.train.class_sizes()
            smallest = smallest_batch(sizes, config.batch_size, config.classes_per_batch)
            advice = "`batch_size` or `classes_per_batch`"
        if smallest < self.processes:
            raise InputError(
                f"a batch may have only {smallest} images, too few for {self.processes} processes: "
                f"increase {advice}, or start fewer processes"
            )

    def _make_net(self) -> RetrievalNet:
        """Create the network with its initial weights."""
        config, parts = self.plan.config, self.plan.parts
        net = RetrievalNet(
            parts.get("backbone", config.backbone),
            parts.get("pooling", config.pooling),
            config.projection,
            config.weights,
            # A PCA, as which the projection starts, is learned from unit vectors.
            normalize_pooled=config.projection is not None and not config.teacher,
        )
        if config.lora:
            add_lora(net, config.lora, config.lora_alpha)
        return net

    def _make_loss(self) -> Loss:
        config, dim = self.plan.config, self.net.dim
        loss = self.plan.parts.get("loss") or make_loss(config, self.plan.train.class_names, dim)
        loss = with_lengths(loss, config.matryoshka, dim)
        check_processes(loss, self.processes)
        return loss

    def _make_optimizer(self) -> Adam:
        config = self.plan.config
        groups = layer_groups(self.net, config.layer_decay)
        of_loss = list(loss_module(self.loss).to(self.device).parameters())
        if of_loss:
            groups.append({"params": of_loss, RATE_FACTOR: config.rate_factor})
        return Adam(
            groups,
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            fused=self.device.type == "cuda",  # one kernel for all parameters
        )

    def _make_step(self, counts: Counts) -> MultistageStep:
        config = self.plan.config
        weighted = config.class_weights and config.mined is None and not config.teacher
        step = MultistageStep(
            self._trained_module(),
            self.loss,
            self.progress.micro_batch or config.micro_batch,
            memory=self.memory,
            weighting=class_balanced_weights if weighted else None,
            autocast=self._autocast,
            compile=worth_compiling(config, self.device),
        )
        step.counts = counts
        return step

    def _trained_module(self) -> nn.Module:
        """Return the module that maps the images of a batch to descriptors."""
        return self.net

    def _draw(self, update: int) -> Indices:
        """Return the indices of this process's part of an update's batch."""
        if self.miner is not None:
            first = update % self.miner.period * self.miner.per_update
            batch = self._tuples[first : first + self.miner.per_update].reshape(-1)
        else:
            batch = self._draw_batch(self.plan.train.labels, update)
        return np.array_split(batch, self.processes)[self.rank]

    def _draw_batch(self, labels: Indices, update: int) -> Indices:
        """Return the positions of the photos of a whole batch, from the labels of all photos."""
        config = self.plan.config
        few = config.classes_per_batch
        return draw_batch(labels, config.batch_size, config.seed, update, few, self._levels)

    @cached_property
    def _levels(self) -> Indices | None:
        """The levels of the classes, if the loss has levels."""
        if self.plan.config.loss != "hierarchical-ap":
            return None
        return label_levels(self.plan.train.class_names)

    def _mine(self) -> None:
        """Mine the tuples of the updates until the next mining."""
        assert self.miner is not None
        config = self.plan.config
        self._tuples, forwards = mine_tuples(
            self.miner,
            self.progress.update,
            self.net,
            self.plan.train,
            max_side=config.crops.size,
            workers=self.workers,
            autocast=self._autocast,
            on_progress=lambda done, total: self.view.progress("mining", done, total),
            on_errors=lambda errors: self._report_unreadable(errors, "mining leaves it out"),
        )
        self.step.counts.forwards += forwards

    def _set_learning_rate(self, update: int) -> float:
        """Decrease the learning rate linearly to zero (section 4.2), after a linear warm-up."""
        config = self.plan.config
        rate = config.learning_rate * (1 - update / config.updates)
        rate *= min(1.0, (update + 1) / (config.warmup + 1))
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group[RATE_FACTOR]
        return rate

    def _update(self, batch: CropBatch) -> float:
        self.net.train()
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cpu":  # a GPU is still computing when a call returns
            self.step.on_progress = partial(self._note_part, started=time.perf_counter())
        photos = None
        if self.memory is not None:
            photos = torch.from_numpy(self._draw(self.progress.update))
        loss = self.step(self._upload(batch.images), batch.labels, photos).item()
        if self.step.fallback:
            self._message_once(self.step.fallback, self.step.fallback)
        if self.progress.micro_batch is None:
            self._message_once(self.step.choice.partition(": ")[2], self.step.choice)
            if self.device.type == "cpu":
                # Another micro-batch sums in another order, which changes the last bits, so a
                # resumed run keeps this one. On a GPU it chooses again, as free memory may differ.
                self.progress.micro_batch = self.step.keep_micro_batch()
        if not math.isfinite(loss):
            raise InputError(
                f"the loss is {loss} at update {self.progress.update + 1}: "
                'lower `learning_rate`, or use `precision="float32"`'
            )
        self.optimizer.step()
        if self.average:
            self.average.update(self.progress.update)
        return loss

    def _upload(self, images: Tensor) -> Tensor:
        """Copy the crops to the GPU if they take at most a quarter of its free memory."""
        if self.device.type == "cuda" and images.nbytes < free_bytes(self.device) // 4:
            return images.to(self.device, non_blocking=True)
        return images

    def _figures(self, report: UpdateReport) -> dict[str, float]:
        figures = {
            "loss": report.loss,
            "learning_rate": report.learning_rate,
            "images_per_second": report.images_per_second,
            "forwards": self.step.counts.forwards,
            "backwards": self.step.counts.backwards,
        }
        if isinstance(self.net.pooling, GeM):
            figures["gem_power"] = float(self.net.pooling.p.detach())
        return figures

    def _validate(self, record: Record | None) -> float:
        """Validate the weights, and their average if there is one; return the better mAP."""
        progress = self.progress
        progress.validations_since_best += 1
        started = time.perf_counter()
        value = self._validate_weights(record)
        if self.average and progress.update:
            with self.average.applied():
                value = max(value, self._validate_weights(None))
        best = progress.validations_since_best == 0
        self._time_left.note_validation(time.perf_counter() - started)
        self.view.advance(progress.update, self._time_left.seconds(progress.update))
        self.view.validation(ValidationReport(progress.update, value, best))
        return value

    def _validate_weights(self, record: Record | None) -> float:
        """Measure mAP on the validation classes; save the network if it is the best so far."""
        progress = self.progress
        value = 0.0
        found_photos = None
        if self.rank == 0:
            self.net.eval()
            kept, descriptors = self._describe_validation()
            seen = self.plan.validation.subset(kept)
            value = self._validation_map(kept, descriptors)
            found_photos = descriptors, seen.labels
            if record:
                self._writer.submit(
                    partial(_write_picture, record, progress.update, seen, descriptors)
                )
        value = self._broadcast(value)
        if progress.first_map is None:
            progress.first_map = value
        if progress.best_map is None or value > progress.best_map:
            progress.best_map, progress.best_update = value, progress.update
            progress.validations_since_best = 0
            if found_photos is not None:
                self._save_model(value, *found_photos)
        return value

    def _describe_validation(self) -> tuple[list[int], npt.NDArray[np.float32]]:
        """Return the positions and descriptors [n, C] of the validation photos."""
        network = self._photo_net()
        found = embed_decoded(
            self._validation_photos,
            network,
            self.net.dim,
            self.device,
            self._autocast,
            self._counter("validating", len(self.plan.validation)),
            mixed=network.mixed,
        )
        self._report_unreadable(found.errors, "validation leaves it out")
        return found.kept, found.descriptors.float().numpy()

    def _validation_map(self, kept: list[int], descriptors: npt.NDArray[np.float32]) -> float:
        """Return the mAP of the validation photos at these positions."""
        return mean_average_precision(descriptors, self.plan.validation.labels[kept])

    def _describe_pooled(self, images: LabelledImages, what: str) -> EmbeddedPhotos:
        """Describe whole photos as in validation, by the network without its projection."""
        trunk = sharing_copy(self.net)
        assert isinstance(trunk, RetrievalNet)
        trunk.projection = None
        found = embed_photos(
            trunk,
            images,
            max_side=self.plan.config.val_max_side,
            workers=self.workers,
            autocast=self._autocast,
            on_progress=self._counter(what, len(images)),
        )
        self._report_unreadable(found.errors, "it is left out")
        return found

    def _counter(self, what: str, total: int) -> Callable[[int], None]:
        """Return a function that shows the progress when it is called with a number of photos."""
        done = 0

        def count(photos: int) -> None:
            nonlocal done
            done += photos
            self.view.progress(what, done, total)

        return count

    def _photo_net(self) -> PhotoNet:
        """Return what describes the validation photos, with the current weights."""
        image = example_image(self.net)
        module = cast(RetrievalNet, self.step.forward().evaluation_module(image))
        if self._validating is None or self._validating[0] is not module:
            self._validating = module, PhotoNet(self.net, self._autocast, module)
        return self._validating[1]

    def _broadcast(self, value: float) -> float:
        """Return the value of the first process in all processes."""
        if self.processes == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(shared, 0)
        return float(shared)

    def _save_model(
        self, value: float, descriptors: npt.NDArray[np.float32], labels: Indices
    ) -> None:
        """Save the network, and a calibration fitted on the validation photos if they allow it."""
        training = {
            "data": str(self.plan.data.resolve()),
            "settings": self.plan.config.model_dump(),
            "update": self.progress.update,
            "validation_map": value,
            "listwise": __version__,
        }
        # A copy, because the step would copy a changed network again.
        provenance = {**self.net.config.provenance, "training": training}
        config = self.net.config.model_copy(update={"provenance": provenance})
        copies, folder = self._writer.copy(self.net.plain_state()), self.run / MODEL_FOLDER
        source = f"validation photos of {self.plan.data.resolve()}"

        def write() -> None:
            model = write_network(folder, config, copies.result())
            with suppress(InputError):
                fit_calibration(descriptors, labels, model, source).save(folder)

        self._writer.submit_model(write)

    def _save(self, record: Record | None) -> None:
        if record:
            self.progress.counts = asdict(self.step.counts)
            self.progress.tuples = self._tuples.tolist()
            self.progress.metrics_sum = record.sum
            module = loss_module(self.loss)
            tensors = checkpoint_tensors(self.net, self.optimizer, module, self.memory)
            copies = self._writer.copy(tensors)
            progress = replace(self.progress)
            path = self.run / CHECKPOINT_FILE

            def write() -> None:
                record.flush()
                write_checkpoint(path, copies.result(), progress)

            self._writer.submit_checkpoint(write)

    def _finished(self) -> bool:
        config, progress = self.plan.config, self.progress
        out_of_patience = config.patience and progress.validations_since_best >= config.patience
        done = progress.update >= config.updates or progress.out_of_time
        return done or bool(out_of_patience)

    def _report_unreadable(self, errors: Sequence[str], instead: str) -> None:
        """Report each photo that could not be read, once; with `strict`, raise an error."""
        for error in errors:
            if self.plan.config.strict:
                raise InputError(error)
            self._message_once(error, f"{error}; {instead}")

    def _message_once(self, key: str, line: str) -> None:
        if key not in self._shown:
            self._shown.add(key)
            self.view.message(line)


def _write_picture(
    record: Record, update: int, seen: LabelledImages, descriptors: npt.NDArray[np.float32]
) -> None:
    queries = choose_queries(seen.labels, PICTURED_QUERIES)
    picture = ranked_list_picture(seen, descriptors, queries, load=record.load_thumbnail)
    record.picture(update, "ranked lists", picture)


def _make_memory(config: TrainConfig) -> CrossBatchMemory | None:
    return CrossBatchMemory(config.memory, config.memory_warmup) if config.memory else None


def worth_compiling(config: TrainConfig, device: torch.device) -> bool:
    """Return whether to compile the network: if set so, or if it makes the whole run shorter."""
    if config.compile != "auto":
        return config.compile == "yes"
    pixels = config.updates * config.images_per_update * config.crops.size**2
    return device.type == "cuda" and pixels >= COMPILED_PIXELS


def smallest_batch(
    class_sizes: npt.NDArray[np.int64], batch_size: int, classes_per_batch: int | None
) -> int:
    """Return the size of the smallest batch that `draw_batch` may draw."""
    count = min(classes_per_batch or len(class_sizes), max(1, batch_size // 2))
    # `draw_batch` takes classes with a single image last.
    sizes: list[int] = sorted(class_sizes.tolist(), key=lambda size: (size == 1, size))
    return min(batch_size, sum(sizes[:count]))
