"""Figure 7: every class of a batch with the same weight, or every image."""

from listwise.studies.variants import Study, words_of

VARIANTS = {"weighted": {"class_weights": True}, "unweighted": {"class_weights": False}}

STUDY = Study(
    name="balance",
    title="Class weights",
    varies=("class_weights",),
    known=tuple(VARIANTS),
    usual=lambda photos: tuple(VARIANTS),
    variant=words_of(VARIANTS),
)
