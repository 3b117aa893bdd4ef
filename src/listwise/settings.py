"""The settings of a training run, in a module that is fast to import for the command line.

`TrainConfig()` is the recipe of the paper (section 4.2).
"""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from listwise.errors import InputError
from listwise.optional import requires
from listwise.plugins import check_name

MAX_SEED = 2**32 - 1  # the largest that every random number generator in use accepts


class CropSettings(BaseModel):
    """Settings of the random training crops; the default size is the paper's.

    A crop is a rotated rectangle inside the photo, so crops contain no padding.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    size: int = Field(
        800, ge=8, le=8192, description="Side of the square training crops, in pixels"
    )
    min_area: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Minimum area of a crop, as a fraction of the largest crop that fits",
    )
    max_area: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Maximum area of a crop, as a fraction of the largest crop that fits",
    )
    max_ratio: float = Field(
        4 / 3, ge=1, le=4, description="Maximum ratio of the longer to the shorter side of a crop"
    )
    rotation: float = Field(
        10.0, ge=0, le=180, description="Maximum rotation of a crop, in degrees"
    )
    brightness: float = Field(
        0.3, ge=0, lt=1, description="Maximum change of the brightness, as a fraction"
    )
    contrast: float = Field(
        0.3, ge=0, lt=1, description="Maximum change of the contrast, as a fraction"
    )
    saturation: float = Field(
        0.3, ge=0, le=1, description="Maximum change of the saturation, as a fraction"
    )
    hue: float = Field(
        0.02,
        ge=0,
        le=0.5,
        description="Maximum shift of the hue, as a fraction of the color circle",
    )
    flip: float = Field(0.0, ge=0, le=1, description="Probability of flipping a crop horizontally")

    @model_validator(mode="after")
    def _areas_in_order(self) -> Self:
        if self.min_area > self.max_area:
            raise ValueError(f"min_area {self.min_area} is larger than max_area {self.max_area}")
        return self

    @property
    def min_side(self) -> int:
        """Minimum shorter side of a photo for which no upright square crop is enlarged."""
        return math.ceil(self.size / math.sqrt(self.min_area))


class TripletSettings(BaseModel):
    """Settings of the triplet loss and its mining; defaults of Gordo et al. (2017)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    tuples: int = Field(64, ge=1, description="Number of triplets per update")
    form: Literal["margin", "log-exp"] = Field(
        "margin",
        description="Form of the triplet loss: margin (a hinge) or log-exp (its smooth form)",
    )
    margin: float = Field(
        0.1, ge=0, description="Margin of the triplet loss, as a squared distance"
    )
    pool: int = Field(5000, ge=3, description="Number of photos from which triplets are mined")
    refresh: int = Field(4096, ge=1, description="Number of triplets between two rounds of mining")
    hardest: int = Field(
        25, ge=1, description="Number of hardest triplets per query from which one is drawn"
    )

    @property
    def negatives(self) -> int:
        """Number of negatives per query."""
        return 1


class ContrastiveSettings(BaseModel):
    """Settings of the contrastive loss and its mining; defaults of Radenović et al. (2018)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    tuples: int = Field(
        5, ge=1, description="Number of queries per update, each with its positive and negatives"
    )
    margin: float = Field(
        0.85, gt=0, description="Distance above which a negative adds nothing to the loss"
    )
    negatives: int = Field(
        5, ge=1, description="Number of negatives per query, each of a different class"
    )
    pool: int = Field(20_000, ge=2, description="Number of photos from which negatives are mined")
    refresh: int = Field(2000, ge=1, description="Number of queries between two rounds of mining")


class ProxyAnchorSettings(BaseModel):
    """Settings of the Proxy-Anchor loss; defaults of Kim et al. (2020)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    margin: float = Field(0.1, description="Margin of the cosine between an image and a proxy")
    scale: float = Field(32.0, gt=0, description="Factor of the cosines in the exponents")
    rate_factor: float = Field(
        100.0,
        gt=0,
        description="Learning rate of the proxies, as a multiple of the learning rate of the "
        "network",
    )


class HierarchicalAPSettings(BaseModel):
    """Settings of the hierarchical AP loss; defaults of Ramzi et al. (2022)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    alpha: float = Field(
        1.0,
        ge=0,
        description="Exponent of the relevance: larger values make images that share only the "
        "coarse levels of a label less relevant",
    )
    clustering: float = Field(
        0.1, ge=0, le=1, description="Weight of the clustering term, from 0 to 1"
    )
    rate_factor: float = Field(
        100.0,
        gt=0,
        description="Learning rate of the vectors of the clustering term, as a multiple of the "
        "learning rate of the network",
    )


class RecallAtKSettings(BaseModel):
    """Settings of the Recall@k loss; Patel et al. (2022)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    virtual: int = Field(
        0,
        ge=0,
        description="Maximum number of virtual examples per class and batch (similarity mixup); 0 "
        "is off",
    )


