"""A benchmark: photos to search in, photos to search for, and what is right."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from listwise.data.labelled import Images, LabelledImages
from listwise.evaluation import JudgedQueries


@dataclass(frozen=True, eq=False)
class Benchmark:
    """Queries to be searched for in a database, and what is right for each.

    `labelled` benchmarks have photos with labels, and every photo of a query's label is right;
    the queries of the others are judged photo by photo. Where `queries is database`, each photo is
    searched among the others.
    """

    name: str
    database: Images
    queries: Images
    judged: JudgedQueries
    labelled: bool = False

    @classmethod
    def of_labels(
        cls, name: str, database: LabelledImages, queries: LabelledImages | None = None
    ) -> "Benchmark":
        """Labelled photos searched among themselves, or other ones searched for in them."""
        asking = database if queries is None else queries
        # Names of classes: numbers of two parts of a set need not agree.
        labels, others = (np.array(part.class_names)[part.labels] for part in (asking, database))
        judged = JudgedQueries.labelled(
            labels,
            None if queries is None else others,
            names=database.ids,
            queries=asking.ids,
            boxes=asking.boxes,
        )
        return cls(name, database, asking, judged, labelled=True)

    @property
    def photo_count(self) -> int:
        """Number of photos that a model describes to be evaluated on this benchmark."""
        return len(self.database) + (0 if self.queries is self.database else len(self.queries))

    def subset(self, queries: ArrayLike, database: ArrayLike) -> "Benchmark":
        """Some queries among some photos of the database, both given by their positions."""
        kept = self.database.subset(database)
        return replace(
            self,
            database=kept,
            queries=kept if self.queries is self.database else self.queries.subset(queries),
            judged=self.judged.subset(queries, database),
        )
