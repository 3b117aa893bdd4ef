"""The settings of training and of an extraction, in a module that is fast to import.

`TrainConfig()` is the recipe of the paper (section 4.2).
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from listwise.errors import InputError, validated
from listwise.optional import requires
from listwise.plugins import check_name

Precision = Literal["float32", "bfloat16"]
MAX_SEED = 2**32 - 1  # the largest that every random number generator in use accepts


class _Settings(BaseModel):
    """Settings that are checked and cannot be changed; help texts are the docstrings of fields."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        for field in cls.model_fields.values():
            field.description = " ".join((field.description or "").split())


class CropSettings(_Settings):
    """Settings of the random training crops; the default size is the paper's.

    A crop is a rotated rectangle inside the photo, so crops contain no padding.
    """

    size: int = Field(800, ge=8, le=8192)
    """Side of the square training crops, in pixels"""
    min_area: float = Field(0.5, gt=0, le=1)
    """Minimum area of a crop, as a fraction of the largest crop that fits"""
    max_area: float = Field(1.0, gt=0, le=1)
    """Maximum area of a crop, as a fraction of the largest crop that fits"""
    max_ratio: float = Field(4 / 3, ge=1, le=4)
    """Maximum ratio of the longer to the shorter side of a crop"""
    rotation: float = Field(10.0, ge=0, le=180)
    """Maximum rotation of a crop, in degrees"""
    brightness: float = Field(0.3, ge=0, lt=1)
    """Maximum change of the brightness, as a fraction"""
    contrast: float = Field(0.3, ge=0, lt=1)
    """Maximum change of the contrast, as a fraction"""
    saturation: float = Field(0.3, ge=0, le=1)
    """Maximum change of the saturation, as a fraction"""
    hue: float = Field(0.02, ge=0, le=0.5)
    """Maximum shift of the hue, as a fraction of the color circle"""
    flip: float = Field(0.0, ge=0, le=1)
    """Probability of flipping a crop horizontally"""

    @model_validator(mode="after")
    def _areas_in_order(self) -> Self:
        if self.min_area > self.max_area:
            raise ValueError(f"min_area {self.min_area} is larger than max_area {self.max_area}")
        return self

    @property
    def min_side(self) -> int:
        """Minimum shorter side of a photo for which no upright square crop is enlarged."""
        return math.ceil(self.size / math.sqrt(self.min_area))


class TripletSettings(_Settings):
    """Settings of the triplet loss and its mining; defaults of Gordo et al. (2017)."""

    tuples: int = Field(64, ge=1)
    """Number of triplets per update"""
    form: Literal["margin", "log-exp"] = "margin"
    """Form of the triplet loss: margin (a hinge) or log-exp (its smooth form)"""
    margin: float = Field(0.1, ge=0)
    """Margin of the triplet loss, as a squared distance"""
    pool: int = Field(5000, ge=3)
    """Number of photos from which triplets are mined"""
    refresh: int = Field(4096, ge=1)
    """Number of triplets between two rounds of mining"""
    hardest: int = Field(25, ge=1)
    """Number of hardest triplets per query from which one is drawn"""
    negatives: ClassVar[int] = 1
    """Number of negatives per query"""


class ContrastiveSettings(_Settings):
    """Settings of the contrastive loss and its mining; defaults of Radenović et al. (2018)."""

    tuples: int = Field(5, ge=1)
    """Number of queries per update, each with its positive and negatives"""
    margin: float = Field(0.85, gt=0)
    """Distance above which a negative adds nothing to the loss"""
    negatives: int = Field(5, ge=1)
    """Number of negatives per query, each of a different class"""
    pool: int = Field(20_000, ge=2)
    """Number of photos from which negatives are mined"""
    refresh: int = Field(2000, ge=1)
    """Number of queries between two rounds of mining"""


class ProxyAnchorSettings(_Settings):
    """Settings of the Proxy-Anchor loss; defaults of Kim et al. (2020)."""

    margin: float = 0.1
    """Margin of the cosine between an image and a proxy"""
    scale: float = Field(32.0, gt=0)
    """Factor of the cosines in the exponents"""
    rate_factor: float = Field(100.0, gt=0)
    """Learning rate of the proxies, as a multiple of the learning rate of the network"""


