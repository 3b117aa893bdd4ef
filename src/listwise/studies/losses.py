"""Table 1: the AP loss and its rivals, at an equal number of images with a gradient."""

from typing import Any

from listwise.settings import ContrastiveSettings, TrainConfig, TripletSettings
from listwise.studies.variants import Study, TrainingSet, words_of

TRIPLETS = (64, 512, 1024)
OTHERS = ("tie-aware", "fastap", "smoothap", "multi-similarity")
LOSSES: dict[str, dict[str, Any]] = {
    "ap": {"loss": "ap"},
    **{f"tl-{count}": {"loss": "triplet", "triplet": {"tuples": count}} for count in TRIPLETS},
    "contrastive": {"loss": "contrastive"},
    **{name: {"loss": name} for name in OTHERS},
}

# Of the loss, its batches and its mining. The batch size is one of each loss of whole batches; the
# others are the bins, SmoothAP's temperature, and alpha, beta and base of multi-similarity.
HYPER_PARAMETERS = {
    "ap": 2,
    "tie-aware": 2,
    "triplet": len(TripletSettings.model_fields),
    "contrastive": len(ContrastiveSettings.model_fields),
    "fastap": 2,
    "smoothap": 2,
    "multi-similarity": 4,
}


def hyper_parameters(config: TrainConfig) -> int:
    """How many settings the config's loss has, with its batches and its mining."""
    return HYPER_PARAMETERS[config.loss]


def _usual(photos: TrainingSet) -> tuple[str, ...]:
    """The paper's; no update sees more images than there are."""
    triplets = (f"tl-{count}" for count in TRIPLETS if 3 * count <= max(photos.photos, 3 * 64))
    return ("ap", *triplets, "contrastive")


STUDY = Study(
    name="losses",
    title="Losses, everything else equal",
    varies=("loss", "triplet.tuples"),
    known=tuple(LOSSES),
    usual=_usual,
    variant=words_of(LOSSES),
)
