"""Compare the model of an index with a new one, on held-out classes and on marked queries."""

from collections.abc import Container, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from listwise.data.labelled import LabelledImages
from listwise.descriptors import Model
from listwise.errors import InputError
from listwise.evaluation import compare_ap
from listwise.feedback.ranking import Ranking
from listwise.feedback.run import DESCRIPTOR_FILE, LAYER_FILE, IndexRun, read_tensor
from listwise.files import write_text

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

    Each photo is ranked among the labelled and marked photos of the run; after the training of a
    linear layer also among the other entries of the index, at most 10,000 of them. What these show
    is not known, and they count as negatives.

    Attributes:
        index: the folder or address of the index.
        photos: the number of photos of held-out classes that have another photo of their class.
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
    record: IndexRun, old: Model, new: Model, images: LabelledImages, layer: Path | None = None
) -> Comparison:
    """Compare two models on the photos of a run.

    Args:
        record: what the run took from the index.
        old: the model of the index.
        new: the trained model.
        images: the photos of the run; the split "val" was held out.
        layer: the folder of a run that trained a linear layer on known descriptors; both models
            describe the photos if it is None.
    """
    before, after = _rankings(record, old, new, images, layer)
    held_out = np.array(images.splits) == "val"
    sizes = images.class_sizes()
    photos = [int(i) for i in np.flatnonzero(held_out) if sizes[images.labels[i]] > 1]
    labels = images.labels[photos]
    old_ap, new_ap = ([ranking.ap(i) for i in photos] for ranking in (before, after))
    gain = compare_ap(new_ap, old_ap, labels)
    queries = _compare_queries(record, images, held_out, before, after)
    found = Comparison(
        index=record.index,
        photos=len(photos),
        classes=len(np.unique(labels)),
        old_map=float(np.mean(old_ap)),
        new_map=float(np.mean(new_ap)),
        error=gain.error if np.isfinite(gain.error) else None,
        queries=tuple(sorted(queries, key=_loss_first)),
        better=False,
    )
    marked = found.marked_maps
    kept = marked is None or marked[1] >= marked[0] - 1e-9
    return found.model_copy(update={"better": gain.value > 0 and kept})


def _loss_first(query: QueryComparison) -> tuple[float, str]:
    return (query.new_ap or 0.0) - (query.old_ap or 0.0), query.query


def _rankings(
    record: IndexRun, old: Model, new: Model, images: LabelledImages, layer: Path | None
) -> tuple[Ranking, Ranking]:
    """The photos of a run with the descriptors of both models."""
    if layer is not None:
        place = {photo: row for row, photo in enumerate(record.ids)}
        rows = read_tensor(layer, DESCRIPTOR_FILE, "descriptors")
        rows = rows[[*(place[photo] for photo in images.ids), *range(len(place), len(rows))]]
        matrix = read_tensor(layer, LAYER_FILE, "layer")
        return Ranking(rows, images.labels), Ranking.of(rows, images.labels, matrix)
    how = record.settings.arguments()
    both = [model.describe(images, **how) for model in (old, new)]
    if len(both[0].kept) != len(images):
        raise InputError(f"photos cannot be read any more: {both[0].errors[0]}")
    one, other = (Ranking(found.descriptors, images.labels) for found in both)
    return one, other


def _compare_queries(
    record: IndexRun,
    images: LabelledImages,
    held_out: NDArray[np.bool_],
    before: Ranking,
    after: Ranking,
) -> list[QueryComparison]:
    place = {photo: i for i, photo in enumerate(images.ids)}
    ids = [*images.ids, *(photo for photo, _ in record.others)]
    return [
        QueryComparison(
            query=each.query,
            held_out=bool(held_out[place[each.query]]),
            old_ap=_known(before.ap(place[each.query])),
            new_ap=_known(after.ap(place[each.query])),
            old=_first_results(before, place[each.query], ids, set(each.different)),
            new=_first_results(after, place[each.query], ids, set(each.different)),
        )
        for each in record.queries
        if each.query in place
    ]


def _known(ap: float) -> float | None:
    return None if np.isnan(ap) else ap


def _first_results(
    ranking: Ranking, own: int, ids: Sequence[str], different: Container[str]
) -> tuple[ComparedResult, ...]:
    scores, same = ranking.scores(own), ranking.relevance(own)
    shown = []
    for i in np.argsort(-scores, kind="stable")[: min(SHOWN, len(ids) - 1)]:
        mark: Relation = "same" if same[i] else "different" if ids[i] in different else ""
        shown.append(ComparedResult(id=ids[i], score=float(scores[i]), mark=mark))
    return tuple(shown)
