"""Definitions of the studies that train: what each one varies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from listwise.errors import InputError
from listwise.settings import ContrastiveSettings, TrainConfig, TripletSettings, make_config

# Settings that the study chooses: schedules in updates, which differ between variants, and seeds.
SCHEDULE = ("updates", "warmup", "validate_every", "patience", "checkpoint_every", "seed")


class TrainingSet(NamedTuple):
    """Number of training photos and of training classes, and the batch size of all runs."""

    photos: int
    classes: int
    batch_size: int = TrainConfig().batch_size


@dataclass(frozen=True)
class Variant:
    """One variant of a study: its name, and the settings in which it differs.

    `value` is its number on the axis of the study, if the study has an axis. `effort` is the number
    of its training images as a multiple of the number that the study gives to each run.
    """

    name: str
    settings: dict[str, Any]
    value: int | None = None
    effort: float = 1.0


@dataclass(frozen=True)
class Study:
    """A comparison of training runs that differ in one setting.

    Attributes:
        name: name on the command line.
        title: heading of its table and plot.
        about: one-line description of what it compares.
        words: help text for the names of its variants.
        words_default: text for the default variants in the help.
        varies: settings that the study chooses, with dots for nested settings.
        usual: returns the variants compared by default.
        variant: returns the variant with a name.
        axis: label of the axis, if the variants are numbers.
        known: all variants, if they are names.
    """

    name: str
    title: str
    about: str
    words: str
    words_default: str
    varies: tuple[str, ...]
    usual: Callable[[TrainingSet], Sequence[str]]
    variant: Callable[[str, TrainingSet], Variant]
    axis: str | None = None
    known: tuple[str, ...] = ()

    def variants(self, words: Sequence[str] | None, photos: TrainingSet) -> list[Variant]:
        """Return the variants with these names; None for the default ones, "all" for all."""
        if words is None:
            words = self.usual(photos)
        elif self.known and list(words) == ["all"]:
            words = self.known
        for word in words:
            if self.known and word not in self.known:
                raise InputError(
                    f"{self.name} has no variant {word!r}: choose from {', '.join(self.known)}"
                )
        found = [self.variant(word, photos) for word in words]
        if len({variant.name for variant in found}) < len(found):
            raise InputError(f"`variants` contains a variant twice: {', '.join(words)}")
        for word, variant in zip(words, found, strict=True):
            try:
                make_config(variant.settings)
            except InputError as error:  # the name of the setting is not an argument of the study
                reason = str(error).replace("`", "")
                raise InputError(f"`variants` contains {word!r}: {reason}") from error
        return found


TRIPLETS = (64, 512, 1024)
LOSSES: dict[str, dict[str, Any]] = {
    "ap": {"loss": "ap"},
    **{f"tl-{count}": {"loss": "triplet", "triplet": {"tuples": count}} for count in TRIPLETS},
    "contrastive": {"loss": "contrastive"},
    **{name: {"loss": name} for name in ("tie-aware", "fastap", "smoothap", "multi-similarity")},
}

# Table 1 of the paper: AP has 200 updates of 4096 images, TL-64 has 8192 updates of 64 triplets.
RIVAL_EFFORT = 8192 * 3 * 64 / (200 * 4096)
RIVALS = ("ap", "triplet", "contrastive")

# Number of settings of each loss, its batches and its mining. Losses of whole batches have the
# batch size and: the bins, SmoothAP's temperature, or alpha, beta and base of multi-similarity.
HYPER_PARAMETERS = {
    "ap": 2,
    "tie-aware": 2,
    "triplet": len(TripletSettings.model_fields),
    "contrastive": len(ContrastiveSettings.model_fields),
    "fastap": 2,
    "smoothap": 2,
    "multi-similarity": 4,
}


def _usual_losses(photos: TrainingSet) -> tuple[str, ...]:
    """Return the losses of the paper whose updates need no more images than there are photos."""
    triplets = (f"tl-{count}" for count in TRIPLETS if 3 * count <= max(photos.photos, 3 * 64))
    return ("ap", *triplets, "contrastive")


def _rival(word: str, photos: TrainingSet) -> Variant:
    """Return a loss with the effort that it has in the paper, relative to AP.

    A 64th of the batch size as the number of triplets gives 41 times the updates of AP.
    """
    if word == "ap":
        return Variant(word, {"loss": "ap"})
    settings: dict[str, Any] = {"loss": word}
    if word == "triplet":
        settings["triplet"] = {"tuples": max(1, photos.batch_size // 64)}
    return Variant(word, settings, effort=RIVAL_EFFORT)


def _bins(word: str, photos: TrainingSet) -> Variant:
    bins = _whole_number(word)
    return Variant(f"bins-{bins}", {"bins": bins}, bins)


def _batch_size(word: str, photos: TrainingSet) -> Variant:
    size = _whole_number(word)
    if size > photos.photos:
        raise InputError(
            f"a batch of {size} is larger than the {photos.photos} training photos: "
            "give a smaller batch"
        )
    return Variant(f"batch-{size}", {"batch_size": size}, size)


def _classes(word: str, photos: TrainingSet) -> Variant:
    if word == "all":
        return Variant("classes-all", {"classes_per_batch": None}, photos.classes)
    count = _whole_number(word)
    if count >= photos.classes:
        raise InputError(
            f"{count} classes per batch are not fewer than the {photos.classes} training classes: "
            "give a smaller number, or all"
        )
    return Variant(f"classes-{count}", {"classes_per_batch": count}, count)


def _whole_number(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise InputError(f"`variants` must be whole numbers, not {word!r}") from None


def _named(
    settings: dict[str, dict[str, Any]],
    usual: Callable[[TrainingSet], Sequence[str]] | None = None,
    **study: Any,
) -> Study:
    """Define a study whose variants have names; by default it compares all of them."""
    return Study(
        usual=usual or (lambda photos: tuple(settings)),
        variant=lambda word, photos: Variant(word, settings[word]),
        known=tuple(settings),
        words=f"Variants, separated by commas: {', '.join(settings)}; or all.",
        **{"words_default": ",".join(settings), **study},
    )


def _powers_of_two(first: int, last: int, below: int) -> list[str]:
    return [str(1 << i) for i in range(first, last + 1) if 1 << i < below]


_ALL = (
    _named(
        LOSSES,
        _usual_losses,
        name="losses",
        title="Losses, everything else equal",
        about="Compare the AP loss with triplet and contrastive losses (Table 1).",
        words_default="ap, contrastive, and each tl-COUNT that the photos allow",
        varies=("loss", "triplet.tuples"),
    ),
    Study(
        name="rivals",
        title="Losses, each with the effort of the paper",
        about="Compare losses with the paper's proportions of updates and images (Table 1).",
        words="Losses, separated by commas: ap, triplet, contrastive.",
        words_default="ap,triplet,contrastive",
        varies=("loss", "triplet.tuples"),
        usual=lambda photos: RIVALS,
        variant=_rival,
        known=RIVALS,
    ),
    Study(
        name="bins",
        title="Number of quantization bins",
        about="Compare numbers of quantization bins M (Figure 4).",
        words="Numbers of bins, separated by commas.",
        words_default="5,10,20,50,100",
        axis="bins M",
        varies=("bins",),
        usual=lambda photos: ("5", "10", "20", "50", "100"),
        variant=_bins,
    ),
    Study(
        name="batch-size",
        title="Batch size",
        about="Compare batch sizes B at an equal number of training images (Figure 5).",
        words="Batch sizes, separated by commas.",
        words_default="powers of two from 32 to 8192",
        axis="batch size B",
        varies=("batch_size",),
        usual=lambda photos: _powers_of_two(5, 13, photos.photos + 1),
        variant=_batch_size,
    ),
    Study(
        name="classes",
        title="Classes in a batch",
        about="Compare numbers of classes per batch (Figure 6).",
        words="Numbers of classes, separated by commas; all stands for all classes.",
        words_default="powers of two from 8 to 512, and all",
        axis="classes in a batch",
        varies=("classes_per_batch",),
        usual=lambda photos: (*_powers_of_two(3, 9, photos.classes), "all"),
        variant=_classes,
    ),
    _named(
        {"weighted": {"class_weights": True}, "unweighted": {"class_weights": False}},
        name="balance",
        title="Class weights",
        about="Compare training with and without class weights (Figure 7).",
        varies=("class_weights",),
    ),
    _named(
        {"ap": {"loss": "ap"}, "tie-aware": {"loss": "tie-aware"}},
        name="ties",
        title="AP and tie-aware AP",
        about="Compare quantized AP (mAP_Q) with tie-aware AP (mAP_T) (Figure 8).",
        varies=("loss",),
    ),
)
STUDIES = {study.name: study for study in _ALL}
"""All studies that train, by name."""
