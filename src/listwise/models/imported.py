"""Import networks that others have released: naver's AP-GeM checkpoints and those of cirtorch.

A checkpoint of naver/deep-image-retrieval has `model_options` (the name of the architecture and its
settings), `state_dict` (torchvision's ResNet names, `adpool.p`, `fc`), and `pca`: scikit-learn
objects by the name of the data that they were learned from. A checkpoint of
filipradenovic/cnnimageretrieval-pytorch has `meta` (the architecture, its preprocessing, and
learned whitenings under `Lw`) and `state_dict` (`features.N`, `pool.p`, `whiten`).
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from listwise.errors import InputError
from listwise.models.net import RetrievalNet
from listwise.models.storage import ModelFile, ModelInfo, NetConfig, WhiteningInfo, write_model

WHITEN_POWER: Final = 0.25
"""The power of the variances that naver's evaluation divides by (`--whitenp 0.25`)."""

AUTHORS_SIDE = 1024
"""The long side of photos that cirtorch tests with by default; Oxford and Paris have it too."""

_IMAGENET: Final = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
_NAVER_POOLINGS: Final = {"gem": "gem", "max": "mac", "avg": "spoc"}
_CIRTORCH_POOLINGS: Final = {"gem": "gem", "mac": "mac", "spoc": "spoc"}
_CIRTORCH_STAGES: Final = {"0": "conv1", "1": "bn1"} | {
    str(4 + i): f"layer{1 + i}" for i in range(4)
}
_PREFERRED: Final = ("Landmarks_clean", "retrieval-SfM-120k")

