"""The folder of a run: settings, checkpoint, metrics, and pictures of ranked lists.

A checkpoint is one safetensors file that is replaced atomically. A thread writes the larger files.
"""

import hashlib
import json
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from pydantic import ConfigDict, Field
from torch import Tensor, nn

from listwise import __version__
from listwise.data import LabelledImages
from listwise.data.sheets import Tile, ranked_sheet
from listwise.errors import InputError
from listwise.files import FileHeader, read_json, write_text
from listwise.models.storage import read_model, read_parts, write_parts
from listwise.settings import read_settings
from listwise.training.choices import TrainPlan
from listwise.training.objective import CrossBatchMemory
from listwise.training.step import Counts

CONFIG_FILE, RUN_FILE = "config.yaml", "run.json"
CHECKPOINT_FILE, MODEL_FOLDER = "checkpoint.safetensors", "model"
# Files of a run that trains from an index, see listwise.feedback.
INDEX_FILE, TABLE_FILE = "index.json", "labels.csv"
# Settings that may be edited before a run is resumed: they depend on the machine.
_FREE = ("device", "workers", "checkpoint_every")
Task = Callable[[], object]
METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
PICTURED_QUERIES = 5
# Tasks that wait for the disk; two checkpoints with their models and pictures fit into memory.
WAITING = 4


def start_run(run: Path, plan: TrainPlan, photos: str = "") -> None:
    """Create the folder of a new run; run.json is written last and marks it as a run.

    Args:
        run: the folder.
        plan: photos and settings.
        photos: a sentence that says where decoded photos are kept.
    """
    import yaml

    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot create the run folder {run} ({error.strerror}): choose another `run_folder`"
        ) from error
    settings = yaml.safe_dump(plan.config.model_dump(), sort_keys=False)
    write_text(run / CONFIG_FILE, settings)
    about = {
        "data": str(plan.data.resolve()),
        "data_fingerprint": plan.fingerprint(),
        "settings_fingerprint": _digest(yaml.safe_load(settings)),
        "listwise": __version__,
        "torch": torch.__version__,
        **({"photos": photos} if photos else {}),
    }
    write_text(run / RUN_FILE, json.dumps(about, indent=2) + "\n")


def add_to_run(run: Path, **values: Any) -> None:
    """Add values to run.json."""
    write_text(run / RUN_FILE, json.dumps(read_run(run) | values, indent=2) + "\n")


def reopen_run(run: Path, plan: TrainPlan) -> None:
    """Check that data and best model of a run are unchanged, and remove unfinished files."""
    if read_run(run)["data_fingerprint"] != plan.fingerprint():
        raise InputError(
            f"{plan.data} has other photos or labels than {run} was trained on: start a new run"
        )
    # The run may end without a better model, and would then present a damaged one as its result.
    if (run / MODEL_FOLDER).exists() and (run / CHECKPOINT_FILE).exists():
        read_model(run / MODEL_FOLDER)
    for unfinished in run.rglob("*.tmp"):
        unfinished.unlink()


def read_run(run: str | Path) -> dict[str, str]:
    """Read the data path, data fingerprint and versions of a run."""
    path = Path(run) / RUN_FILE
    if not path.is_file():
        raise InputError(
            f"{run} is not a training run: expected {RUN_FILE}; "
            "give the folder that listwise train wrote"
        )
    about = read_json(path, "was not written by listwise train")
    if not {"data", "data_fingerprint", "settings_fingerprint"} <= about.keys():
        raise InputError(f"{path} was not written by listwise train: it is not complete")
    return about


def is_index_run(run: str | Path, about: dict[str, str]) -> bool:
    """Return whether a run trains from an index; `about` is what `read_run` returned.

    Its photos are in a table in its folder. The folder may also have these files from an earlier
    attempt that did not start, and then hold a run that trains on other photos.
    """
    table = (Path(run) / TABLE_FILE).resolve()
    return (Path(run) / INDEX_FILE).is_file() and about["data"] == str(table)


