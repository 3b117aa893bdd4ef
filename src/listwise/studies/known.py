"""The studies that train, by name."""

from listwise.studies import balance, batch_size, bins, classes, losses, ties
from listwise.studies.variants import Study

STUDIES: dict[str, Study] = {
    module.STUDY.name: module.STUDY for module in (losses, bins, batch_size, classes, balance, ties)
}
