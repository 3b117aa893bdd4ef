"""The training loop: batches, the three-stage step, validation, checkpoints."""

import math
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from listwise import __version__
from listwise.data import CropBatch, CropDataset
from listwise.data.workers import explain_lost_workers
from listwise.errors import InputError
from listwise.evaluation import mean_average_precision
from listwise.losses import class_balanced_weights
from listwise.machine import shared_cores
from listwise.models import RetrievalNet
from listwise.models.embed import embed_photos
from listwise.models.pooling import GeM
from listwise.plugins import CUSTOM, custom_name
from listwise.settings import TrainConfig, read_settings
from listwise.training.distributed import failing_together, world
from listwise.training.loading import load_batches
from listwise.training.memory import free_bytes
from listwise.training.mining.miners import make_miner
from listwise.training.mining.pool import mine_tuples
from listwise.training.objective import Loss, check_processes, loss_module, make_loss
from listwise.training.plan import TrainPlan, prepare
from listwise.training.run.checkpoint import Progress, load_checkpoint, save_checkpoint
from listwise.training.run.folder import (
    CHECKPOINT_FILE,
    CONFIG_FILE,
    MODEL_FOLDER,
    check_unused,
    read_run,
    reopen_run,
    start_run,
)
from listwise.training.run.record import (
    METRICS_FILE,
    Record,
    choose_queries,
    ranked_list_picture,
)
from listwise.training.run.view import TrainView, UpdateReport, ValidationReport
from listwise.training.sampling import Indices, draw_batch
from listwise.training.step import Counts, MultistageStep

PICTURED_QUERIES = 5
# Compiling takes a minute or two, and saves about as much in this many pixels on a large GPU.
COMPILED_PIXELS = 5e10


@dataclass(frozen=True)
class TrainResult:
    """What a run came to; the best network is in the folder `model`."""

    model: Path
    first_map: float
    best_map: float
    best_update: int
    updates: int
    counts: Counts
    seconds: float


