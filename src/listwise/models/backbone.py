"""The network under the pooling, timm's or your own: images become a feature map."""

import difflib
import itertools
import math
from collections.abc import Callable
from typing import Any

import timm
import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn

from listwise.errors import InputError
from listwise.machine import Machine

SMALL_BACKBONE = "tf_efficientnet_lite0"  # for machines without a GPU
GPU_BACKBONE = "resnet50"

# To take images of any size and leave the feature map unpooled is spelled in several ways among
# timm's families, and some models refuse some of them: the first that a model accepts is used.
_ANY_SIZE: tuple[dict[str, Any], ...] = (
    {"strict_img_size": False},
    {"dynamic_img_size": True, "dynamic_img_pad": True},
    {},
)
_UNPOOLED: tuple[dict[str, Any], ...] = ({"global_pool": ""}, {})
_OPTIONS = [size | pool for size, pool in itertools.product(_ANY_SIZE, _UNPOOLED)]

# How torch words it when an image does not divide as a backbone needs it to.
_SIZE_COMPLAINTS = ("must match the size of tensor", "is invalid for input of size")


def choose_backbone(machine: Machine) -> tuple[str, str]:
    """The timm backbone to use off the shelf on a machine, and the reason."""
    if machine.device.startswith("cuda"):
        return GPU_BACKBONE, "there is a GPU"
    return SMALL_BACKBONE, "there is no GPU, and this one is small"


def check_backbone(name: str) -> None:
    """Raise an `InputError` that names the nearest ones unless timm has a model of that name."""
    if not timm.is_model(name):
        known = timm.list_models()
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else "timm.list_models() lists them"
        raise InputError(f"timm has no backbone called {name!r}: {hint}")
    base, _, tag = name.partition(".")
    tagged = timm.list_pretrained(f"{base}.*")
    if tag and name not in tagged:
        known_tags = ", ".join(tagged) or base
        raise InputError(f"timm has no weights tagged {tag!r} for {base}: choose {known_tags}")


def create_backbone(name: str, **timm_options: Any) -> nn.Module:
    """Make timm's model `name` without a classifier, for images of any size where it can be."""
    for options in _OPTIONS:
        try:
            model: nn.Module = timm.create_model(name, num_classes=0, **options, **timm_options)
        except (TypeError, AssertionError):
            if not options:
                raise
        else:
            break
    embed = getattr(model, "patch_embed", None)
    if isinstance(embed, PatchEmbed) and not embed.strict_img_size:
        embed.dynamic_img_pad = True
    return model


def feature_map(backbone: nn.Module, images: Tensor) -> Tensor:
    """Feature map of normalised images: [B, 3, H, W] -> [B, C, H', W'], class tokens left out.

    The backbone is called by `forward_features` if it has that, as timm's models do.
    """
    model: Any = backbone
    try:
        features = getattr(model, "forward_features", model)(images)
    except (AssertionError, RuntimeError) as error:
        complaint = isinstance(error, AssertionError) or any(
            part in str(error) for part in _SIZE_COMPLAINTS
        )
        if not complaint or not hasattr(model, "pretrained_cfg"):
            raise
        reason = f" ({error})" if str(error) else ""
        given = "×".join(str(side) for side in images.shape[-2:])
        made = "×".join(str(side) for side in model.pretrained_cfg["input_size"][-2:])
        raise InputError(
            f"{type(model).__name__} cannot take images of {given} pixels{reason}: "
            f"it was made for {made}"
        ) from error
    if isinstance(features, Tensor) and features.ndim == 4:
        channels_last = getattr(model, "output_fmt", "NCHW") == "NHWC"
        return features.permute(0, 3, 1, 2) if channels_last else features
    embed: Any = getattr(model, "patch_embed", None)
    if isinstance(features, Tensor) and features.ndim == 3 and hasattr(embed, "feat_ratio"):
        patches = features[:, getattr(model, "num_prefix_tokens", 0) :].transpose(1, 2)
        stride = embed.feat_ratio(as_scalar=False)
        rows, columns = (
            math.ceil(side / step) for side, step in zip(images.shape[-2:], stride, strict=True)
        )
        if patches.shape[2] == rows * columns:
            return patches.reshape(*patches.shape[:2], rows, columns)
    shape = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
    raise InputError(
        f"{type(model).__name__} gives no feature map to pool, but {shape}: "
        "a backbone must give [B, C, H, W]"
    )


def pooled_length(backbone: nn.Module, pooling: nn.Module, side: int) -> int:
    """Length of the vectors that a pooling makes of images [B, 3, side, side], found by a trial."""
    example = next(backbone.parameters(), torch.empty(0))
    images = torch.zeros(2, 3, side, side, dtype=example.dtype, device=example.device)
    with torch.no_grad(), torch.random.fork_rng():
        features = _try("backbone", backbone, lambda: feature_map(backbone, images), images)
        vectors = _try("pooling", pooling, lambda: pooling.to(features)(features), features)
    if not isinstance(vectors, Tensor) or vectors.ndim != 2 or len(vectors) != len(images):
        made = list(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__
        raise InputError(
            f"the pooling {type(pooling).__name__} made {made} of a feature map "
            f"{list(features.shape)}: it must give one vector an image, [B, length]"
        )
    return vectors.shape[1]


def _try(kind: str, part: nn.Module, call: Callable[[], Any], given: Tensor) -> Any:
    try:
        return call()
    except InputError:
        raise
    except Exception as error:  # whatever the part's own code raises
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise InputError(
            f"the {kind} {type(part).__name__} fails on an input {list(given.shape)} ({reason})"
        ) from error
