"""`Benchmark`: a database, queries, and the ground truth."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from listwise.data.labelled import Images, LabelledImages
from listwise.evaluation import JudgedQueries


@dataclass(frozen=True, eq=False)
class Benchmark:
    """A database of N photos, Q queries, and the positives of each query.

    If `queries is database`, each photo is searched among the others.

    Attributes:
        name: name of the benchmark.
        database: the N photos to search in.
        queries: the Q photos to search with, which may have boxes.
        judged: the ground truth of the Q queries.
        labelled: whether the positives are the photos with the query's label; otherwise they are
            listed for each query.
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
        """Create a benchmark from labels: photos searched among themselves, or separate queries."""
        searched = database if queries is None else queries
        # By class names, because the class numbers of two parts may differ.
        labels, others = (np.array(part.class_names)[part.labels] for part in (searched, database))
        judged = JudgedQueries.labelled(
            labels,
            None if queries is None else others,
            names=database.ids,
            queries=searched.ids,
            boxes=searched.boxes,
        )
        return cls(name, database, searched, judged, labelled=True)

    @property
    def photo_count(self) -> int:
        """Number of photos that a model has to describe for this benchmark."""
        return len(self.database) + (0 if self.queries is self.database else len(self.queries))

    def subset(self, queries: ArrayLike, database: ArrayLike) -> "Benchmark":
        """Return the queries and database photos at these positions."""
        kept = self.database.subset(database)
        return replace(
            self,
            database=kept,
            queries=kept if self.queries is self.database else self.queries.subset(queries),
            judged=self.judged.subset(queries, database),
        )
