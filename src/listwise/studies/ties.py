"""Figure 8: AP as it is defined (mAP_Q), or the tie-aware form (mAP_T)."""

from listwise.studies.variants import Study, words_of

VARIANTS = {"ap": {"loss": "ap"}, "tie-aware": {"loss": "tie-aware"}}

STUDY = Study(
    name="ties",
    title="AP and tie-aware AP",
    varies=("loss",),
    known=tuple(VARIANTS),
    usual=lambda photos: tuple(VARIANTS),
    variant=words_of(VARIANTS),
)