class Trainer:
    """Trains a network as a plan says, into a run folder.

    The folder holds the config, `metrics.jsonl`, TensorBoard files, a checkpoint, and `model`:
    the network that was best on the validation classes so far.

    Args:
        plan: images and settings, from `prepare`.
        run: the run's folder.
        view: receives what happens, to show it.
        resume: continue the run in the folder, to the bit, instead of starting one.

    Example:
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
        self.device = torch.device(config.device)
        if self.processes > 1 and self.device.type == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        # Together, or a slow process would find the folder that the first has claimed since.
        with failing_together(self.device):
            if not resume:
                check_unused(self.run)
        self._check_processes()
        torch.manual_seed(config.seed)
        self.loss: Loss = plan.parts.get("loss") or make_loss(config)
        check_processes(self.loss, self.processes)
        self.net = RetrievalNet(
            plan.parts.get("backbone", config.backbone),
            plan.parts.get("pooling", config.pooling),
            config.projection,
            config.weights,
        )
        self.net.to(self.device)
        parameters = list(self.net.parameters())
        parameters += loss_module(self.loss).to(self.device).parameters()
        self.optimizer = torch.optim.Adam(
            parameters,
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            fused=self.device.type == "cuda",  # one kernel for all parameters
        )
        self.progress = Progress()
        if resume and (self.run / CHECKPOINT_FILE).exists():
            self.progress = load_checkpoint(
                self.run / CHECKPOINT_FILE, self.net, self.optimizer, loss_module(self.loss)
            )
        self.miner = make_miner(config, plan.train.labels)
        self._tuples: Indices = np.array(self.progress.tuples, dtype=np.int64)
        self._autocast = torch.bfloat16 if config.precision == "bfloat16" else None
        self.step = self._make_step(Counts(**self.progress.counts))
        self.workers = config.workers or 0
        self._said: set[str] = set()
        if self.rank == 0:
            (reopen_run if resume else start_run)(self.run, plan)

    @explain_lost_workers()
    @shared_cores()
    def fit(self) -> TrainResult:
        """Train to the end, or until validation no longer rises; return what it came to."""
        progress = self.progress
        record = Record(self.run, progress.update) if self.rank == 0 else None
        if record and record.damaged:
            lines = ", ".join(map(str, record.damaged))
            self.view.say(f"note: removed damaged lines of {METRICS_FILE}: {lines}")
        try:
            self.view.start(progress.update, self.plan.config.updates)
            self._train(record)
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
        if progress.update == 0:
            value = self._validate(record)
            if record:
                record.write(0, validation_map=value)
        with closing(self._batches()) as batches:
            mark = time.perf_counter()
            for batch in batches:
                self._report_unreadable(batch.errors, "another photo of its class stands in")
                rate = self._set_learning_rate(progress.update)
                loss = self._update(batch)
                progress.update += 1
                speed = len(batch.images) * self.processes / (time.perf_counter() - mark)
                report = UpdateReport(progress.update, config.updates, loss, rate, speed)
                self.view.update(report)
                figures = self._figures(report)
                if progress.update % config.validate_every == 0 or self._finished():
                    figures["validation_map"] = self._validate(record)
                if record:
                    record.write(progress.update, **figures)
                progress.seconds = time.perf_counter() - started
                # The first also fixes the micro-batch; a new best belongs to the network kept.
                due = progress.update in (1, progress.best_update)
                if due or progress.update % config.checkpoint_every == 0 or self._finished():
                    self._save(record)
                if self._finished():
                    break
                mark = time.perf_counter()
        if progress.update < config.updates:
            self.view.say(
                f"stopped after update {progress.update}: "
                f"{progress.validations_since_best} validations brought no better one"
            )

    def _batches(self) -> Generator[CropBatch, None, None]:
        """The batches to come; where tuples are mined, none is made before its mining."""
        config, progress = self.plan.config, self.progress
        dataset = CropDataset(self.plan.train, config.crops, config.seed)
        while not self._finished():
            end = config.updates
            if self.miner is not None:
                if progress.update % self.miner.period == 0:
                    self._mine()
                after = progress.update // self.miner.period + 1
                end = min(end, after * self.miner.period)
            batches = load_batches(
                dataset,
                self._draw,
                range(progress.update, end),
                self.workers,
                pin_memory=self.device.type == "cuda",
                device=self.device,
            )
            with closing(batches):
                yield from batches

    def _check_processes(self) -> None:
        """Refuse batches that may have no image for some process."""
        config = self.plan.config
        smallest, advice = config.images_per_update, f"`{config.loss}.tuples`"
        if config.mined is None:
            sizes = self.plan.train.class_sizes()
            smallest = smallest_batch(sizes, config.batch_size, config.classes_per_batch)
            advice = "`batch_size` or `classes_per_batch`"
        if smallest < self.processes:
            raise InputError(
                f"a batch may have only {smallest} images, too few for {self.processes} processes: "
                f"raise {advice}, or start fewer processes"
            )

    def _make_step(self, counts: Counts) -> MultistageStep:
        config = self.plan.config
        weighted = config.class_weights and config.mined is None
        step = MultistageStep(
            self.net,
            self.loss,
            self.progress.micro_batch or config.micro_batch,
            weighting=class_balanced_weights if weighted else None,
            autocast=self._autocast,
            compile=worth_compiling(config, self.device),
        )
        step.counts = counts
        return step

    def _draw(self, update: int) -> Indices:
        """This process's part of an update's batch."""
        config = self.plan.config
        if self.miner is not None:
            first = update % self.miner.period * self.miner.per_update
            batch = self._tuples[first : first + self.miner.per_update].reshape(-1)
        else:
            batch = draw_batch(
                self.plan.train.labels,
                config.batch_size,
                config.seed,
                update,
                config.classes_per_batch,
            )
        return np.array_split(batch, self.processes)[self.rank]

    def _mine(self) -> None:
        """Choose the tuples of the updates until the next mining."""
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
            on_progress=lambda done, total: self.view.working("mining", done, total),
            on_errors=lambda errors: self._report_unreadable(errors, "mining leaves it out"),
        )
        self.step.counts.forwards += forwards

    def _set_learning_rate(self, update: int) -> float:
        """Linear fall to zero (section 4.2), after a linear rise if a warm-up is set."""
        config = self.plan.config
        rate = config.learning_rate * (1 - update / config.updates)
        rate *= min(1.0, (update + 1) / (config.warmup + 1))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _update(self, batch: CropBatch) -> float:
        self.net.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.step(self._upload(batch.images), batch.labels).item()
        if self.step.fallback:
            self._say_once(self.step.fallback, self.step.fallback)
        if self.progress.micro_batch is None:
            self._say_once(self.step.choice.partition(": ")[2], self.step.choice)
            if self.device.type == "cpu":
                # Sums in another order have other last bits, so a resumed run must not choose
                # anew. On a GPU it may, and recovers when memory has become short.
                self.progress.micro_batch = int(self.step.micro_batch)
                self.step = self._make_step(self.step.counts)
        if not math.isfinite(loss):
            raise InputError(
                f"the loss is {loss} at update {self.progress.update + 1}: "
                'lower `learning_rate`, or use `precision="float32"`'
            )
        self.optimizer.step()
        return loss

    def _upload(self, images: Tensor) -> Tensor:
        """Crops on the GPU if they leave enough room there, else where they are."""
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
        """Measure mAP on the validation classes; keep the network if it is the best so far."""
        progress, images = self.progress, self.plan.validation
        value, done = 0.0, 0

        def count(photos: int) -> None:
            nonlocal done
            done += photos
            self.view.working("validating", done, len(images))

        if self.rank == 0:
            found = embed_photos(
                self.net,
                images,
                max_side=self.plan.config.val_max_side,
                workers=self.workers,
                autocast=self._autocast,
                on_progress=count,
            )
            self._report_unreadable(found.errors, "validation leaves it out")
            seen = images.subset(found.kept)
            descriptors = found.descriptors.float().numpy()
            value = mean_average_precision(descriptors, seen.labels)
            if record:
                queries = choose_queries(seen.labels, PICTURED_QUERIES)
                picture = ranked_list_picture(seen, descriptors, queries)
                record.picture(progress.update, "ranked lists", picture)
        value = self._agree(value)
        if progress.first_map is None:
            progress.first_map = value
        best = progress.best_map is None or value > progress.best_map
        progress.validations_since_best += 1
        if best:
            progress.best_map, progress.best_update = value, progress.update
            progress.validations_since_best = 0
            if self.rank == 0:
                self._keep_model(value)
        self.view.validated(ValidationReport(progress.update, value, best))
        return value

    def _agree(self, value: float) -> float:
        """The first process's value in all of them."""
        if self.processes == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(shared, 0)
        return float(shared)

    def _keep_model(self, value: float) -> None:
        self.net.config.provenance["training"] = {
            "data": str(self.plan.data.resolve()),
            "settings": self.plan.config.model_dump(),
            "update": self.progress.update,
            "validation_map": value,
            "listwise": __version__,
        }
        self.net.save(self.run / MODEL_FOLDER)

    def _save(self, record: Record | None) -> None:
        if record:
            record.flush()
            self.progress.counts = asdict(self.step.counts)
            self.progress.tuples = self._tuples.tolist()
            save_checkpoint(
                self.run / CHECKPOINT_FILE,
                self.net,
                self.optimizer,
                self.progress,
                loss_module(self.loss),
            )

    def _finished(self) -> bool:
        config, progress = self.plan.config, self.progress
        tired = config.patience and progress.validations_since_best >= config.patience
        return progress.update >= config.updates or bool(tired)

    def _report_unreadable(self, errors: Sequence[str], instead: str) -> None:
        """Name each photo that could not be read, once; with `strict`, stop."""
        for error in errors:
            if self.plan.config.strict:
                raise InputError(error)
            self._say_once(error, f"{error}; {instead}")

    def _say_once(self, key: str, line: str) -> None:
        if key not in self._said:
            self._said.add(key)
            self.view.say(line)


