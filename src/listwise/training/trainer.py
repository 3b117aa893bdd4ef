"""The training loop: batches, the three-stage step, validation, checkpoints."""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from listwise import __version__
from listwise.data import CropDataset
from listwise.errors import InputError
from listwise.evaluation import mean_average_precision
from listwise.losses import QuantizedAPLoss, TieAwareAPLoss, class_balanced_weights
from listwise.models import RetrievalNet
from listwise.models.embed import embed_photos
from listwise.models.pooling import GeM
from listwise.settings import read_settings
from listwise.training.checkpoint import Progress, load_checkpoint, save_checkpoint
from listwise.training.distributed import world
from listwise.training.loading import Batch, load_batches
from listwise.training.pictures import choose_queries, ranked_list_picture
from listwise.training.prepare import Plan, prepare
from listwise.training.record import Record
from listwise.training.sampling import Indices, draw_batch
from listwise.training.step import Counts, Loss, MultistageStep
from listwise.training.view import Silent, UpdateReport, ValidationReport, View

CONFIG_FILE, RUN_FILE = "config.yaml", "run.json"
CHECKPOINT_FILE, MODEL_FOLDER = "checkpoint.safetensors", "model"
PICTURED_QUERIES = 5

LOSSES: dict[str, Callable[[int], Loss]] = {"ap": QuantizedAPLoss, "tie-aware": TieAwareAPLoss}


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
        view: is told what happens.
        resume: continue the run in the folder, to the bit, instead of starting one.

    Example:
        >>> plan = prepare("photos", {"backbone": "resnet18"})  # doctest: +SKIP
        >>> Trainer(plan, "runs/first").fit().best_map          # doctest: +SKIP
    """

    def __init__(
        self, plan: Plan, run: str | Path, view: View | None = None, *, resume: bool = False
    ) -> None:
        self.plan = plan
        self.run = Path(run)
        self.rank, self.processes = world()
        self.view: View = (view if self.rank == 0 else None) or Silent()
        config = plan.config
        self.device = torch.device(config.device)
        if self.processes > 1 and self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", self.rank)))
            torch.cuda.set_device(self.device)
        if self.rank == 0:
            self._claim(resume)
        torch.manual_seed(config.seed)
        self.net = RetrievalNet(config.backbone, config.pooling, config.projection, config.weights)
        self.net.to(self.device)
        self.optimizer = torch.optim.Adam(
            self.net.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        self.progress = Progress()
        if resume and (self.run / CHECKPOINT_FILE).exists():
            self.progress = load_checkpoint(self.run / CHECKPOINT_FILE, self.net, self.optimizer)
        self._autocast = torch.bfloat16 if config.precision == "bfloat16" else None
        self.step = MultistageStep(
            self.net,
            LOSSES[config.loss](config.bins),
            # A resumed run must not choose anew: sums in another order have other last bits.
            self.progress.micro_batch or config.micro_batch,
            weighting=class_balanced_weights if config.class_weights else None,
            autocast=self._autocast,
        )
        self.step.counts = Counts(**self.progress.counts)
        self.workers = config.workers or 0
        self._unreadable: set[str] = set()

    def fit(self) -> TrainResult:
        """Train to the end, or until validation no longer rises; return what it came to."""
        config, progress = self.plan.config, self.progress
        record = Record(self.run, progress.update) if self.rank == 0 else None
        started = time.perf_counter() - progress.seconds
        try:
            if progress.update == 0:
                self._validate(record)
            batches = load_batches(
                CropDataset(self.plan.train, config.crops, config.seed),
                self._draw,
                range(progress.update, 0 if self._finished() else config.updates),
                self.workers,
                pin_memory=self.device.type == "cuda",
            )
            mark = time.perf_counter()
            for batch in batches:
                self._report_unreadable(batch.errors, "another photo of its class stands in")
                rate = self._set_learning_rate(progress.update)
                loss = self._update(batch)
                progress.update += 1
                now = time.perf_counter()
                images = len(batch.images) * self.processes
                report = UpdateReport(
                    progress.update, config.updates, loss, rate, images / (now - mark)
                )
                progress.seconds = now - started
                self.view.update(report)
                if record:
                    record.write(progress.update, **self._figures(report))
                if progress.update % config.validate_every == 0 or self._finished():
                    self._validate(record)
                progress.seconds = time.perf_counter() - started
                # The first also fixes the micro-batch that was chosen.
                due = progress.update == 1 or progress.update % config.checkpoint_every == 0
                if due or self._finished():
                    self._save()
                if self._finished():
                    break
                mark = time.perf_counter()
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

    def _claim(self, resume: bool) -> None:
        """Start the run's folder, or check that it is the run to go on with."""
        about = {
            "data": str(self.plan.data.resolve()),
            "data_fingerprint": self.plan.fingerprint(),
            "listwise": __version__,
            "torch": torch.__version__,
        }
        if resume:
            before = read_run(self.run)
            if before["data_fingerprint"] != about["data_fingerprint"]:
                raise InputError(
                    f"{self.run} was trained on other photos or labels than {self.plan.data} "
                    "holds now: start a new run"
                )
            return
        if (self.run / RUN_FILE).exists():
            raise InputError(
                f"{self.run} holds a run already: continue it with --resume {self.run}, "
                "or choose another folder"
            )
        self.run.mkdir(parents=True, exist_ok=True)
        config = yaml.safe_dump(self.plan.config.model_dump(), sort_keys=False)
        (self.run / CONFIG_FILE).write_text(config, encoding="utf-8")
        (self.run / RUN_FILE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")

    def _draw(self, update: int) -> Indices:
        """This process's part of an update's batch."""
        config = self.plan.config
        batch = draw_batch(
            self.plan.train.labels,
            config.batch_size,
            config.seed,
            update,
            config.classes_per_batch,
        )
        return np.array_split(batch, self.processes)[self.rank]

    def _set_learning_rate(self, update: int) -> float:
        """Linear fall to zero (section 4.2), after a linear rise if a warm-up is set."""
        config = self.plan.config
        rate = config.learning_rate * (1 - update / config.updates)
        rate *= min(1.0, (update + 1) / (config.warmup + 1))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _update(self, batch: Batch) -> float:
        self.net.train()
        self.optimizer.zero_grad(set_to_none=True)
        said = self.step.choice
        loss = self.step(self._near(batch.images), batch.labels).item()
        if self.step.choice != said:
            self.view.say(self.step.choice)
        if not math.isfinite(loss):
            raise InputError(
                f"the loss is {loss} at update {self.progress.update + 1}: "
                "lower --learning-rate, or use --precision float32"
            )
        self.optimizer.step()
        return loss

    def _near(self, images: Tensor) -> Tensor:
        """Crops on the GPU if they leave enough room there, else where they are."""
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            if images.nbytes < free // 4:
                return images.to(self.device, non_blocking=True)
        return images

    def _figures(self, report: UpdateReport) -> dict[str, float]:
        figures = {
            "loss": report.loss,
            "learning_rate": report.learning_rate,
            "images_per_second": report.images_per_second,
            **{name: float(count) for name, count in asdict(self.step.counts).items()},
        }
        if isinstance(self.net.pooling, GeM):
            figures["gem_power"] = float(self.net.pooling.p.detach())
        return figures

    def _validate(self, record: Record | None) -> None:
        """Measure mAP on the validation classes; keep the network if it is the best so far."""
        progress, images = self.progress, self.plan.validation
        value = 0.0
        if self.rank == 0:
            found = embed_photos(
                self.net,
                images,
                max_side=self.plan.config.val_max_side,
                workers=self.workers,
                autocast=self._autocast,
            )
            self._report_unreadable(found.errors, "validation goes on without it")
            seen = images.subset(found.kept)
            descriptors = found.descriptors.float().numpy()
            value = mean_average_precision(descriptors, seen.labels)
            queries = choose_queries(seen.labels, PICTURED_QUERIES)
            if record:
                record.write(progress.update, validation_map=value)
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

    def _save(self) -> None:
        if self.rank == 0:
            micro_batch = self.step.micro_batch
            self.progress.micro_batch = None if micro_batch == "auto" else micro_batch
            self.progress.counts = asdict(self.step.counts)
            save_checkpoint(self.run / CHECKPOINT_FILE, self.net, self.optimizer, self.progress)

    def _finished(self) -> bool:
        config, progress = self.plan.config, self.progress
        tired = config.patience and progress.validations_since_best >= config.patience
        return progress.update >= config.updates or bool(tired)

    def _report_unreadable(self, errors: list[str], instead: str) -> None:
        """Name each photo that could not be read, once; with `strict`, stop."""
        for error in errors:
            if self.plan.config.strict:
                raise InputError(error)
            if error not in self._unreadable:
                self._unreadable.add(error)
                self.view.say(f"{error}; {instead}")


def read_run(run: str | Path) -> dict[str, str]:
    """What a run's folder says about its data and versions."""
    path = Path(run) / RUN_FILE
    try:
        about: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{run} is no run to continue: it has no {RUN_FILE}") from error
    return about


def resume(run: str | Path, view: View | None = None) -> Trainer:
    """The trainer of an interrupted run, with its own data and settings."""
    about = read_run(run)
    plan = prepare(about["data"], read_settings(Path(run) / CONFIG_FILE), preset="paper")
    return Trainer(plan, run, view, resume=True)
