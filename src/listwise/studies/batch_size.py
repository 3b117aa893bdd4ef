"""Figure 5: the batch size B, at an equal number of images seen."""

from listwise.errors import InputError
from listwise.studies.variants import Study, TrainingSet, Variant, whole_number

SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def _usual(photos: TrainingSet) -> tuple[str, ...]:
    return tuple(str(size) for size in SIZES if size <= photos.photos)


def _variant(word: str, photos: TrainingSet) -> Variant:
    size = whole_number(word)
    if size > photos.photos:
        raise InputError(f"a batch of {size} is larger than the {photos.photos} training photos")
    return Variant(f"batch-{size}", {"batch_size": size}, size)


STUDY = Study(
    name="batch-size",
    title="Batch size",
    axis="batch size B",
    varies=("batch_size",),
    usual=_usual,
    variant=_variant,
)