WhiteningParts = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Mean [C] and projection [D, C] of a whitening: L2((x - mean) @ projection.T)."""
Whitenings = dict[str, WhiteningParts]


@dataclass(frozen=True, eq=False)
class ImportedModel:
    """A released network, and its whitening if the file has one.

    Attributes:
        net: the network, in evaluation mode.
        whitening: the name of the whitening that was chosen.
        parts: mean [C] and projection [D, C] of this whitening.
        info: whether it is a PCA, and its power.
        whitenings: the names of all whitenings in the file.
        notes: sentences to show to the user.
    """

    net: RetrievalNet
    whitening: str | None = None
    parts: WhiteningParts | None = None
    info: WhiteningInfo | None = None
    whitenings: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)


def import_checkpoint(path: str | Path) -> RetrievalNet:
    """Load the network of a checkpoint released by naver or cirtorch, in evaluation mode.

    No code in the file is run.

    Examples:
        >>> net = import_checkpoint("Resnet-101-AP-GeM.pt")  # doctest: +SKIP
        >>> net(images).shape                                # doctest: +SKIP
        torch.Size([2, 2048])
    """
    return import_model(path, whitening="none").net


def import_model(
    path: str | Path, whitening: str | None = None, whiten_power: float = WHITEN_POWER
) -> ImportedModel:
    """Load a released checkpoint with its whitening; no code in the file is run.

    Args:
        path: a `.pt` file of naver/deep-image-retrieval or a `.pth` file of cirtorch.
        whitening: the name of a whitening in the file, "none", or None for the one that the
            authors use.
        whiten_power: the power of the variances that a PCA divides by; a whitening of cirtorch
            is not a PCA and ignores it.

    Raises:
        InputError: the file is not such a checkpoint, its network has an unsupported part, or it
            contains anything but data.
    """
    from listwise.data.pickles import read_checkpoint  # its package needs more packages

    path = Path(path)
    content = read_checkpoint(path)
    state = content.get("state_dict") if isinstance(content, dict) else None
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise InputError(f"{path} has no state_dict of tensors: give a released checkpoint")
    state = {str(key).removeprefix("module."): value for key, value in state.items()}
    if isinstance(content.get("meta"), dict):
        power: float | None = None
        net, found = _cirtorch(content["meta"], state, path)
    elif isinstance(content.get("model_options"), dict):
        net, found = _naver(content, state, whiten_power, path)
        power = whiten_power
    else:
        raise InputError(
            f"{path} has neither 'model_options' (naver) nor 'meta' (cirtorch), so its network is "
            "unknown: give a checkpoint that one of these two projects released"
        )
    return _with_whitening(net, found, whitening, power, path)


def _with_whitening(
    net: RetrievalNet, found: Whitenings, wanted: str | None, power: float | None, path: Path
) -> ImportedModel:
    names = tuple(found)
    if wanted == "none" or (wanted is None and not found):
        return ImportedModel(net, whitenings=names)
    if wanted is None:
        wanted = next((name for name in _PREFERRED if name in found), names[0])
    if wanted not in found:
        raise InputError(
            f"{path} has no whitening {wanted!r}: choose one of {', '.join((*names, 'none'))}"
        )
    mean, projection = found[wanted]
    if mean.shape != (net.dim,) or projection.ndim != 2 or projection.shape[1] != net.dim:
        raise InputError(
            f"{path}: the whitening {wanted!r} is for {projection.shape[-1]} dimensions, but the "
            f"network has {net.dim}: choose another `whitening`"
        )
    if not (np.isfinite(mean).all() and np.isfinite(projection).all()):
        raise InputError(
            f"{path}: the whitening {wanted!r} has infinite values; choose a smaller `whiten_power`"
        )
    others = [name for name in names if name != wanted]
    notes = [f"other whitenings in the file: {', '.join(others)}"] if others else []
    scales = (1.0, 0.7071, 0.5) if wanted.endswith("/ms") else (1.0,)
    info = WhiteningInfo(method="imported", power=power, max_side=AUTHORS_SIDE, scales=scales)
    return ImportedModel(net, wanted, (mean, projection), info, names, notes)


def import_to_folder(
    file: str | Path,
    folder: str | Path,
    whitening: str | None = None,
    whiten_power: float = WHITEN_POWER,
) -> ImportedModel:
    """Convert a released checkpoint into a model folder; no code in the file is run.

    Args:
        file: the checkpoint.
        folder: the model folder to write, which must be new or empty.
        whitening: name of a whitening in the checkpoint, or none; by default the authors' choice.
        whiten_power: power of the variances that the whitening divides by, from 0 to 1.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists already: give a new folder")
    model = import_model(file, whitening, whiten_power)
    info = ModelInfo(network=model.net.config, whitening=model.info)
    write_model(folder, ModelFile(info, model.net.plain_state(), model.parts))
    return model


def _naver(
    content: dict[str, Any], state: dict[str, Tensor], power: float, path: Path
) -> tuple[RetrievalNet, Whitenings]:
    options = content["model_options"]
    arch = str(options.get("arch"))
    named = re.fullmatch(r"(resnet(?:18|50|101|152))_rmac", arch)
    if named is None:
        raise InputError(f"{path}: the architecture {arch!r} is not supported: only ResNets are")
    if options.get("center_bias"):
        raise InputError(f"{path}: its pooling has a center bias, which is not supported")
    pooling = str(options.get("pooling", "gem"))
    pooling = _pooling("gem" if pooling.startswith("gem") else pooling, _NAVER_POOLINGS, path)
    own = {key: value for key, value in state.items() if not key.startswith(("fc.", "adpool."))}
    renamed = {f"backbone.{key}": value for key, value in own.items()}
    if pooling == "gem":
        power_of_gem = state.get("adpool.p", torch.tensor([float(options.get("gemp", 3))]))
        renamed["pooling.p"] = power_of_gem.reshape(1)
    if not options.get("without_fc"):
        renamed |= _linear(state, "fc", path)
    unit, looks = bool(options.get("norm_features")), content.get("preprocess") or _IMAGENET
    net = _build(named[1], pooling, unit, looks, renamed, path)
    return net, _naver_whitenings(content.get("pca"), power, path)


