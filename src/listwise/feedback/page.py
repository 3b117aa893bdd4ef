"""Show the comparison of two models: as text, and as a page of the marked queries."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from listwise.data.labelled import LabelledImages
from listwise.feedback.comparison import SHOWN, ComparedResult, Comparison, QueryComparison
from listwise.feedback.run import IndexRun
from listwise.results.report.queries import Frame, ShownPhoto, ShownQuery, write_queries

QUERIES = 100
"""Maximum number of queries on the page."""
NOTE = (
    "Marked queries, those whose average precision falls most first. Results with a green frame "
    "show the same thing, those with a red frame are marked as different."
)
_FRAMES: dict[str, Frame] = {"same": "green", "different": "red", "": ""}


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
    shown = [_shown(query, paths) for query in found.queries[:QUERIES]]
    return write_queries(path, f"The model of {found.index} and a new one", facts, NOTE, shown)


def _shown(query: QueryComparison, paths: Mapping[str, str]) -> ShownQuery:
    side = "held out" if query.held_out else "trained on"
    lists = {
        _heading("old", query.old_ap): [_photo(hit, paths) for hit in query.old],
        _heading("new", query.new_ap): [_photo(hit, paths) for hit in query.new],
    }
    return ShownQuery(ShownPhoto(paths[query.query], query.query), side, lists)


def _heading(model: str, ap: float | None) -> str:
    return f"{model} model" if ap is None else f"{model} model, AP {100 * ap:.1f}"


def _photo(hit: ComparedResult, paths: Mapping[str, str]) -> ShownPhoto:
    return ShownPhoto(paths[hit.id], f"{hit.score:.3f} {hit.id}", _FRAMES[hit.mark])
