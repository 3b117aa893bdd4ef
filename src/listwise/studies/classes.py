"""Figure 6: batches of all classes, or of some that are drawn anew each time."""

from listwise.errors import InputError
from listwise.studies.variants import Study, TrainingSet, Variant, whole_number

COUNTS = (8, 16, 32, 64, 128, 256, 512)


def _usual(photos: TrainingSet) -> tuple[str, ...]:
    return (*(str(count) for count in COUNTS if count < photos.classes), "all")


def _variant(word: str, photos: TrainingSet) -> Variant:
    if word == "all":
        return Variant("classes-all", {"classes_per_batch": None}, photos.classes)
    count = whole_number(word)
    if count >= photos.classes:
        raise InputError(
            f"{count} classes a batch are no fewer than the {photos.classes} training classes: "
            "say all"
        )
    return Variant(f"classes-{count}", {"classes_per_batch": count}, count)


STUDY = Study(
    name="classes",
    title="Classes in a batch",
    axis="classes in a batch",
    varies=("classes_per_batch",),
    usual=_usual,
    variant=_variant,
)
