"""The settings of `label`."""

from dataclasses import dataclass

from listwise.errors import InputError

MAX_FEATURES = 951  # as many as 40,000 bytes hold


@dataclass(frozen=True)
class LabelSettings:
    """Thresholds and limits of `label`.

    Attributes:
        inliers: minimum number of inliers of two photos that match. Lower values keep more photos;
            below 8, photos of different things begin to match by chance.
        partners: maximum number of photos that each photo is compared with. More partners connect
            more photos of large classes, and take longer. Without labels `label` uses 10 by
            default.
        min_photos: minimum number of photos of a class; smaller groups are dropped.
        features: maximum number of local features per photo.
        all_groups: keep every group of a class as a class, instead of the largest group only.
        merge: merge classes that show the same thing.
        seed: seed of the random choice of partners.
    """

    inliers: int = 8
    partners: int = 26
    min_photos: int = 2
    features: int = 700
    all_groups: bool = False
    merge: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        lowest = {"inliers": 4, "partners": 2, "min_photos": 2, "features": 50, "seed": 0}
        for name, least in lowest.items():
            if getattr(self, name) < least:
                raise InputError(f"`{name}` must be {least} or more, not {getattr(self, name)}")
        if self.features > MAX_FEATURES:
            raise InputError(
                f"`features` must be {MAX_FEATURES} or less, not {self.features}: more do not fit "
                "into the space of a photo"
            )

    @property
    def strong(self) -> int:
        """Number of inliers from which one match alone may join two groups."""
        return 2 * self.inliers