def worth_compiling(config: TrainConfig, device: torch.device) -> bool:
    """Whether to compile the network: if set, or if that makes the whole run shorter."""
    if config.compile != "auto":
        return config.compile == "yes"
    pixels = config.updates * config.images_per_update * config.crops.size**2
    return device.type == "cuda" and pixels >= COMPILED_PIXELS


def smallest_batch(
    class_sizes: npt.NDArray[np.int64], batch_size: int, classes_per_batch: int | None
) -> int:
    """Images of the smallest batch that `draw_batch` may give."""
    count = min(classes_per_batch or len(class_sizes), max(1, batch_size // 2))
    # Classes of a single image come last.
    sizes: list[int] = sorted(class_sizes.tolist(), key=lambda size: (size == 1, size))
    return min(batch_size, sum(sizes[:count]))


def resume(
    run: str | Path,
    view: TrainView | None = None,
    *,
    loss: Loss | None = None,
    backbone: nn.Module | None = None,
    pooling: nn.Module | None = None,
) -> Trainer:
    """The trainer of an interrupted run, with its own data and settings.

    A loss, backbone or pooling of your own that the run was started with is given again.
    """
    about = read_run(run)
    settings = read_settings(Path(run) / CONFIG_FILE)
    given = {"loss": loss, "backbone": backbone, "pooling": pooling}
    for kind, part in given.items():
        if part is None:
            continue
        recorded, name = str(settings.get(kind)), custom_name(part)
        # The module's name may have changed since, as when a script becomes a package.
        if not recorded.startswith(CUSTOM) or recorded.split(".")[-1] != name.split(".")[-1]:
            raise InputError(f"{run} was started with the {kind} {recorded!r}, not {name!r}")
        settings[kind] = part
    plan = prepare(about["data"], settings, preset="paper")
    return Trainer(plan, run, view, resume=True)
