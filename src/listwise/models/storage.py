"""The file of a model: weights, whitening, calibration and settings in one safetensors file."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator
from safetensors import SafetensorError, safe_open
from torch import Tensor

from listwise.calibration import Calibration
from listwise.errors import InputError
from listwise.files import FileHeader, write_tensors
from listwise.settings import Expansion, check_scales

MODEL_FILE: Final = "model.safetensors"
# Keys of the metadata: the JSON of the settings, and the SHA-256 of the whole content.
KEY: Final = "listwise"
_CHECKSUM: Final = "checksum"
_WHITENING: Final = ("whitening.mean", "whitening.projection")

H = TypeVar("H", bound=FileHeader)


class NetConfig(BaseModel):
    """The architecture, preprocessing and origin of a network.

    Attributes:
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

    backbone: str
    pooling: str
    projection: int | None = None
    normalize_pooled: bool = False
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    image_size: int
    provenance: dict[str, JsonValue] = {}
    teacher: str | None = None


class WhiteningInfo(BaseModel):
    """How a whitening was learned.

    Attributes:
        method: "pca", "supervised", "imported" from a released checkpoint, "prefix", which only
            keeps the first dimensions, or "adapter", a linear layer that was trained from an index.
        power: the power of the variances that the PCA divides by.
        learned_from: the number of descriptors.
        shrinkage: how far the variances were moved towards their mean, from 0 to 1; None for 0.
        max_side: the long side of the photos that it was learned from, 0 for their original size;
            None for any size.
        scales: the scales that it was learned at.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["pca", "supervised", "imported", "prefix", "adapter"]
    power: float | None = None
    learned_from: int | None = None
    shrinkage: float | None = None
    max_side: int | None = None
    scales: tuple[float, ...] = (1.0,)


def default_max_side(device: str) -> int:
    """Return the long side that photos are reduced to for a model that records no size.

    On a GPU it is the paper's test size; a CPU takes four times as long for it as for 512.
    """
    return 1024 if device == "cuda" else 512


class ModelSettings(BaseModel):
    """Settings of a model that apply wherever a user gives none.

    Training chooses the size, learning a whitening keeps the one that it was learned at, and
    `listwise tune` chooses scales, power and expansion.

    Attributes:
        max_side: the long side that larger photos are reduced to; 0 for the original size; None
            for the default of the machine (see `default_max_side`).
        scales: the sizes at which each photo is described, as factors.
        power: the power of the mean over the scales.
        expansion: α query expansion; None for a search without it.
        source: the validation photos.
        photos: the number of validation photos that were searched for.
        start_map: validation mAP before.
        validation_map: validation mAP with these settings.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_side: int | None = Field(None, ge=0)
    scales: tuple[float, ...] = (1.0,)
    power: float = Field(3.0, gt=0)
    expansion: Expansion | None = None
    source: str = ""
    photos: int = 0
    start_map: float = 0.0
    validation_map: float = 0.0

    _usable = field_validator("scales")(check_scales)


class ModelInfo(FileHeader):
    """What the file of a model holds besides its weights, as JSON.

    Attributes:
        network: the architecture and preprocessing of the network.
        whitening: how the whitening was learned; None without a whitening.
        tuned: settings that apply where a user gives none, such as `max_side` and `scales`.
        calibration: turns scores into probabilities.
    """

    model_config = ConfigDict(extra="forbid")

    network: NetConfig
    whitening: WhiteningInfo | None = None
    tuned: ModelSettings | None = None
    calibration: Calibration | None = None


class ModelFile(NamedTuple):
    """The content of the file of a model.

    Attributes:
        info: architecture and settings.
        state: the state dict of the network.
        whitening: mean [C] and projection [D, C] of the whitening; None without one.
    """

    info: ModelInfo
    state: Mapping[str, Tensor]
    whitening: tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]] | None = None

    def with_info(self, **values: Any) -> "ModelFile":
        """Return a copy with other values in `info`."""
        return self._replace(info=self.info.model_copy(update=values))


def model_path(path: str | Path) -> Path:
    """Return the file of a model: `path` itself, or `model.safetensors` in the folder `path`."""
    path = Path(path).expanduser()
    return path if path.suffix == ".safetensors" else path / MODEL_FILE


def write_model(path: str | Path, content: ModelFile) -> None:
    """Write the file of a model; an earlier one is replaced atomically.

    Args:
        path: a folder, which gets the file `model.safetensors`, or a file with this ending.
        content: what to write.
    """
    whitening = map(torch.from_numpy, content.whitening or ())
    tensors = {**content.state, **dict(zip(_WHITENING, whitening, strict=False))}
    write_parts(model_path(path), content.info, tensors)


def read_model(path: str | Path) -> ModelFile:
    """Read what `write_model` wrote; no code in the file is run.

    Raises:
        InputError: the file is missing, damaged, of a newer version, or not a model of Listwise.
    """
    info, tensors = read_parts(model_path(path), ModelInfo, "model")
    mean, projection = (tensors.pop(name, None) for name in _WHITENING)
    if mean is None or projection is None:
        return ModelFile(info, tensors)
    return ModelFile(info, tensors, (mean.numpy(), projection.numpy()))


def write_parts(path: Path, info: FileHeader, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors and the JSON of `info` to a safetensors file, atomically, with a checksum."""
    if path.parent.exists() and not path.parent.is_dir():
        raise InputError(
            f"{path.parent} is a file, but a model is saved in a folder: choose another name"
        )
    text = info.model_dump_json()
    write_tensors(path, tensors, {KEY: text, _CHECKSUM: state_digest({KEY: text}, tensors)})


def read_parts(path: Path, kind: type[H], what: str) -> tuple[H, dict[str, Tensor]]:
    """Read what `write_parts` wrote; errors name `what` it should be."""
    if not path.parent.is_dir():
        raise InputError(f"no {what} folder {path.parent}: give the folder or the file {path.name}")
    if not path.is_file():
        raise InputError(f"{path.parent} is not a {what} folder: expected {path.name}")
    tensors, metadata = read_tensors(path)
    if KEY not in metadata:
        hint = ": give the weights of a timm backbone as `weights`" if what == "model" else ""
        raise InputError(f"{path} is not a {what} of Listwise{hint}")
    if metadata.get(_CHECKSUM) != state_digest({KEY: metadata[KEY]}, tensors):
        raise InputError(
            f"{path} is damaged or was edited: its content does not match its checksum; copy it "
            "again, or train again"
        )
    return kind.parse(metadata[KEY], path, f"give a {what}, or copy it again"), tensors


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors and the metadata of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is damaged ({error}): copy it again, or train again") from error


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
