"""The backbone: a timm model or your own module that turns images into a feature map."""

import difflib
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import timm
import torch
from timm.layers import PatchEmbed
from torch import Tensor, nn

from listwise.errors import InputError
from listwise.machine import Machine
from listwise.models.pooling import pool

SMALL_BACKBONE = "tf_efficientnet_lite0"  # for machines without a GPU
GPU_BACKBONE = "resnet50"

# timm's model families have different options for "take images of any size" and "do not pool the
# feature map". The first combination that a model accepts is used.
_ANY_SIZE: tuple[dict[str, Any], ...] = (
    {"strict_img_size": False},
    {"dynamic_img_size": True, "dynamic_img_pad": True},
    {},
)
_UNPOOLED: tuple[dict[str, Any], ...] = ({"global_pool": ""}, {})
_OPTIONS = [size | pool for size, pool in itertools.product(_ANY_SIZE, _UNPOOLED)]
# timm's vision transformers never pool the patches in `forward_features`, but their last norm has
# another name if they average the patches afterwards, so `global_pool=""` would drop its weights.
_TOKEN_FAMILIES = ("vision_transformer", "vision_transformer_hybrid", "deit", "eva")

# Parts of torch's error messages for an image size that a backbone does not accept.
_SIZE_COMPLAINTS = ("must match the size of tensor", "is invalid for input of size")


def choose_backbone(machine: Machine) -> tuple[str, str]:
    """Choose the timm backbone to use without training on a machine; return it with the reason."""
    if machine.device.startswith("cuda"):
        return GPU_BACKBONE, "a GPU is available"
    return SMALL_BACKBONE, "no GPU is available, and this network is small"


def check_backbone(name: str) -> None:
    """Raise an `InputError` that suggests similar names unless timm has a model of this name."""
    if not timm.is_model(name):
        known = timm.list_models()
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else "timm.list_models() lists all names"
        raise InputError(f"timm has no backbone called {name!r}: {hint}")
    base, _, tag = name.partition(".")
    tagged = timm.list_pretrained(f"{base}.*")
    if tag and name not in tagged:
        known_tags = ", ".join(tagged) or base
        raise InputError(
            f"timm has no weights tagged {tag!r} for {base}: choose one of {known_tags}"
        )


def create_backbone(name: str, **timm_options: Any) -> nn.Module:
    """Create a timm model without its classifier, for images of any size if it supports that."""
    for options in _ANY_SIZE if of_tokens(name) else _OPTIONS:
        try:
            model: Any = timm.create_model(name, num_classes=0, **options, **timm_options)
        except (TypeError, AssertionError):
            if not options:
                raise
        else:
            break
    embed = getattr(model, "patch_embed", None)
    if isinstance(embed, PatchEmbed) and not embed.strict_img_size:
        embed.dynamic_img_pad = True
    if of_tokens(name):
        if isinstance(model.norm, nn.Identity) and not isinstance(model.fc_norm, nn.Identity):
            model.norm, model.fc_norm = model.fc_norm, nn.Identity()
        model.attn_pool = None
    created: nn.Module = model
    return created


def of_tokens(name: str) -> bool:
    """Return whether a timm model is a plain vision transformer: a class token and patches."""
    family: str = timm.model_entrypoint(name).__module__
    return family.rpartition(".")[2] in _TOKEN_FAMILIES


def patch_side(name: str) -> int | None:
    """Return the side of the patches of a transformer in pixels, from its name; None if unknown."""
    found = re.search(r"_patch(\d+)", name)
    return int(found[1]) if found else None


def feature_map(backbone: nn.Module, images: Tensor) -> Tensor:
    """Compute the feature map of normalized images: [B, 3, H, W] -> [B, C, h, w].

    Calls `forward_features` of the backbone if it has that method, as timm's models do. Class
    and register tokens of a transformer are removed.
    """
    return split_features(backbone, images)[0]


def split_features(backbone: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """Compute the feature map of normalized images, and the class token if there is one.

    Args:
        backbone: a timm model, or a module that returns a feature map.
        images: [B, 3, H, W].

    Returns:
        The feature map [B, C, h, w], and the class token [B, C] or None.
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
        expected = "×".join(str(side) for side in model.pretrained_cfg["input_size"][-2:])
        raise InputError(
            f"{type(model).__name__} cannot take images of {given} pixels{reason}: "
            f"use images of {expected}"
        ) from error
    if isinstance(features, Tensor) and features.ndim == 4:
        channels_last = getattr(model, "output_fmt", "NCHW") == "NHWC"
        return features.permute(0, 3, 1, 2) if channels_last else features, None
    embed: Any = getattr(model, "patch_embed", None)
    if isinstance(features, Tensor) and features.ndim == 3 and hasattr(embed, "feat_ratio"):
        patches = features[:, getattr(model, "num_prefix_tokens", 0) :].transpose(1, 2)
        stride = embed.feat_ratio(as_scalar=False)
        rows, columns = (
            math.ceil(side / step) for side, step in zip(images.shape[-2:], stride, strict=True)
        )
        if patches.shape[2] == rows * columns:
            has_class = isinstance(getattr(model, "cls_token", None), Tensor)
            class_token = features[:, 0] if has_class else None
            return patches.reshape(*patches.shape[:2], rows, columns), class_token
    shape = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
    raise InputError(
        f"{type(model).__name__} returns {shape}, which cannot be pooled: "
        "a backbone must return a feature map [B, C, h, w]"
    )


def pooled_length(backbone: nn.Module, pooling: nn.Module, side: int) -> int:
    """Find the length of the pooled vectors with a trial on images [2, 3, side, side]."""
    example = next(backbone.parameters(), torch.empty(0))
    images = torch.zeros(2, 3, side, side, dtype=example.dtype, device=example.device)
    with torch.no_grad(), torch.random.fork_rng():
        found = _try("backbone", backbone, lambda: split_features(backbone, images), images)
        features, class_token = found
        pooling.to(features)
        vectors = _try("pooling", pooling, lambda: pool(pooling, features, class_token), features)
    if not isinstance(vectors, Tensor) or vectors.ndim != 2 or len(vectors) != len(images):
        made = list(vectors.shape) if isinstance(vectors, Tensor) else type(vectors).__name__
        raise InputError(
            f"the pooling {type(pooling).__name__} returns {made} for a feature map "
            f"{list(features.shape)}: it must return one vector per image, [B, length]"
        )
    return vectors.shape[1]


def _try(kind: str, part: nn.Module, call: Callable[[], Any], given: Tensor) -> Any:
    try:
        return call()
    except InputError:
        raise
    except Exception as error:  # code of the user may raise anything
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise InputError(
            f"the {kind} {type(part).__name__} fails on an input {list(given.shape)} ({reason})"
        ) from error