def read_run_settings(run: str | Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Read what `read_run` returns, and the settings of a run.

    Raises:
        InputError: settings that affect the result have changed.
    """
    about, settings = read_run(run), read_settings(Path(run) / CONFIG_FILE)
    if about["settings_fingerprint"] != _digest(settings):
        raise InputError(
            f"{Path(run) / CONFIG_FILE} is damaged or was edited after the run was started: "
            "restore it, or start a new run with it"
        )
    return about, settings


def check_unused(run: str | Path) -> None:
    """Raise an `InputError` if a folder contains a run already."""
    if (Path(run) / RUN_FILE).exists():
        raise InputError(
            f'{run} contains a run already: resume it with `resume="{run}"`, or choose another '
            "`run_folder`"
        )


def _digest(settings: dict[str, Any]) -> str:
    kept = {name: value for name, value in settings.items() if name not in _FREE}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


class Progress(FileHeader):
    """The progress of a run: everything besides tensors that the next update depends on.

    `tuples` are the last mined ones; they cannot be mined again, because the network has changed.
    `pending` are the metrics of an update that was interrupted before it was validated.
    `metrics_sum` is the checksum of `metrics.jsonl` up to this update. `out_of_time` is true if the
    run has stopped because its minutes were over. `max_side` is the chosen photo size.
    """

    model_config = ConfigDict(frozen=False, extra="forbid", ser_json_inf_nan="constants")

    update: int = 0
    first_map: float = 0.0
    best_map: float = -1.0
    best_update: int = 0
    validations_since_best: int = 0
    micro_batch: int | None = None
    seconds: float = 0.0
    counts: Counts = Field(default_factory=Counts)
    tuples: list[list[int]] = Field(default_factory=list)
    pending: dict[str, float] = Field(default_factory=dict)
    metrics_sum: int | None = None
    out_of_time: bool = False
    max_side: int | None = None


def checkpoint_tensors(
    parts: Mapping[str, nn.Module | CrossBatchMemory],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> Callable[[], dict[str, Tensor]]:
    """Start to copy the tensors that a checkpoint has, those of parts by name: `copy_to_host`."""
    tensors: dict[str, Tensor] = {}
    for name, part in parts.items():
        tensors.update({f"{name}.{key}": value for key, value in part.state_dict().items()})
    for index, state in optimizer.state_dict()["state"].items():
        tensors.update({f"optimizer.{index}.{key}": value for key, value in state.items()})
    tensors["random.cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(device)
    return copy_to_host(tensors)


def copy_to_host(tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
    """Start to copy tensors, as they are now, to host memory.

    The returned function waits for the copies and returns them. A GPU copies to pinned memory while
    this thread continues.
    """
    copies = {
        key: torch.empty_like(value, device="cpu", pin_memory=value.is_cuda).copy_(
            value.detach(), non_blocking=True
        )
        for key, value in tensors.items()
    }
    devices = {value.device for value in tensors.values() if value.is_cuda}
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def finished() -> dict[str, Tensor]:
        for event in events:
            event.synchronize()
        return copies

    return finished


def load_checkpoint(
    path: Path,
    parts: Mapping[str, nn.Module | CrossBatchMemory],
    optimizer: torch.optim.Optimizer,
) -> tuple[Progress, list[Tensor]]:
    """Load the state that `RunFiles.save_checkpoint` wrote into parts and optimizer.

    Returns:
        The progress, and the state of the random numbers of the CPU and of a GPU.

    Raises:
        InputError: the file is damaged, or does not fit the network or the loss.
    """
    progress, tensors = read_parts(path, Progress, "checkpoint")
    try:
        for name, part in parts.items():
            part.load_state_dict(_part(tensors, f"{name}."))
    except (KeyError, RuntimeError) as error:
        raise InputError(
            f"{path} does not fit the network or loss in the settings: start a new run"
        ) from error
    states: dict[int, dict[str, Any]] = {}
    for key, value in _part(tensors, "optimizer.").items():
        index, name = key.split(".", 1)
        states.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict(
        {"state": states, "param_groups": optimizer.state_dict()["param_groups"]}
    )
    return progress, list(_part(tensors, "random.").values())


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


class RunFiles:
    """The files of a run: metrics, pictures, checkpoints and the best network.

    Metrics are appended to `metrics.jsonl` and TensorBoard at once, everything else is written in a
    thread. A run that is resumed keeps the metrics up to its last checkpoint and removes later
    ones, and damaged lines; a new run removes all.

    Args:
        run: the folder of the run.
        progress: the progress of the run, also of one that is resumed.

    Attributes:
        notes: sentences about damaged metrics.
    """

    def __init__(self, run: Path, progress: Progress) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._run, self._failed = run, False
        self._thread = ThreadPoolExecutor(1, "files")
        self._lock = threading.Lock()
        self._waiting: dict[str, Task] = {}
        self._started: list[Future[None]] = []
        path = run / METRICS_FILE
        first = progress.update + 1 if progress.update else 0
        entries, damaged = _read_entries(path)
        kept = "".join(json.dumps(entry) + "\n" for entry in entries if entry["update"] < first)
        write_text(path, kept)
        self._sum = zlib.crc32(kept.encode())
        self._file = path.open("a", encoding="utf-8")
        self._board: Any = SummaryWriter(str(run / TENSORBOARD_FOLDER), purge_step=first)
        self.notes: list[str] = []
        if damaged:
            lines = ", ".join(map(str, damaged))
            self.notes = [f"note: removed damaged lines of {METRICS_FILE}: {lines}"]
        elif progress.metrics_sum not in (None, self._sum):
            self.notes = [
                f"note: {METRICS_FILE} is damaged or was edited: its lines up to update "
                f"{progress.update} may be wrong; the training itself does not use them"
            ]

    def write_metrics(self, update: int, **values: float) -> None:
        """Write the metrics of an update."""
        line = json.dumps({"update": update, **values}) + "\n"
        self._file.write(line)
        self._file.flush()
        self._sum = zlib.crc32(line.encode(), self._sum)
        for name, value in values.items():
            self._board.add_scalar(name, value, update)

    def write(self, name: str, task: Task) -> None:
        """Run a task that writes a file after all earlier ones; raise the error of an earlier one.

        A task that still waits is replaced by the next one of its name. The task must not use
        tensors that training changes. After an error, no later task runs. Training waits only if
        several tasks wait already, or for the checkpoint before the next best network: otherwise
        none might ever be written.
        """
        while self._started and (
            self._started[0].done()
            or len(self._waiting) >= WAITING
            or (name == "model" and "checkpoint" in self._waiting)
        ):
            self._started.pop(0).result()
        with self._lock:
            self._waiting.pop(name, None)
            self._waiting[name] = task
        self._started.append(self._thread.submit(self._run_next))

    def _run_next(self) -> None:
        with self._lock:
            if self._failed or not self._waiting:
                return
            task = self._waiting.pop(next(iter(self._waiting)))
        self._failed = True
        task()
        self._failed = False

    def save_checkpoint(self, tensors: Callable[[], dict[str, Tensor]], progress: Progress) -> None:
        """Write a checkpoint, after the metrics and the best network."""
        progress.metrics_sum = self._sum
        progress = deepcopy(progress)

        def write() -> None:
            self._board.flush()
            write_parts(self._run / CHECKPOINT_FILE, progress, tensors())

        self.write("checkpoint", write)

    def save_picture(
        self, update: int, images: LabelledImages, descriptors: npt.NDArray[np.float32]
    ) -> None:
        """Write a picture of the ranked lists of a few queries, among photos [n, C]."""

        def write() -> None:
            queries = choose_queries(images.labels, PICTURED_QUERIES)
            picture = ranked_list_picture(images, descriptors, queries)
            pixels = np.asarray(picture.convert("RGB"))
            self._board.add_image("ranked lists", pixels, update, dataformats="HWC")

        self.write(f"picture {update}", write)

    def wait(self) -> None:
        """Wait until all files are written; raise the error of a task that failed."""
        while self._started:
            self._started.pop(0).result()

    def close(self) -> None:
        """Wait until all files are written, and close them."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._file.close()
            self._board.close()


def read_metrics(run: Path) -> list[dict[str, float]]:
    """Read the metrics of a run, one dictionary per update."""
    entries, damaged = _read_entries(run / METRICS_FILE)
    if damaged:
        raise InputError(
            f"{run / METRICS_FILE}, line {damaged[0]} is damaged: listwise train --resume {run} "
            "removes damaged lines"
        )
    return entries


def choose_queries(labels: npt.NDArray[np.int64], count: int) -> list[int]:
    """Choose the same few queries every time: the first image of evenly spaced classes."""
    _, first, sizes = np.unique(labels, return_index=True, return_counts=True)
    usable = first[sizes > 1]
    picks = np.linspace(0, len(usable) - 1, min(count, len(usable))).round().astype(int)
    return [int(usable[i]) for i in picks]


def ranked_list_picture(
    images: LabelledImages,
    descriptors: npt.NDArray[np.float32],
    queries: Sequence[int],
    count: int = 8,
) -> Image.Image:
    """Draw one row per query: the query, then the first `count` photos of its ranked list.

    Shapes: descriptors [N, C] of the images; `queries` are positions in them.
    """
    rows = []
    for query in queries:
        scores = descriptors @ descriptors[query]
        scores[query] = -np.inf
        row = [Tile(images.paths[query], "query", images.box(query))]
        for index in np.argsort(-scores, kind="stable")[: min(count, len(scores) - 1)]:
            right = images.labels[index] == images.labels[query]
            row.append(Tile(images.paths[index], "right" if right else "wrong", images.box(index)))
        rows.append(row)
    return ranked_sheet(rows)


def _read_entries(path: Path) -> tuple[list[dict[str, float]], list[int]]:
    """Read the entries of a file, and the numbers of its damaged lines, counted from 1.

    The last line may be unfinished, if the run was interrupted: it is left out.
    """
    entries: list[dict[str, float]] = []
    damaged: list[int] = []
    if not path.exists():
        return entries, damaged
    *lines, _ = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
        except ValueError:  # UnicodeDecodeError is one
            entry = None
        if isinstance(entry, dict) and isinstance(entry.get("update"), int):
            entries.append(entry)
        else:
            damaged.append(number)
    return entries, damaged