class HierarchicalAPSettings(_Settings):
    """Settings of the hierarchical AP loss; defaults of Ramzi et al. (2022)."""

    alpha: float = Field(1.0, ge=0)
    """Exponent of the relevance: larger values make images that share only the coarse levels of a
    label less relevant"""
    clustering: float = Field(0.1, ge=0, le=1)
    """Weight of the clustering term, from 0 to 1"""
    rate_factor: float = Field(100.0, gt=0)
    """Learning rate of the vectors of the clustering term, as a multiple of the learning rate of
    the network"""


class RecallAtKSettings(_Settings):
    """Settings of the Recall@k loss; Patel et al. (2022)."""

    virtual: int = Field(0, ge=0)
    """Maximum number of virtual examples per class and batch (similarity mixup); 0 is off"""


class TrainConfig(_Settings):
    """All settings of a training run; the defaults are the paper's (section 4.2)."""

    # data
    val_fraction: float = Field(0.1, ge=0, lt=1)
    """Fraction of the classes to validate on, if the photos have no split; 0 trains on all photos,
    and validates on a part of them"""
    split_column: str = "split"
    """Column of the table that contains train or val"""
    strict: bool = False
    """Stop at the first photo that cannot be read"""
    # network
    backbone: str = "resnet101"
    """Name of a timm model"""
    pooling: str = "gem"
    """Pooling: gem, mac, spoc, rmac, crow, cls, cls+gem, or one of an installed package; cls is the
    class token of a transformer"""
    projection: int | None = Field(None, ge=1)
    """Number of dimensions of a linear layer after the pooling; none adds no layer"""
    weights: str = "auto"
    """Initial weights: auto, pretrained, imagenet-package, random, or a file"""
    lora: int | None = Field(None, ge=1)
    """Rank of LoRA: train low-rank changes of the linear layers of a transformer, whose own weights
    are frozen; none trains all weights"""
    lora_alpha: float = Field(16.0, gt=0)
    """Size of the changes of LoRA, which are multiplied by alpha / rank"""
    adapter: bool = False
    """Train only a linear layer on the descriptors of the frozen network, which are computed
    once"""
    # loss
    teacher: str | None = None
    """Model whose descriptors the network learns to compute, without the loss; an index of that
    model then accepts queries of the network"""
    loss: str = "ap"
    """Loss: ap, tie-aware, triplet, contrastive, fastap, smoothap, recall-at-k, infonce, roadmap,
    multi-similarity, proxy-anchor, hierarchical-ap, or one of an installed package"""
    bins: int = Field(20, ge=2)
    """Number of quantization bins of the losses ap and tie-aware"""
    class_weights: bool = True
    """Weight all classes of a batch equally; not used by triplet and contrastive"""
    triplet: TripletSettings = TripletSettings()
    contrastive: ContrastiveSettings = ContrastiveSettings()
    proxy_anchor: ProxyAnchorSettings = ProxyAnchorSettings()
    hierarchical_ap: HierarchicalAPSettings = HierarchicalAPSettings()
    recall_at_k: RecallAtKSettings = RecallAtKSettings()
    matryoshka: list[Annotated[int, Field(ge=1)]] = []
    """Shorter lengths of the descriptors to train too, such as 512,128,64; after training,
    descriptors can be cut to these lengths"""
    memory: int = Field(0, ge=0)
    """Number of photos of earlier batches that each query also ranks (cross-batch memory); 0 is
    off"""
    memory_warmup: int = Field(10, ge=0)
    """Number of updates before photos enter the memory"""
    # batches
    batch_size: int = Field(4096, ge=2)
    """Images per update; not used by triplet and contrastive"""
    classes_per_batch: int | None = Field(None, ge=2)
    """Number of random classes per batch; none uses all classes"""
    crops: CropSettings = CropSettings()
    # optimization
    updates: int = Field(200, ge=1)
    """Number of updates, over which the learning rate decreases to zero"""
    minutes: float | None = Field(None, gt=0)
    """Maximum duration of the run in minutes: if it would take longer, it has fewer validations and
    updates, smaller crops or smaller batches"""
    learning_rate: float = Field(1e-4, gt=0)
    """Initial learning rate of Adam"""
    warmup: int = Field(0, ge=0)
    """Number of updates at the start during which the learning rate rises"""
    layer_decay: float = Field(1.0, gt=0, le=1)
    """Learning rate of each layer of the backbone, as a multiple of the rate of the layer after it,
    such as 0.75; 1 trains all layers equally"""
    weight_decay: float = Field(1e-6, ge=0)
    """Weight decay (L2 penalty)"""
    ema: float = Field(0.0, ge=0, lt=1)
    """Decay per update of a moving average of the weights; every validation measures the weights
    and their average, and the run keeps the better ones; 0 is off"""
    seed: int = Field(0, ge=0, le=MAX_SEED)
    """Seed of batches, crops and random weights"""
    # validation
    validate_every: int = Field(10, ge=1)
    """Number of updates between two validations"""
    patience: int | None = Field(None, ge=1)
    """Stop after this many validations without a better mAP; none never stops"""
    val_max_side: int | None = Field(None, ge=32)
    """Longer side in pixels to which larger photos are reduced in validation; 0 keeps their size.
    After training, other sizes are tried, and the best is stored with the model"""
    # machine
    device: str = "auto"
    """Device: cpu, cuda, cuda:1, or auto, which uses a GPU if one is available"""
    precision: Precision = "float32"
    """Precision in which the network computes"""
    compile: Literal["auto", "yes", "no"] = "auto"
    """Compile the network; auto compiles it for long runs on a GPU"""
    micro_batch: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Images whose activations are in memory together; auto measures how many fit"""
    workers: int | None = Field(None, ge=0)
    """Number of processes that decode photos"""
    checkpoint_every: int = Field(10, ge=1)
    """Number of updates between two checkpoints"""

    @field_validator("loss", "pooling")
    @classmethod
    def _known_name(cls, name: str, info: ValidationInfo) -> str:
        return check_name("loss" if info.field_name == "loss" else "pooling", name)

    @field_validator("matryoshka", mode="before")
    @classmethod
    def _parsed_lengths(cls, lengths: Any) -> Any:
        return lengths.split(",") if isinstance(lengths, str) else lengths

    @field_validator("val_max_side", mode="before")
    @classmethod
    def _zero_is_original(cls, side: Any) -> Any:
        return None if side in (0, "0") else side

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
    name: type(field.default)
    for name, field in TrainConfig.model_fields.items()
    if isinstance(field.default, BaseModel)
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
    return validated(TrainConfig, settings, file)


def merge(*layers: dict[str, Any]) -> dict[str, Any]:
    """Merge settings; later ones override earlier ones, also inside groups."""
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merge(result[key], value) if both else value
    return result


def check_scales(scales: tuple[float, ...]) -> tuple[float, ...]:
    """Raise a `ValueError` unless the scales can be used."""
    if not scales or not all(0 < scale <= 4 and math.isfinite(scale) for scale in scales):
        raise ValueError("give one or more numbers above 0 and up to 4")
    return scales


class ExtractSettings(_Settings):
    """Everything that the descriptor of a photo depends on besides the model.

    The defaults are those of the paper. `model.describe(images, **settings.arguments())` repeats an
    extraction.
    """

    max_side: int | None = Field(None, ge=1)
    scales: tuple[float, ...] = (1.0,)
    power: float = Field(3.0, gt=0)
    precision: Precision = "float32"

    _usable = field_validator("scales")(check_scales)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `Model.encode` and `Model.describe` for these settings."""
        return {**dict(self), "max_side": self.max_side or 0}

    def size_text(self) -> str:
        """Format size and scales, such as "photos of up to 512 pixels at the scale 1"."""
        scales = ", ".join(f"{scale:g}" for scale in self.scales)
        size = f"photos of up to {self.max_side} pixels" if self.max_side else "photos as they are"
        return f"{size} at the scale{'s' if len(self.scales) > 1 else ''} {scales}"

    def without_precision(self) -> str:
        """Format the settings except the precision, such as "--max-side 1024 --scales 1 --power 3".

        Descriptors can be compared if this text is equal: the precision depends on the machine and
        hardly changes them.
        """
        return as_options(**self.model_dump(exclude={"precision"}))


