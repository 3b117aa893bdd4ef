"""What can be set, in one place that imports nothing heavy: the command line reads it at start.

`TrainConfig()` is the paper's recipe (section 4.2).
"""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from listwise.errors import InputError
from listwise.optional import requires
from listwise.plugins import check_name


class CropSettings(BaseModel):
    """How training crops are drawn; the defaults are the paper's size and mild changes.

    A crop is a rotated rectangle that lies within the photo, so that no padding is ever seen.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    size: int = Field(800, ge=8, description="Side of the square crops, in pixels")
    min_area: float = Field(
        0.5, gt=0, le=1, description="Smallest area, as a share of the largest crop that fits"
    )
    max_area: float = Field(
        1.0, gt=0, le=1, description="Largest area, as a share of the largest crop that fits"
    )
    max_ratio: float = Field(
        4 / 3, ge=1, le=4, description="Largest ratio of the longer to the shorter side"
    )
    rotation: float = Field(10.0, ge=0, le=180, description="Largest rotation, in degrees")
    brightness: float = Field(0.3, ge=0, lt=1, description="Brightness changes by up to this share")
    contrast: float = Field(0.3, ge=0, lt=1, description="Contrast changes by up to this share")
    saturation: float = Field(0.3, ge=0, le=1, description="Saturation changes by up to this share")
    hue: float = Field(0.02, ge=0, le=0.5, description="Largest shift of the hue, in full turns")
    flip: float = Field(0.0, ge=0, le=1, description="Share of the crops that are mirrored")

    @model_validator(mode="after")
    def _areas_in_order(self) -> Self:
        if self.min_area > self.max_area:
            raise ValueError(f"min_area {self.min_area} is larger than max_area {self.max_area}")
        return self

    @property
    def min_side(self) -> int:
        """Short side at which the smallest crop, neither turned nor stretched, is not enlarged."""
        return math.ceil(self.size / math.sqrt(self.min_area))


class TripletSettings(BaseModel):
    """Triplets and how they are mined; the defaults are those of Gordo et al. (IJCV 2017)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    tuples: int = Field(64, ge=1, description="Triplets per update")
    form: Literal["margin", "log-exp"] = Field("margin", description="A hinge, or its smooth form")
    margin: float = Field(0.1, ge=0, description="Margin of the hinge, in squared distances")
    pool: int = Field(5000, ge=3, description="Photos among which triplets are mined")
    refresh: int = Field(4096, ge=1, description="Triplets between two minings")
    hardest: int = Field(25, ge=1, description="Hardest triplets per query, of which one is drawn")

    @property
    def negatives(self) -> int:
        """Negatives of a query."""
        return 1


