"""Figure 4: the number of bins M of the score axis."""

from listwise.studies.variants import Study, Variant, whole_number

STUDY = Study(
    name="bins",
    title="Number of quantization bins",
    axis="bins M",
    varies=("bins",),
    usual=lambda photos: ("5", "10", "20", "50", "100"),
    variant=lambda word, photos: Variant(
        f"bins-{word}", {"bins": whole_number(word)}, whole_number(word)
    ),
)
