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

    count: int = Field(1000, ge=1, description="Maximum number of features per photo")
    scales: tuple[float, ...] = Field(NOH_SCALES, description="Scales of the image pyramid")
    max_side: int = Field(1024, ge=32, description="Maximum long side of a scaled photo, in pixels")

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
    backbone: str = Field("resnet50", description="Name of a timm ResNet")
    weights: str = Field(
        "auto",
        description="Initial weights: auto, pretrained, random, a weights file, or a model folder, "
        "which also sets the backbone",
    )
    hidden: int = Field(512, ge=1, description="Channels of the first layer of the attention")
    dim: int = Field(128, ge=1, description="Dimensions of a descriptor after PCA")
    # data
    val_fraction: float = Field(
        0.05, gt=0, lt=1, description="Fraction of the photos to validate on, at most 1000 photos"
    )
    crops: CropSettings = Field(
        CropSettings(size=448), description="Settings of the training crops"
    )
    min_scale: float = Field(
        0.25, gt=0, le=1, description="Minimum scale of the crops on which the attention is trained"
    )
    # optimization
    fine_tune: bool = Field(True, description="Fine-tune the backbone first")
    fine_tune_updates: int = Field(2000, ge=1, description="Number of updates of fine-tuning")
    fine_tune_learning_rate: float = Field(
        1e-4, gt=0, description="Initial learning rate of Adam in fine-tuning"
    )
    attention_updates: int = Field(2000, ge=1, description="Number of updates of the attention")
    attention_learning_rate: float = Field(
        1e-3, gt=0, description="Initial learning rate of Adam for the attention"
    )
    weight_decay: float = Field(1e-6, ge=0, description="Weight decay (L2 penalty)")
    batch_size: int = Field(64, ge=2, description="Number of crops per update")
    seed: int = Field(0, ge=0, description="Seed of crops, batches and random weights")
    pca_photos: int = Field(
        500, ge=1, description="Maximum number of photos from which the PCA is learned"
    )
    validate_every: int = Field(
        100, ge=1, description="Number of updates between two validations, each with a checkpoint"
    )
    # machine
    device: str = Field(
        "auto", description="Device: cpu, cuda, cuda:1, or auto, which uses a GPU if available"
    )
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Precision in which the network computes; auto is bfloat16 on a GPU"
    )
    workers: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Number of processes that decode photos; from the CPU cores by default"
    )
