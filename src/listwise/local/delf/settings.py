"""Settings of deep local features; importing this module loads nothing heavy."""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from listwise.settings import CropSettings

NOH_SCALES = tuple(2.0 ** (half / 2) for half in range(2, -5, -1))
"""From 2 to 0.25 times the size of the photo, in steps of √2 (Noh et al. 2017)."""


class DelfSettings(BaseModel):
    """Settings of the extraction of deep local features.

    Photos with a long side above `max_side` are reduced to it. A scale is used if the long side of
    the scaled photo is at most `max_side`: a photo of 362 pixels is used at up to 724 pixels, one
    of 4000 at up to 1024, and both take about the same time.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    count: int = Field(1000, ge=1, description="features of a photo at most")
    scales: tuple[float, ...] = Field(NOH_SCALES, description="sizes at which a photo is seen")
    max_side: int = Field(1024, ge=32, description="long side of the largest of them")

    @field_validator("scales")
    @classmethod
    def _usable(cls, scales: tuple[float, ...]) -> tuple[float, ...]:
        if not scales or not all(0 < scale <= 4 and math.isfinite(scale) for scale in scales):
            raise ValueError("give one or more numbers above 0 and up to 4")
        return tuple(sorted(scales, reverse=True))


class DelfTraining(BaseModel):
    """Settings of the training of deep local features.

    Training has two steps (Noh et al. 2017). First the backbone is fine-tuned as a classifier. Then
    the backbone is frozen, and the attention is trained with a classifier of the weighted features.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # network
    backbone: str = Field("resnet50", description="any ResNet of timm")
    weights: str = Field(
        "auto",
        description="a file, auto, pretrained, random, or the folder of a network that "
        "listwise train made, which then sets the backbone",
    )
    hidden: int = Field(512, ge=1, description="channels of the attention's first layer")
    dim: int = Field(128, ge=1, description="dimensions of a descriptor, after PCA")
    # data
    val_fraction: float = Field(
        0.05, gt=0, lt=1, description="share of the photos held out to choose by, 1000 at most"
    )
    crops: CropSettings = Field(CropSettings(size=448), description="how training crops are drawn")
    min_scale: float = Field(
        0.25, gt=0, le=1, description="smallest size that crops are reduced to for the attention"
    )
    # optimisation
    fine_tune: bool = Field(True, description="do the first step")
    fine_tune_updates: int = Field(2000, ge=1, description="updates of the first step")
    fine_tune_learning_rate: float = Field(1e-4, gt=0, description="Adam's, at the start")
    attention_updates: int = Field(2000, ge=1, description="updates of the second step")
    attention_learning_rate: float = Field(1e-3, gt=0, description="Adam's, at the start")
    weight_decay: float = Field(1e-6, ge=0, description="L2 penalty")
    batch_size: int = Field(64, ge=2, description="crops an update")
    seed: int = Field(0, ge=0, description="of crops, batches and random weights")
    pca_photos: int = Field(500, ge=1, description="photos that the PCA is learned from, at most")
    validate_every: int = Field(100, ge=1, description="updates between validations, checkpoints")
    # machine
    device: str = Field("auto", description="cpu, cuda, cuda:1 ...; auto takes a GPU if any")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="bfloat16 runs the network under autocast; auto does on a GPU"
    )
    workers: Annotated[int, Field(ge=0)] | None = Field(
        None, description="processes that decode photos; from the cores by default"
    )