class ContrastiveSettings(BaseModel):
    """Tuples and how they are mined; the defaults are those of Radenović et al. (TPAMI 2018)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    tuples: int = Field(5, ge=1, description="Queries per update, each with all its negatives")
    margin: float = Field(0.85, gt=0, description="Distance from which a negative adds no loss")
    negatives: int = Field(5, ge=1, description="Negatives per query, each of another class")
    pool: int = Field(20_000, ge=2, description="Photos among which negatives are mined")
    refresh: int = Field(2000, ge=1, description="Queries between two minings")


class TrainConfig(BaseModel):
    """Everything a training run depends on; the defaults are the paper's (section 4.2)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # data
    val_fraction: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="Share of the classes to validate on, if the data have no split",
    )
    split_column: str = Field("split", description="Column of a table with train or val")
    strict: bool = Field(False, description="Stop at the first file that cannot be read")
    # network
    backbone: str = Field("resnet101", description="Name of a timm model")
    pooling: str = Field(
        "gem", description="Pooling: gem, mac, spoc, rmac, crow, or that of an installed package"
    )
    projection: int | None = Field(None, ge=1, description="Dimensions of a last linear layer")
    weights: str = Field("auto", description="A file, auto, pretrained, imagenet-package or random")
    # loss
    loss: str = Field(
        "ap",
        description="Loss: ap, tie-aware, triplet, contrastive, fastap, smoothap, "
        "multi-similarity, or that of an installed package",
    )
    bins: int = Field(20, ge=2, description="Bins of the score axis, for ap and tie-aware")
    class_weights: bool = Field(
        True, description="Give every class of a batch the same weight; not used with mined tuples"
    )
    triplet: TripletSettings = TripletSettings()
    contrastive: ContrastiveSettings = ContrastiveSettings()
    # batches
    batch_size: int = Field(4096, ge=2, description="Images per update; not used with mined tuples")
    classes_per_batch: int | None = Field(
        None, ge=2, description="Random classes per batch; none means all classes"
    )
    crops: CropSettings = CropSettings()
    # optimisation
    updates: int = Field(200, ge=1, description="Updates until the learning rate is zero")
    learning_rate: float = Field(1e-4, gt=0, description="Initial learning rate of Adam")
    warmup: int = Field(0, ge=0, description="Updates during which the learning rate rises first")
    weight_decay: float = Field(1e-6, ge=0, description="Weight decay (L2 penalty)")
    seed: int = Field(0, ge=0, description="Seed of batches, crops and random weights")
    # validation
    validate_every: int = Field(10, ge=1, description="Updates between two validations")
    patience: int | None = Field(
        None, ge=1, description="Stop after so many validations without a new best; none: never"
    )
    val_max_side: int | None = Field(
        None, ge=32, description="Reduce validation photos to this long side, in pixels"
    )
    # machine
    device: str = Field("auto", description="cpu, cuda, cuda:1 ...; auto uses a GPU if present")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="Precision of the network; bfloat16 runs it under autocast"
    )
    compile: Literal["auto", "yes", "no"] = Field(
        "auto", description="Compile the network; auto does so on a GPU if the run is long"
    )
    micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="Images whose activations are in memory at once; auto measures what fits",
    )
    workers: int | None = Field(None, ge=0, description="Processes that decode photos")
    checkpoint_every: int = Field(10, ge=1, description="Updates between two checkpoints")

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, name: str) -> str:
        return check_name("loss", name)

    @field_validator("pooling")
    @classmethod
    def _known_pooling(cls, name: str) -> str:
        return check_name("pooling", name)

    @property
    def mined(self) -> TripletSettings | ContrastiveSettings | None:
        """The settings of the tuples, if the loss is one that has them mined."""
        if self.loss == "triplet":
            return self.triplet
        return self.contrastive if self.loss == "contrastive" else None

    @property
    def images_per_update(self) -> int:
        """Images of a batch, at most."""
        return self.mined.tuples * (2 + self.mined.negatives) if self.mined else self.batch_size


# Settings that hold settings.
NESTED: dict[str, type[BaseModel]] = {
    "crops": CropSettings,
    "triplet": TripletSettings,
    "contrastive": ContrastiveSettings,
}


def read_settings(path: str | Path) -> dict[str, Any]:
    """The settings a YAML file gives, checked against `TrainConfig` but not filled up."""
    with requires("train", "a config file"):
        import yaml

    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold settings as 'name: value' lines")
    make_config(content, str(path))
    return content


def make_config(settings: dict[str, Any], where: str) -> TrainConfig:
    """A config from settings; what is wrong with them is said in one line."""
    try:
        return TrainConfig.model_validate(settings)
    except ValidationError as error:
        first, *others = error.errors()
        inner = NESTED.get(str(first["loc"][0]))
        name = ".".join(str(part) for part in first["loc"][: 2 if inner else 1])
        if first["type"] == "extra_forbidden":
            known = inner or TrainConfig
            raise InputError(
                f"{where}: unknown setting {name!r}; there are {', '.join(known.model_fields)}"
            ) from error
        # A setting of several types has an error for each of them.
        same = [other for other in others if other["loc"][:1] == first["loc"][:1] and not inner]
        reason = ", or ".join(
            fault["msg"].removeprefix("Value error, ") for fault in (first, *same)
        )
        raise InputError(f"{where}: {name}: {reason}") from error


def merge(*layers: dict[str, Any]) -> dict[str, Any]:
    """Settings put together; later layers win, also inside nested settings."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merge(result[key], value) if both else value
    return result
