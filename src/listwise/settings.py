"""What can be set, in one place that imports nothing heavy: the command line reads it at start.

`TrainConfig()` is the paper's recipe (section 4.2).
"""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from listwise.errors import InputError
from listwise.optional import requires
from listwise.plugins import check_name


class CropSettings(BaseModel):
    """How training crops are drawn; the defaults are the paper's size and mild changes.

    A crop is a rotated rectangle that lies within the photo, so that no padding is ever seen.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    size: int = Field(800, ge=8, description="side of the square crop in pixels")
    min_area: float = Field(
        0.5, gt=0, le=1, description="smallest area, of the largest crop of its shape that fits"
    )
    max_area: float = Field(
        1.0, gt=0, le=1, description="largest area, of the largest crop of its shape that fits"
    )
    max_ratio: float = Field(
        4 / 3, ge=1, le=4, description="largest stretch, width to height or height to width"
    )
    rotation: float = Field(10.0, ge=0, le=180, description="largest rotation in degrees")
    brightness: float = Field(0.3, ge=0, lt=1, description="factors within 1 ± this")
    contrast: float = Field(0.3, ge=0, lt=1, description="factors within 1 ± this")
    saturation: float = Field(0.3, ge=0, le=1, description="factors within 1 ± this")
    hue: float = Field(0.02, ge=0, le=0.5, description="largest turn of the hues, in full turns")
    flip: float = Field(
        0.0, ge=0, le=1, description="share of crops that are mirrored; the paper has none"
    )

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

    tuples: int = Field(
        64, ge=1, description="triplets an update; the paper tries 512 and 1024 too"
    )
    form: Literal["margin", "log-exp"] = Field("margin", description="a hinge, or its smooth form")
    margin: float = Field(0.1, ge=0, description="of the hinge, in squared distances")
    pool: int = Field(5000, ge=3, description="photos among which triplets are mined")
    refresh: int = Field(4096, ge=1, description="triplets between two minings")
    hardest: int = Field(25, ge=1, description="hardest triplets of a query, of which one is drawn")

    @property
    def negatives(self) -> int:
        """Negatives of a query."""
        return 1


class ContrastiveSettings(BaseModel):
    """Tuples and how they are mined; the defaults are those of Radenović et al. (TPAMI 2018)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    tuples: int = Field(5, ge=1, description="queries an update, each with all its negatives")
    margin: float = Field(0.85, gt=0, description="distance from which a negative costs nothing")
    negatives: int = Field(5, ge=1, description="negatives of a query, each of another class")
    pool: int = Field(20_000, ge=2, description="photos among which negatives are mined")
    refresh: int = Field(2000, ge=1, description="queries between two minings")


class TrainConfig(BaseModel):
    """Everything a training run depends on; the defaults are the paper's (section 4.2)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # data
    val_fraction: float = Field(
        0.1, gt=0, lt=1, description="share of the classes held out, if no split column says"
    )
    split_column: str = Field("split", description="column of a table that says train or val")
    strict: bool = Field(False, description="stop at the first file that cannot be read")
    # network
    backbone: str = Field("resnet101", description="any timm model")
    pooling: str = Field(
        "gem", description="gem, mac, spoc, rmac, crow, or one that an installed package brings"
    )
    projection: int | None = Field(None, ge=1, description="dimensions of a last linear layer")
    weights: str = Field("auto", description="a file, auto, pretrained, imagenet-package or random")
    # loss
    loss: str = Field(
        "ap",
        description="ap, tie-aware, triplet, contrastive, fastap, smoothap, multi-similarity, or "
        "one that an installed package brings",
    )
    bins: int = Field(20, ge=2, description="bins M of the score axis (ap and tie-aware)")
    class_weights: bool = Field(
        True, description="give every class of a batch the same weight (not with mined tuples)"
    )
    triplet: TripletSettings = TripletSettings()
    contrastive: ContrastiveSettings = ContrastiveSettings()
    # batches
    batch_size: int = Field(4096, ge=2, description="images an update (not with mined tuples)")
    classes_per_batch: int | None = Field(
        None, ge=2, description="classes in a batch, drawn anew each time; all by default"
    )
    crops: CropSettings = CropSettings()
    # optimisation
    updates: int = Field(200, ge=1, description="updates until the learning rate is zero")
    learning_rate: float = Field(1e-4, gt=0, description="Adam's, at the start")
    warmup: int = Field(0, ge=0, description="updates over which the learning rate first rises")
    weight_decay: float = Field(1e-6, ge=0, description="L2 penalty")
    seed: int = Field(0, ge=0, description="of batches, crops and random weights")
    # validation
    validate_every: int = Field(10, ge=1, description="updates between two validations")
    patience: int | None = Field(
        None, ge=1, description="validations without a new best before stopping; never by default"
    )
    val_max_side: int | None = Field(
        None, ge=32, description="reduce validation photos to this long side; never by default"
    )
    # machine
    device: str = Field("auto", description="cpu, cuda, cuda:1 ...; auto takes a GPU if any")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="bfloat16 runs the network under autocast"
    )
    compile: Literal["auto", "yes", "no"] = Field(
        "auto", description="compile the network; auto does on a GPU if the run is long"
    )
    micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="images whose graph is in memory at once"
    )
    workers: int | None = Field(
        None, ge=0, description="processes that decode photos; from the cores by default"
    )
    checkpoint_every: int = Field(10, ge=1, description="updates between two checkpoints")

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
