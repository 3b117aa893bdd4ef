"""Figure 4: the number of bins M of the score axis."""

from listwise.studies.variants import Study, TrainingSet, Variant, whole_number


def _variant(word: str, photos: TrainingSet) -> Variant:
    bins = whole_number(word)
    return Variant(f"bins-{bins}", {"bins": bins}, bins)


STUDY = Study(
    name="bins",
    title="Number of quantization bins",
    axis="bins M",
    varies=("bins",),
    usual=lambda photos: ("5", "10", "20", "50", "100"),
    variant=_variant,
)
