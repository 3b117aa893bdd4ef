"""Save and load the state of a run in one safetensors file that is replaced atomically."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from listwise.errors import InputError
from listwise.files import write_tensors
from listwise.models.storage import FINGERPRINT, state_digest
from listwise.training.cross_batch import CrossBatchMemory


@dataclass
class Progress:
    """The progress of a run: everything besides tensors that the next update depends on.

    `tuples` are the last mined ones; they cannot be mined again, because the network has changed.
    `metrics_sum` is the checksum of `metrics.jsonl` up to this update. `out_of_time` is true if the
    run has stopped because its minutes were over.
    """

    update: int = 0
    first_map: float | None = None
    best_map: float | None = None
    best_update: int = 0
    validations_since_best: int = 0
    micro_batch: int | None = None
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    tuples: list[list[int]] = field(default_factory=list)
    metrics_sum: int | None = None
    out_of_time: bool = False


def save_checkpoint(
    path: Path,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    loss: nn.Module | None = None,
) -> None:
    """Save the state of a run; if the process is killed, the old file or the new one remains.

    Args:
        path: the file.
        net: the network.
        optimizer: the optimizer.
        progress: the state besides tensors.
        loss: the loss, if it has parameters.
    """
    write_checkpoint(path, checkpoint_tensors(net, optimizer, loss), progress)


def checkpoint_tensors(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: nn.Module | None = None,
    memory: CrossBatchMemory | None = None,
) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint has, on their devices."""
    tensors: dict[str, Tensor] = {f"net.{k}": v for k, v in net.state_dict().items()}
    if loss is not None:
        tensors.update({f"loss.{k}": v for k, v in loss.state_dict().items()})
    if memory is not None:
        tensors.update({f"memory.{k}": v for k, v in memory.state().items()})
    for index, state in optimizer.state_dict()["state"].items():
        tensors.update({f"optimizer.{index}.{key}": value for key, value in state.items()})
    tensors["random.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    return tensors


def write_checkpoint(path: Path, tensors: dict[str, Tensor], progress: Progress) -> None:
    """Write a checkpoint from the tensors of `checkpoint_tensors`."""
    tensors = {key: value.cpu() for key, value in tensors.items()}
    state = json.dumps(asdict(progress))
    fingerprint = state_digest({"progress": state}, tensors)
    write_tensors(path, tensors, {"progress": state, FINGERPRINT: fingerprint})


def load_checkpoint(
    path: Path,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: nn.Module | None = None,
    memory: CrossBatchMemory | None = None,
) -> Progress:
    """Load the state that `save_checkpoint` saved into network, optimizer, loss and memory.

    Raises:
        InputError: the file is damaged, or does not fit the network or the loss.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors: dict[str, Tensor] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        progress = Progress(**json.loads(metadata["progress"]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} is damaged or not a checkpoint of this version ({error}): start a new run"
        ) from error
    # Checkpoints of earlier versions have no fingerprint.
    saved = metadata.get(FINGERPRINT)
    if saved is not None and saved != state_digest({"progress": metadata["progress"]}, tensors):
        raise InputError(
            f"{path} is damaged (it does not match its fingerprint): restore a copy of it, or "
            "start a new run"
        )
    try:
        net.load_state_dict(_part(tensors, "net."))
        if loss is not None:
            loss.load_state_dict(_part(tensors, "loss."))
        if memory is not None:
            memory.load_state(_part(tensors, "memory."), next(net.parameters()).device)
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
    torch.set_rng_state(tensors["random.cpu"])
    if "random.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])
    return progress


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