def _naver_whitenings(pca: Any, power: float, path: Path) -> Whitenings:
    if not pca:
        return {}
    records = {"pca": pca} if isinstance(pca, dict) and "components_" in pca else pca
    found: Whitenings = {}
    for name, record in records.items():
        try:
            projection = np.asarray(record["components_"], np.float64)
            mean = record["mean_"]
            if record["whiten"]:
                with np.errstate(divide="ignore"):
                    variance = np.asarray(record["explained_variance_"], np.float64)
                    projection = projection / variance[:, None] ** power
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise InputError(f"{path}: the whitening {name!r} is not a PCA ({error!r})") from None
        mean = np.zeros(projection.shape[1]) if mean is None else np.asarray(mean)
        found[str(name)] = mean.astype(np.float32), projection.astype(np.float32)
    return found


def _cirtorch(
    meta: dict[str, Any], state: dict[str, Tensor], path: Path
) -> tuple[RetrievalNet, Whitenings]:
    arch = str(meta.get("architecture"))
    if re.fullmatch(r"resnet(18|34|50|101|152)", arch) is None:
        raise InputError(f"{path}: the architecture {arch!r} is not supported: only ResNets are")
    for part in ("local_whitening", "regional"):
        if meta.get(part):
            raise InputError(f"{path}: the network has '{part}', which is not supported")
    pooling = _pooling(str(meta.get("pooling")), _CIRTORCH_POOLINGS, path)
    renamed: dict[str, Tensor] = {}
    for key, value in state.items():
        part, _, rest = key.removeprefix("features.").partition(".")
        if key.startswith("features."):
            renamed[f"backbone.{_CIRTORCH_STAGES.get(part, part)}.{rest}"] = value
    if pooling == "gem" and "pool.p" in state:
        renamed["pooling.p"] = state["pool.p"].reshape(1)
    if meta.get("whitening"):
        renamed |= _linear(state, "whiten", path)
    net = _build(arch, pooling, bool(meta.get("whitening")), meta, renamed, path)
    return net, _cirtorch_whitenings(meta.get("Lw") or {}, path)


def _cirtorch_whitenings(learned: Any, path: Path) -> Whitenings:
    """Return whitenings by the data they were learned from; `NAME/ms` is for several scales."""
    found: Whitenings = {}
    try:
        for name, scales in learned.items():
            for scale, parts in scales.items():
                mean = np.asarray(parts["m"], np.float32).reshape(-1)
                suffix = "" if scale == "ss" else f"/{scale}"
                found[f"{name}{suffix}"] = mean, np.asarray(parts["P"], np.float32)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: its learned whitening cannot be read ({error!r})") from None
    return found


def _pooling(name: str, known: dict[str, str], path: Path) -> str:
    if name not in known:
        raise InputError(
            f"{path}: the pooling {name!r} is not supported: only {', '.join(known)} are"
        )
    return known[name]


def _linear(state: dict[str, Tensor], name: str, path: Path) -> dict[str, Tensor]:
    if f"{name}.weight" not in state:
        raise InputError(f"{path}: the last linear layer, {name}.weight, is missing")
    return {f"projection.{part}": state[f"{name}.{part}"] for part in ("weight", "bias")}


def _build(
    backbone: str,
    pooling: str,
    normalize_pooled: bool,
    preprocessing: dict[str, Any],
    state: dict[str, Tensor],
    path: Path,
) -> RetrievalNet:
    weight = state.get("projection.weight")
    try:
        config = NetConfig(
            backbone=backbone,
            pooling=pooling,
            projection=None if weight is None else weight.shape[0],
            normalize_pooled=normalize_pooled,
            mean=tuple(preprocessing["mean"]),
            std=tuple(preprocessing["std"]),
            image_size=224,
            provenance={"weights": path.name, "imported": True},
        )
    except (KeyError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path}: its preprocessing cannot be read ({reason})") from None
    floats = {key: value.float() for key, value in state.items() if value.is_floating_point()}
    return RetrievalNet.build(config, state | floats, f"{path} does not fit {backbone}")