def as_options(**settings: float | Sequence[float] | None) -> str:
    """Format settings as one types them; None is 0, the original size."""
    lists = {k: value if isinstance(value, Sequence) else [value] for k, value in settings.items()}
    texts = {k: [str(each or 0).removesuffix(".0") for each in lists[k]] for k in lists}
    return " ".join(f"--{k.replace('_', '-')} {','.join(texts[k])}" for k in texts)


class DelfTraining(_Settings):
    """Settings of the training of deep local features (DELF).

    Training has two steps (Noh et al. 2017). First the backbone is fine-tuned as a classifier. Then
    the backbone is frozen, and the attention is trained with a classifier of the weighted features.
    """

    # network
    backbone: str = "resnet50"
    """Name of a timm ResNet"""
    weights: str = "auto"
    """Initial weights: auto, pretrained, random, a weights file, or a model folder, which also sets
    the backbone"""
    hidden: int = Field(512, ge=1)
    """Channels of the first layer of the attention"""
    dim: int = Field(128, ge=1)
    """Dimensions of a descriptor after PCA"""
    # data
    val_fraction: float = Field(0.05, gt=0, lt=1)
    """Fraction of the photos to validate on, at most 1000 photos"""
    crops: CropSettings = CropSettings(size=448)
    """Settings of the training crops"""
    min_scale: float = Field(0.25, gt=0, le=1)
    """Minimum scale of the crops on which the attention is trained"""
    # optimization
    fine_tune: bool = True
    """Fine-tune the backbone first"""
    fine_tune_updates: int = Field(2000, ge=1)
    """Number of updates of fine-tuning"""
    fine_tune_learning_rate: float = Field(1e-4, gt=0)
    """Initial learning rate of Adam in fine-tuning"""
    attention_updates: int = Field(2000, ge=1)
    """Number of updates of the attention"""
    attention_learning_rate: float = Field(1e-3, gt=0)
    """Initial learning rate of Adam for the attention"""
    weight_decay: float = Field(1e-6, ge=0)
    """Weight decay (L2 penalty)"""
    batch_size: int = Field(64, ge=2)
    """Number of crops per update"""
    seed: int = Field(0, ge=0)
    """Seed of crops, batches and random weights"""
    pca_photos: int = Field(500, ge=1)
    """Maximum number of photos from which the PCA is learned"""
    validate_every: int = Field(100, ge=1)
    """Number of updates between two validations"""
    # machine
    device: str = "auto"
    """Device: cpu, cuda, cuda:1, or auto, which uses a GPU if one is available"""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision in which the network computes; auto is bfloat16 on a GPU"""
    workers: Annotated[int, Field(ge=0)] | None = None
    """Number of processes that decode photos; by default from the number of CPU cores"""


class Expansion(_Settings):
    """α query expansion: the number of neighbors and the power of their similarities."""

    k: int = Field(10, ge=1)
    alpha: float = Field(2.0, ge=0)


def make_settings(
    max_side: int | None, scales: tuple[float, ...], power: float, precision: Precision
) -> ExtractSettings:
    """Check the settings; a `max_side` of 0 or None stands for the original size.

    Raises:
        InputError: a setting has a wrong value.
    """
    given = {"max_side": max_side or None, "scales": scales, "power": power}
    return validated(ExtractSettings, given | {"precision": precision})


class LabelSettings(_Settings):
    """Thresholds and limits of `listwise.labeling.label`."""

    inliers: int = Field(8, ge=4)
    """Minimum number of inliers of two photos that match. Lower values keep more photos; below 8,
    photos of different things begin to match by chance"""
    partners: int = Field(26, ge=2)
    """Maximum number of photos that each photo is compared with. More partners connect more photos
    of large classes, and take longer"""
    min_photos: int = Field(2, ge=2)
    """Minimum number of photos of a class; smaller groups are dropped"""
    features: int = Field(700, ge=50, le=951)  # as many as 40,000 bytes hold
    """Maximum number of local features per photo"""
    all_groups: bool = False
    """Keep the smaller groups of a class too, as classes called NAME/2, NAME/3 and so on"""
    merge: bool = False
    """Merge classes that show the same thing"""
    seed: int = Field(0, ge=0)
    """Seed of the random choice of partners"""

    @property
    def strong(self) -> int:
        """Number of inliers from which one match alone may join two groups."""
        return 2 * self.inliers
