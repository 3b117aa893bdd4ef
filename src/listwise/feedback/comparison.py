"""Compare the model of an index with a new one, on held-out classes and on marked queries.

The comparison is shown as text, and as a page of the marked queries.
"""

import shlex
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from listwise.data.labelled import LabelledImages
from listwise.descriptors import Model
from listwise.errors import InputError
from listwise.evaluation import average_precision, compare_ap
from listwise.feedback.photos import DESCRIPTOR_FILE, LAYER_FILE, IndexRun, read_tensor
from listwise.pages.photos import Frame, ShownPhoto, ShownQuery, write_queries
from listwise.search.entries import Float32

COMPARISON_FILE = "comparison.json"
SHOWN = 10
"""Number of results per query that are compared and shown."""
QUERIES = 100
"""Maximum number of queries on the page."""
NOTE = (
    "Marked queries, those whose average precision falls most first. Results with a green frame "
    "show the same thing, those with a red frame are marked as different."
)
_FRAMES: dict[str, Frame] = {"same": "green", "different": "red", "": ""}

Relation = Literal["same", "different", ""]
Labels = NDArray[np.int64]


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


def read_comparison(run: Path) -> Comparison | None:
    """Read the comparison of a run; None if it was not made yet."""
    path = run / COMPARISON_FILE
    if not path.exists():
        return None
    try:
        return Comparison.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise InputError(f"{path} is damaged: delete it, and resume the run") from error


@dataclass(frozen=True, eq=False)
class Ranking:
    """Descriptors of photos that are ranked for each other.

    Photos after the labelled ones have no label. They count as negatives, since what they show is
    not known.

    Attributes:
        rows: descriptors [P, C], unit rows.
        labels: the labels of the first N photos [N].
    """

    rows: Float32
    labels: Labels

    @classmethod
    def of(cls, rows: Float32, labels: Labels, layer: Float32) -> "Ranking":
        """Rank descriptors [P, C] that are multiplied by a layer [C, C] first."""
        product = rows @ layer.T
        return cls(product / np.linalg.norm(product, axis=1, keepdims=True).clip(1e-12), labels)

    def scores(self, photo: int) -> Float32:
        """The scores of all photos for one of them [P]; its own score is the lowest."""
        found: Float32 = self.rows @ self.rows[photo]
        found[photo] = -np.inf
        return found

    def relevance(self, photo: int) -> NDArray[np.bool_]:
        """Which photos show the same thing as one of them [P], without itself."""
        found = np.zeros(len(self.rows), bool)
        found[: len(self.labels)] = self.labels == self.labels[photo]
        found[photo] = False
        return found

    def ap(self, photo: int) -> float:
        """The average precision of a photo; NaN if no other photo shows the same thing.

        Of photos with equal scores, those that show the same thing come last. Otherwise a network
        that describes all photos alike could seem better than another one.
        """
        relevant = self.relevance(photo)
        if not relevant.any():
            return np.nan
        order = np.argsort(relevant, kind="stable")
        return average_precision(self.scores(photo)[order], relevant[order])


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
        queries=tuple(sorted(queries, key=lambda q: ((q.new_ap or 0) - (q.old_ap or 0), q.query))),
        better=False,
    )
    marked = found.marked_maps
    kept = marked is None or marked[1] >= marked[0] - 1e-9
    return found.model_copy(update={"better": gain.value > 0 and kept})


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
    found = []
    for each in record.queries:
        if each.query in place:
            own = place[each.query]
            positives = before.relevance(own).any()
            found.append(
                QueryComparison(
                    query=each.query,
                    held_out=bool(held_out[own]),
                    old_ap=before.ap(own) if positives else None,
                    new_ap=after.ap(own) if positives else None,
                    old=_first_results(before, own, ids, each.different),
                    new=_first_results(after, own, ids, each.different),
                )
            )
    return found


def _first_results(
    ranking: Ranking, own: int, ids: Sequence[str], different: Container[str]
) -> tuple[ComparedResult, ...]:
    scores, same = ranking.scores(own), ranking.relevance(own)
    shown = []
    for i in np.argsort(-scores, kind="stable")[: min(SHOWN, len(ids) - 1)]:
        mark: Relation = "same" if same[i] else "different" if ids[i] in different else ""
        shown.append(ComparedResult(id=ids[i], score=float(scores[i]), mark=mark))
    return tuple(shown)


def comparison_rows(found: Comparison) -> list[tuple[str, str, str, str]]:
    """Return the rows of a table: what was measured, the old model, the new one, the difference."""
    error = "" if found.error is None else f" ± {100 * found.error:.1f}"
    held = f"mAP, {found.photos} photos of {found.classes} held-out classes"
    rows = [_percent(held, found.old_map, found.new_map, error)]
    marked = found.marked_maps
    if marked is not None:
        count = sum(query.old_ap is not None for query in found.queries)
        rows.append(_percent(f"mAP, {count} marked queries", *marked))
    if found.queries:
        old, new = found.wrong("old"), found.wrong("new")
        name = f'marked "different" among the first {SHOWN}'
        rows.append((name, str(old), str(new), f"{new - old:+d}"))
    return rows


def _percent(name: str, old: float, new: float, error: str = "") -> tuple[str, str, str, str]:
    return name, f"{100 * old:.1f}", f"{100 * new:.1f}", f"{100 * (new - old):+.1f}{error}"


def conclusion(found: Comparison, model: Path) -> str:
    """Return the sentence that names the better model and the next command."""
    if found.better:
        command = ["listwise", "index", "upgrade", found.index, "--model", str(model)]
        return f"the new model is better: {shlex.join(command)}"
    return (
        f"the new model is not better, so {model} is the model that {found.index} has already: "
        "mark or label more photos, or train with other settings"
    )


def write_comparison_page(
    path: Path, record: IndexRun, found: Comparison, images: LabelledImages
) -> Path:
    """Write an HTML page with the results of the marked queries, old and new."""
    facts = {name: f"{old} → {new}" for name, old, new, _ in comparison_rows(found)}
    facts["Better model"] = "the new one" if found.better else "the one of the index"
    paths = dict(record.others) | dict(zip(images.ids, images.paths, strict=True))
    shown = []
    for query in found.queries[:QUERIES]:
        sides = (("old", query.old_ap, query.old), ("new", query.new_ap, query.new))
        lists = {
            f"{model} model" + ("" if ap is None else f", AP {100 * ap:.1f}"): [
                ShownPhoto(paths[hit.id], f"{hit.score:.3f} {hit.id}", _FRAMES[hit.mark])
                for hit in hits
            ]
            for model, ap, hits in sides
        }
        side = "held out" if query.held_out else "trained on"
        shown.append(ShownQuery(ShownPhoto(paths[query.query], query.query), side, lists))
    return write_queries(path, f"The model of {found.index} and a new one", facts, NOTE, shown)
