"""Compare the model of an index with a new one, on held-out classes and on marked queries."""

from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from listwise.data.labelled import LabelledImages
from listwise.descriptors import Model
from listwise.errors import InputError
from listwise.evaluation import average_precision, compare_ap, evaluate_labelled
from listwise.feedback.photos import MarkedPhotos
from listwise.feedback.run import DESCRIPTOR_FILE, LAYER_FILE, IndexRun, read_tensor
from listwise.files import write_text
from listwise.search.entries import Float32

COMPARISON_FILE = "comparison.json"
SHOWN = 10
"""Number of results per query that are compared and shown."""

Relation = Literal["same", "different", ""]


class ComparedResult(BaseModel):
    """A result of a query: the photo, its score, and how it was marked or labelled."""

    model_config = ConfigDict(frozen=True)

    id: str
    score: float
    mark: Relation


class QueryComparison(BaseModel):
    """A marked query with both models.

    Attributes:
        query: the id of the query.
        held_out: whether its class was not trained on.
        old_ap: its average precision with the model of the index; None if no other photo shows the
            same thing.
        new_ap: its average precision with the new model.
        old: its first results with the model of the index, best first.
        new: its first results with the new model.
    """

    model_config = ConfigDict(frozen=True)

    query: str
    held_out: bool
    old_ap: float | None
    new_ap: float | None
    old: tuple[ComparedResult, ...]
    new: tuple[ComparedResult, ...]


class Comparison(BaseModel):
    """The model of an index against a new one, both with the settings of the index.

    Each photo is searched among the labelled and marked photos of the run.

    Attributes:
        index: the folder or address of the index.
        photos: the number of photos of held-out classes.
        classes: the number of these classes.
        old_map: mAP of the model of the index on them.
        new_map: mAP of the new model on them.
        error: the standard error of the difference; None if it is not known.
        queries: the marked queries; those whose AP falls most come first.
        better: whether the new model is better: a higher mAP on held-out classes, and on the marked
            queries no lower one.
    """

    model_config = ConfigDict(frozen=True)

    index: str
    photos: int
    classes: int
    old_map: float
    new_map: float
    error: float | None
    queries: tuple[QueryComparison, ...]
    better: bool

    @property
    def marked_maps(self) -> tuple[float, float] | None:
        """MAP of the marked queries with the old and the new model; None without such queries."""
        pairs = [(q.old_ap, q.new_ap) for q in self.queries if q.old_ap is not None]
        if not pairs:
            return None
        old, new = np.array(pairs, np.float64).mean(axis=0).tolist()
        return old, new

    def wrong(self, model: Literal["old", "new"]) -> int:
        """Count the photos among the first ten results that are marked "different"."""
        return sum(hit.mark == "different" for q in self.queries for hit in getattr(q, model))

    def save(self, run: Path) -> None:
        """Write `comparison.json` into the folder of a run."""
        write_text(run / COMPARISON_FILE, self.model_dump_json(indent=2) + "\n")


def read_comparison(run: Path) -> Comparison | None:
    """Read the comparison of a run; None if it was not made yet."""
    path = run / COMPARISON_FILE
    if not path.exists():
        return None
    try:
        return Comparison.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise InputError(f"{path} is damaged: delete it, and resume the run") from error


def compare_models(
    run: Path, record: IndexRun, old: Model, new: Model, images: LabelledImages
) -> Comparison:
    """Compare two models on the photos of a run.

    Args:
        run: the folder of the run.
        record: what the run took from the index.
        old: the model of the index.
        new: the trained model.
        images: the photos of the run; the split "val" was held out.
    """
    before, after = _descriptors(run, record, old, new, images)
    held_out = np.array(images.splits) == "val"
    photos = np.flatnonzero(held_out)
    labels = images.labels[photos]
    old_ap, new_ap = (_labelled_ap(rows[photos], labels) for rows in (before, after))
    gain = compare_ap(new_ap, old_ap, labels)
    queries = _compare_queries(record.queries, images, held_out, before, after)
    found = Comparison(
        index=record.index,
        photos=len(photos),
        classes=len(np.unique(labels)),
        old_map=float(np.nanmean(old_ap)),
        new_map=float(np.nanmean(new_ap)),
        error=gain.error if np.isfinite(gain.error) else None,
        queries=tuple(sorted(queries, key=_loss_first)),
        better=False,
    )
    marked = found.marked_maps
    kept = marked is None or marked[1] >= marked[0] - 1e-9
    return found.model_copy(update={"better": gain.value > 0 and kept})


def _loss_first(query: QueryComparison) -> tuple[float, str]:
    return (query.new_ap or 0.0) - (query.old_ap or 0.0), query.query


def _descriptors(
    run: Path, record: IndexRun, old: Model, new: Model, images: LabelledImages
) -> tuple[Float32, Float32]:
    """Descriptors of the photos of a run with both models, [N, C] and [N, C']."""
    if (run / LAYER_FILE).exists():
        # They are known, because a layer follows the descriptors of the index.
        place = {photo: row for row, photo in enumerate(record.ids)}
        rows = read_tensor(run, DESCRIPTOR_FILE, "descriptors")
        before = rows[[place[photo] for photo in images.ids]]
        after = before @ read_tensor(run, LAYER_FILE, "layer").T
        return before, after / np.linalg.norm(after, axis=1, keepdims=True).clip(1e-12)
    how = record.settings.arguments()
    both = [model.describe(images, **how) for model in (old, new)]
    kept = both[0].kept
    if len(kept) != len(images):
        raise InputError(f"photos cannot be read any more: {both[0].errors[0]}")
    return both[0].descriptors, both[1].descriptors


def _labelled_ap(rows: Float32, labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """The AP of each photo among the others; NaN for a photo without a positive."""
    return np.asarray(evaluate_labelled(rows, labels).per_query_ap, np.float64)


def _compare_queries(
    queries: tuple[MarkedPhotos, ...],
    images: LabelledImages,
    held_out: NDArray[np.bool_],
    before: Float32,
    after: Float32,
) -> list[QueryComparison]:
    place = {photo: i for i, photo in enumerate(images.ids)}
    found = []
    for each in queries:
        if each.query not in place:
            continue
        own = place[each.query]
        (old_ap, old), (new_ap, new) = (
            _ranked(rows, own, images, each) for rows in (before, after)
        )
        found.append(
            QueryComparison(
                query=each.query,
                held_out=bool(held_out[own]),
                old_ap=old_ap,
                new_ap=new_ap,
                old=old,
                new=new,
            )
        )
    return found


def _ranked(
    rows: Float32, own: int, images: LabelledImages, marked: MarkedPhotos
) -> tuple[float | None, tuple[ComparedResult, ...]]:
    """The AP of a query among all photos of the run, and its first results."""
    others = np.delete(np.arange(len(images)), own)
    right = images.labels[others] == images.labels[own]
    scores = rows[others] @ rows[own]
    order = np.argsort(-scores, kind="stable")
    ap = average_precision(scores, right) if right.any() else None
    different = set(marked.different)
    shown = []
    for i in order[:SHOWN]:
        photo = images.ids[others[i]]
        mark: Relation = "same" if right[i] else "different" if photo in different else ""
        shown.append(ComparedResult(id=photo, score=float(scores[i]), mark=mark))
    return ap, tuple(shown)
