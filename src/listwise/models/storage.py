"""Save and load networks: a folder with `model.safetensors` and `config.json`, without pickles."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    JsonValue,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)
from safetensors import SafetensorError, safe_open
from torch import Tensor

from listwise.errors import InputError
from listwise.files import write_tensors, write_text

FORMAT_VERSION: Final = 1
WEIGHTS_FILE: Final = "model.safetensors"
CONFIG_FILE: Final = "config.json"
# Key of the fingerprint in the metadata of the weights file. Folders of earlier versions lack it.
FINGERPRINT: Final = "fingerprint"

C = TypeVar("C", bound=BaseModel)


class NetConfig(BaseModel):
    """The architecture, preprocessing and origin of a network: the content of `config.json`.

    Attributes:
        format_version: the version of the file format.
        backbone: the name of the timm model, or of the user's class.
        pooling: the name of the pooling, or of the user's class.
        projection: the output dimensions of the linear layer, if there is one.
        normalize_pooled: whether vectors are L2-normalized between pooling and projection.
        mean: the RGB mean of images in [0, 1].
        std: the RGB standard deviation.
        image_size: the side of the images that the backbone was trained with; not a limit.
        provenance: where the network comes from; may have any content.
        teacher: the fingerprint of the model whose descriptors the network computes, after
            distillation.
    """

    model_config = ConfigDict(extra="forbid")

    format_version: int = FORMAT_VERSION
    backbone: str
    pooling: str
    projection: int | None = None
    normalize_pooled: bool = False
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    image_size: int
    provenance: dict[str, JsonValue] = {}
    teacher: str | None = None

    @model_serializer(mode="wrap")
    def _leave_out_unused(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `teacher` without a teacher: versions before distillation refuse the name."""
        fields: dict[str, Any] = write(self)
        return {name: value for name, value in fields.items() if name != "teacher" or value}


def write_network(folder: Path, config: NetConfig, state: Mapping[str, Tensor]) -> str:
    """Write both files atomically, and return the fingerprint of the network.

    The config comes last and marks the folder as complete.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(
            f"{folder} is a file, but a network is saved as a folder: choose another name"
        )
    found = fingerprint(config, state)
    write_tensors(folder / WEIGHTS_FILE, state, {FINGERPRINT: found})
    write_text(folder / CONFIG_FILE, config.model_dump_json(indent=2) + "\n")
    return found


def read_network(folder: Path) -> tuple[NetConfig, dict[str, Tensor]]:
    """Read the files that `write_network` wrote; no code in them is run.

    Raises:
        InputError: a file is missing or damaged, or does not match the saved fingerprint.
    """
    if not folder.is_dir():
        raise InputError(f"no model folder {folder}: give a folder that contains {CONFIG_FILE}")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise InputError(f"{folder} is not a complete model folder: expected {name}")
    config = read_config(folder / CONFIG_FILE, NetConfig)
    state, saved = read_weights(folder / WEIGHTS_FILE)
    check_fingerprint(folder, saved, fingerprint(config, state))
    return config, state


def read_weights(path: Path) -> tuple[dict[str, Tensor], str | None]:
    """Read the tensors of a weights file, and the fingerprint saved with them if it has one."""
    try:
        with safe_open(path, framework="pt") as file:
            saved = (file.metadata() or {}).get(FINGERPRINT)
            return {key: file.get_tensor(key) for key in file.keys()}, saved  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is damaged ({error}): copy it again, or train again") from error


def check_fingerprint(folder: Path, saved: str | None, found: str) -> None:
    """Raise an `InputError` if the files of a model folder have changed since they were saved."""
    if saved is not None and saved != found:
        raise InputError(
            f"{folder} is damaged or was edited: {WEIGHTS_FILE} and {CONFIG_FILE} do not match "
            "the fingerprint saved with them; copy the model folder again, or train again"
        )


def fingerprint(config: NetConfig, state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the architecture, the preprocessing and the weights."""
    architecture = {"backbone", "pooling", "projection", "normalize_pooled"}
    return state_digest(config.model_dump(include=architecture | {"mean", "std"}), state)


def state_digest(fields: Mapping[str, Any], state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of JSON values and of named tensors."""
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for key in sorted(state):
        value = state[key].detach().cpu()
        digest.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
        # The values without a copy: a network has hundreds of megabytes of them.
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_config(path: Path, kind: type[C], what: str = "network") -> C:
    """Read a `config.json`; errors name `what` it should describe."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error})") from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise InputError(
            f"{path} was written by a newer Listwise (format {version}, this one reads "
            f"{FORMAT_VERSION}): pip install --upgrade listwise"
        )
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise InputError(
            f"{path} is not the config of a {what} ({place}: {first['msg']})"
        ) from error