class TrainConfig(BaseModel):
    """All settings of a training run; the defaults are the paper's (section 4.2)."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # data
    val_fraction: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="Fraction of the classes to validate on, if the photos have no split",
    )
    split_column: str = Field("split", description="Column of the table that contains train or val")
    strict: bool = Field(False, description="Stop at the first photo that cannot be read")
    # network
    backbone: str = Field("resnet101", description="Name of a timm model")
    pooling: str = Field(
        "gem",
        description="Pooling: gem, mac, spoc, rmac, crow, cls, cls+gem, or one of an installed "
        "package; cls is the class token of a transformer",
    )
    projection: int | None = Field(
        None,
        ge=1,
        description="Number of dimensions of a linear layer after the pooling; none adds no layer",
    )
    weights: str = Field(
        "auto",
        description="Initial weights: auto, pretrained, imagenet-package, random, or a file",
    )
    lora: int | None = Field(
        None,
        ge=1,
        description="Rank of LoRA: train low-rank changes of the linear layers of a transformer, "
        "whose own weights are frozen; none trains all weights",
    )
    lora_alpha: float = Field(
        16.0, gt=0, description="Size of the changes of LoRA, which are multiplied by alpha / rank"
    )
    adapter: bool = Field(
        False,
        description="Train only a linear layer on the descriptors of the frozen network, which are "
        "computed once",
    )
    # loss
    teacher: str | None = Field(
        None,
        description="Model whose descriptors the network learns to compute, without the loss; an "
        "index of that model then accepts queries of the network",
    )
    loss: str = Field(
        "ap",
        description="Loss: ap, tie-aware, triplet, contrastive, fastap, smoothap, recall-at-k, "
        "infonce, roadmap, multi-similarity, proxy-anchor, hierarchical-ap, or one of an installed "
        "package",
    )
    bins: int = Field(
        20, ge=2, description="Number of quantization bins of the losses ap and tie-aware"
    )
    class_weights: bool = Field(
        True,
        description="Weight all classes of a batch equally; not used by triplet and contrastive",
    )
    triplet: TripletSettings = TripletSettings()
    contrastive: ContrastiveSettings = ContrastiveSettings()
    proxy_anchor: ProxyAnchorSettings = ProxyAnchorSettings()
    hierarchical_ap: HierarchicalAPSettings = HierarchicalAPSettings()
    recall_at_k: RecallAtKSettings = RecallAtKSettings()
    matryoshka: list[Annotated[int, Field(ge=1)]] = Field(
        [],
        description="Shorter lengths of the descriptors to train too, such as 512,128,64; after "
        "training, descriptors can be cut to these lengths",
    )
    memory: int = Field(
        0,
        ge=0,
        description="Number of photos of earlier batches that each query also ranks (cross-batch "
        "memory); 0 is off",
    )
    memory_warmup: int = Field(
        10, ge=0, description="Number of updates before photos enter the memory"
    )
    # batches
    batch_size: int = Field(
        4096, ge=2, description="Images per update; not used by triplet and contrastive"
    )
    classes_per_batch: int | None = Field(
        None, ge=2, description="Number of random classes per batch; none uses all classes"
    )
    crops: CropSettings = CropSettings()
    # optimization
    updates: int = Field(
        200,
        ge=1,
        description="Number of updates, over which the learning rate decreases to zero",
    )
    minutes: float | None = Field(
        None,
        gt=0,
        description="Maximum duration of the run in minutes: if it would take longer, it has fewer "
        "validations and updates, smaller crops or smaller batches",
    )
    learning_rate: float = Field(1e-4, gt=0, description="Initial learning rate of Adam")
    warmup: int = Field(
        0, ge=0, description="Number of updates at the start during which the learning rate rises"
    )
    layer_decay: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Learning rate of each layer of the backbone, as a multiple of the rate of the "
        "layer after it, such as 0.75; 1 trains all layers equally",
    )
    weight_decay: float = Field(1e-6, ge=0, description="Weight decay (L2 penalty)")
    ema: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Decay per update of a moving average of the weights; every validation "
        "measures the weights and their average, and the run keeps the better ones; 0 is off",
    )
    seed: int = Field(0, ge=0, le=MAX_SEED, description="Seed of batches, crops and random weights")
    # validation
    validate_every: int = Field(10, ge=1, description="Number of updates between two validations")
    patience: int | None = Field(
        None,
        ge=1,
        description="Stop after this many validations without a better mAP; none never stops",
    )
    val_max_side: int | None = Field(
        None,
        ge=32,
        description="Reduce validation photos whose longer side has more pixels than this; none "
        "keeps their size",
    )
    # machine
    device: str = Field(
        "auto",
        description="Device: cpu, cuda, cuda:1, or auto, which uses a GPU if one is available",
    )
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="Precision in which the network computes"
    )
    compile: Literal["auto", "yes", "no"] = Field(
        "auto", description="Compile the network; auto compiles it for long runs on a GPU"
    )
    micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto",
        description="Images whose activations are in memory together; auto measures how many fit",
    )
    workers: int | None = Field(None, ge=0, description="Number of processes that decode photos")
    checkpoint_every: int = Field(10, ge=1, description="Number of updates between two checkpoints")

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, name: str) -> str:
        return check_name("loss", name)

    @field_validator("pooling")
    @classmethod
    def _known_pooling(cls, name: str) -> str:
        return check_name("pooling", name)

    @field_validator("matryoshka", mode="before")
    @classmethod
    def _parsed_lengths(cls, lengths: Any) -> Any:
        return lengths.split(",") if isinstance(lengths, str) else lengths

    @field_validator("memory")
    @classmethod
    def _whole_batches(cls, size: int, info: ValidationInfo) -> int:
        loss = info.data.get("loss")
        if size and loss in ("triplet", "contrastive"):
            raise ValueError(f"the loss {loss} is trained on mined tuples, without a memory")
        return size

    @property
    def mined(self) -> TripletSettings | ContrastiveSettings | None:
        """The settings of the tuples, if the loss needs mined tuples."""
        if self.loss == "triplet":
            return self.triplet
        return self.contrastive if self.loss == "contrastive" else None

    @property
    def rate_factor(self) -> float:
        """Learning rate of the parameters of the loss, as a multiple of that of the network."""
        factors = {
            "proxy-anchor": self.proxy_anchor.rate_factor,
            "hierarchical-ap": self.hierarchical_ap.rate_factor,
        }
        return factors.get(self.loss, 1.0)

    @property
    def images_per_update(self) -> int:
        """Maximum number of images per update."""
        return self.mined.tuples * (2 + self.mined.negatives) if self.mined else self.batch_size


# Groups of settings.
NESTED: dict[str, type[BaseModel]] = {
    "crops": CropSettings,
    "triplet": TripletSettings,
    "contrastive": ContrastiveSettings,
    "proxy_anchor": ProxyAnchorSettings,
    "hierarchical_ap": HierarchicalAPSettings,
    "recall_at_k": RecallAtKSettings,
}


def read_settings(path: str | Path) -> dict[str, Any]:
    """Read settings from a YAML file, check them, and return only those in the file."""
    with requires("train", "a config file"):
        import yaml

    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the config file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InputError(f"{path} must contain settings as lines 'name: value'")
    make_config(content, str(path))
    return content


def make_config(settings: dict[str, Any], file: str | None = None) -> TrainConfig:
    """Check settings and return them as a config.

    Args:
        settings: by name, with groups as dictionaries.
        file: the file they were read from, for error messages.

    Raises:
        InputError: a setting is unknown or has a wrong value.
    """
    try:
        return TrainConfig.model_validate(settings)
    except ValidationError as error:
        first, *others = error.errors()
        inner = NESTED.get(str(first["loc"][0]))
        name = ".".join(str(part) for part in first["loc"][: 2 if inner else 1])
        if first["type"] == "extra_forbidden":
            known = ", ".join((inner or TrainConfig).model_fields)
            where = "" if file is None else f"{file}: "
            raise InputError(
                f"{where}unknown setting {name!r}; the settings are {known}"
            ) from error
        # A setting of several types has an error for each of them.
        same = [other for other in others if other["loc"][:1] == first["loc"][:1] and not inner]
        reasons = [fault["msg"].removeprefix("Value error, ") for fault in (first, *same)]
        # Backticks mark an argument, which the command line shows as a flag; a file has names.
        shown = f"`{name}`" if file is None else f"{file}: {name}"
        expected = "Input should be "
        if not all(reason.startswith(expected) for reason in reasons):
            raise InputError(f"{shown}: {'; '.join(reasons)}") from error
        # Pydantic adds how it failed: "a valid integer, unable to parse string as an integer".
        kinds = [reason.removeprefix(expected).partition(", ")[0] for reason in reasons]
        value = f"{first['input']!r}"
        raise InputError(f"{shown} must be {' or '.join(kinds)}, not {value}") from error


def merge(*layers: dict[str, Any]) -> dict[str, Any]:
    """Merge settings; later ones override earlier ones, also inside groups."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merge(result[key], value) if both else value
    return result
